"""The best of several samples: those whose tokens are likeliest on average, under the model's own distribution."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from sglite.protocol import Chunk, GenerateRequest, LogprobParams


async def best_samples(
    generate: Callable[[GenerateRequest], AsyncGenerator[Chunk]], request: GenerateRequest
) -> AsyncGenerator[Chunk]:
    """Draw ``best_of`` samples and hand out the ``n`` best of them, when all have ended.

    The tokens of the others are counted in the usage of the best one: they were computed.
    """
    drawn = request.validate().sampling.best_of
    assert drawn is not None
    sampling = replace(request.sampling, n=drawn, best_of=None)
    chunks: list[list[Chunk]] = [[] for _ in range(drawn)]
    async with aclosing(
        generate(replace(request, sampling=sampling, logprobs=request.logprobs or LogprobParams()))
    ) as stream:
        async for chunk in stream:
            chunks[chunk.index].append(chunk)
    ranked = sorted(range(drawn), key=lambda i: (-_mean(chunks[i]), i))
    others = sum(_completion_tokens(chunks[i]) for i in ranked[request.sampling.n :])
    for index, i in enumerate(ranked[: request.sampling.n]):
        for chunk in chunks[i]:
            yield _shown(chunk, index, others if index == 0 else 0, logprobs=request.logprobs is not None)


def _mean(chunks: Sequence[Chunk]) -> float:
    values = [entry.logprob for chunk in chunks for entry in chunk.logprobs if entry.logprob is not None]
    return sum(values) / len(values) if values else 0.0


def _completion_tokens(chunks: Sequence[Chunk]) -> int:
    return chunks[-1].usage.completion_tokens if chunks[-1].usage else 0


def _shown(chunk: Chunk, index: int, others: int, *, logprobs: bool) -> Chunk:
    usage = chunk.usage
    if usage is not None and chunk.finish is not None:
        usage = replace(usage, completion_tokens=usage.completion_tokens + others)
    return replace(chunk, index=index, usage=usage, logprobs=chunk.logprobs if logprobs else ())
