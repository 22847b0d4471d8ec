"""Answers that nobody looks at before their end: few messages instead of one a token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator
from dataclasses import replace
from itertools import chain

from sglite.protocol import Chunk


async def joined(chunks: AsyncGenerator[Chunk]) -> AsyncGenerator[Chunk]:
    """The first chunk as it comes, for it tells when the answer began; of each sample the others as one at its end."""
    held: defaultdict[int, list[Chunk]] = defaultdict(list)
    first = True
    async for chunk in chunks:
        held[chunk.index].append(chunk)
        if first or chunk.finish is not None:
            yield join(held.pop(chunk.index))
        first = False


def join(chunks: list[Chunk]) -> Chunk:
    """What one chunk in the place of these, of one sample, would say."""
    if len(chunks) == 1:
        return chunks[0]
    return replace(
        chunks[-1],
        text="".join(chunk.text for chunk in chunks),
        ids=tuple(chain.from_iterable(chunk.ids for chunk in chunks)),
        logprobs=tuple(chain.from_iterable(chunk.logprobs for chunk in chunks)),
        prompt_logprobs=tuple(chain.from_iterable(chunk.prompt_logprobs for chunk in chunks)),
    )
