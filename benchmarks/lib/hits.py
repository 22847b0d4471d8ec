"""How much of the prompts could have been found in a cache at best, and how much was.

The best cache forgets nothing and knows every position: of each prompt it finds what any earlier prompt or answer began
with, all but the last token, whose logits are needed. That is the sum over a tree of all sequences, in any order.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

from sglite.protocol import Backend, Chunk, GenerateRequest, ModelInfo, Prompt

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Seen:
    """A request's prompt, the tokens that answered it, and how many of the prompt's tokens were found cached."""

    prompt: Prompt
    answer: Ids
    cached: int


class Recorder:
    """A backend around another that notes every request that ended. Only the first sample's answer counts."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.seen: list[Seen] = []

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        answer: list[int] = []
        cached = 0
        async for chunk in self._inner.generate(request):
            if chunk.index == 0:
                answer += chunk.ids
                cached = chunk.usage.cached_tokens if chunk.usage else cached
            yield chunk
        self.seen.append(Seen(request.prompt, tuple(answer), cached))

    async def info(self) -> ModelInfo:
        return await self._inner.info()

    async def flush_cache(self) -> None:
        await self._inner.flush_cache()

    async def aclose(self) -> None:
        await self._inner.aclose()


@dataclass(frozen=True, slots=True)
class Hits:
    """Tokens of all prompts: how many there are, how many were found, how many the best cache finds."""

    prompt: int
    cached: int
    best: int


def hits(seen: Iterable[Seen], encode: Callable[[Prompt], Ids]) -> Hits:
    """In the order in which the requests ended, which is one in which every answer is there before it is read."""
    tree: dict[int, dict] = {}
    prompt = cached = best = 0
    for one in seen:
        ids = encode(one.prompt)
        found = _add(tree, (*ids, *one.answer[:-1]))  # the last token's keys are never computed
        prompt, cached, best = prompt + len(ids), cached + one.cached, best + min(found, len(ids) - 1)
    return Hits(prompt, cached, best)


def _add(tree: dict[int, dict], ids: Ids) -> int:
    """Put a sequence in; how long its beginning was there already."""
    found, new = 0, False
    for token in ids:
        new = new or token not in tree
        found += not new
        tree = tree.setdefault(token, {})
    return found
