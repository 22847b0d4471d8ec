"""The probability of a text, summed over the ways in which the model could spell it in tokens.

A model gives "YES" not only as the token YES but also as Y + ES, each with its own probability. The sum is found by
walking: the candidates of one request are all beginnings of the text; those that are a single token are the first steps
of all spellings, and each likely one is followed by asking again behind that token. Spellings whose beginning is less
likely than ``NEGLIGIBLE`` times the usual spelling are left out, so the sum is exact up to that factor.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from sglite.lang.choices import Row, log_sum
from sglite.protocol import Prompt, Tokens

Scorer = Callable[[Prompt, tuple[str, ...]], Awaitable[Mapping[str, Row]]]
"""The tokens and logprobs of each text after the prompt."""

NEGLIGIBLE = 1e-4
MAX_REQUESTS = 64
LONGEST = 64
"""Characters; longer texts have one usual spelling, and the others are not looked for."""


@dataclass(frozen=True, slots=True)
class Path:
    """A beginning of a spelling of ``whole``: the ids so far, their text, and the logarithm of their probability."""

    whole: str
    ids: tuple[int, ...] = ()
    done: str = ""
    logprob: float = 0.0

    @property
    def rest(self) -> str:
        return self.whole[len(self.done) :]


async def sum_over_spellings(prompt: Prompt, usual: Mapping[str, float], score: Scorer) -> dict[str, float]:
    """The log probability of each text, given that of its usual spelling."""
    found: dict[str, list[float]] = {text: [] for text in usual}
    waiting = [Path(text) for text in usual if len(text) <= LONGEST]
    requests = 0
    while waiting and requests < MAX_REQUESTS:
        groups: dict[tuple[int, ...], list[Path]] = {}
        for path in waiting[: MAX_REQUESTS - requests]:
            groups.setdefault(path.ids, []).append(path)
        requests += len(groups)
        steps = await asyncio.gather(*(_steps(prompt, paths, score) for paths in groups.values()))
        waiting = []
        for path in (path for group in steps for path in group):
            if not path.rest:
                found[path.whole].append(path.logprob)
            elif path.logprob >= usual[path.whole] + math.log(NEGLIGIBLE):
                waiting.append(path)
    return {text: max(log_sum(found[text]), usual[text]) if found[text] else usual[text] for text in usual}


async def _steps(prompt: Prompt, paths: list[Path], score: Scorer) -> list[Path]:
    """The paths one token longer. All of ``paths`` have the same ids so far."""
    first = paths[0]
    texts = dict.fromkeys(text for path in paths for text in _beginnings(path.rest))
    so_far: Prompt = (*prompt, Tokens(first.ids, first.done)) if first.ids else prompt
    rows = await score(so_far, tuple(texts))
    return [
        Path(path.whole, (*path.ids, token.id), path.done + text, path.logprob + token.logprob)
        for path in paths
        for text in _beginnings(path.rest)
        for token in _only(rows[text], text)
        if token.logprob is not None
    ]


def _beginnings(text: str) -> list[str]:
    return [text[:end] for end in range(1, len(text) + 1)]


def _only(row: Row, text: str) -> Row:
    """The token, where the text is one; nothing where it is several, or where a token reaches into the prompt."""
    return row if len(row) == 1 and row[0].text == text else ()
