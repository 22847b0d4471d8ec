"""How to decide among scored choices: four methods, pure arithmetic over token logprobs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from sglite.errors import ProgramError
from sglite.protocol import TokenLogprob

Row = tuple[TokenLogprob, ...]

PREDICTABLE = math.log(0.9)
"""Tokens likelier than this say nothing about which choice is right."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What a method decides on: per choice a spelling (``texts``) with its tokens, and the other one with its own.

    ``unconditional`` holds the same tokens' logprobs without the prompt, ``sums`` the log probability of each row's
    text over all its spellings in tokens (``other_sums`` likewise), for the methods that ask for them.
    """

    texts: tuple[str, ...]
    rows: tuple[Row, ...]
    other_texts: tuple[str, ...] = ()
    others: tuple[Row, ...] = ()
    unconditional: tuple[Row, ...] = ()
    sums: tuple[float, ...] = ()
    other_sums: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """A score per choice, higher is better, and what the method wants to be seen in the meta info."""

    scores: tuple[float, ...]
    details: dict[str, Any] = field(default_factory=dict)

    def pick(self, temperature: float) -> int:
        """The best choice's index (the first of equals), or one drawn from softmax(scores / temperature)."""
        best = max(self.scores)
        if temperature <= 0 or best == -math.inf:
            return self.scores.index(best)
        weights = [math.exp((score - best) / temperature) for score in self.scores]
        return random.choices(range(len(weights)), weights)[0]


@dataclass(frozen=True, slots=True)
class ChoicesMethod:
    """A way to decide; ``select`` and ``gen(choices=...)`` take it as ``choices_method``."""

    name: str
    judge: Callable[[Scored], Verdict] = field(repr=False)
    needs_unconditional: bool = False
    needs_sums: bool = False
    plain: bool = False
    """Whether a backend that can only generate under a ``choices`` constraint may stand in for it."""


def _token_length_normalized(scored: Scored) -> Verdict:
    rows = _own(with_ends(scored.rows))
    fewest = min(map(len, rows))
    return Verdict(tuple(robust_mean(row, fewest) for row in rows))


def robust_mean(logprobs: Sequence[float], fewest: int) -> float:
    """The lowest running mean, over positions from ``fewest`` on, of the tokens that were not predictable.

    ``fewest`` is the length of the shortest choice. For choices of equal length this is the plain mean. Otherwise
    predictable tokens beyond ``fewest`` are left out, and what follows a beginning can only lower its score: neither
    padding nor fluent continuation lets a long choice win over a short one.
    """
    lowest = math.inf
    for end in range(fewest, len(logprobs) + 1):
        if end > fewest and logprobs[end - 1] > PREDICTABLE:
            continue
        seen = sorted(logprobs[:end])
        telling = sum(1 for value in seen if value <= PREDICTABLE)
        lowest = min(lowest, _mean(seen[: max(fewest, telling)]))
    return lowest


def _greedy_token_selection(scored: Scored) -> Verdict:
    """Token by token; a shorter choice is extended with its own mean."""
    width = max(map(len, scored.rows))
    matrix = [[*values(row), *[_mean(values(row))] * (width - len(row))] for row in scored.rows]
    remaining = list(range(len(matrix)))
    survived = [0] * len(matrix)
    for column in range(width):
        best = max(matrix[i][column] for i in remaining)
        remaining = [i for i in remaining if matrix[i][column] == best]
        for i in remaining:
            survived[i] += 1
        if len(remaining) == 1:
            break
    means = [_mean(line) for line in matrix]
    scores = tuple(survived[i] + math.exp(means[i]) / 2 for i in range(len(matrix)))
    return Verdict(scores, {"greedy_logprob_matrix": matrix})


def _unconditional_likelihood_normalized(scored: Scored) -> Verdict:
    """Mean gain of each token's logprob over its logprob without the prompt."""
    scores = tuple(
        _mean([a - b for a, b in zip(values(row), values(alone), strict=True)])
        for row, alone in zip(scored.rows, scored.unconditional, strict=True)
    )
    return Verdict(
        scores,
        {
            "unconditional_token_logprobs": [_plain(row) for row in scored.unconditional],
            "normalized_unconditional_prompt_logprobs": list(scores),
        },
    )


def _exact(scored: Scored) -> Verdict:
    """The logarithm of the probability that the model says the choice, with or without a space before it."""
    totals = _totals(scored.rows, scored.sums)
    if scored.others:
        others = _totals(scored.others, scored.other_sums)
        totals = [log_sum(pair) for pair in zip(totals, others, strict=True)]
    norm = log_sum(totals)
    return Verdict(tuple(totals), {"probabilities": [math.exp(t - norm) if norm > -math.inf else 0.0 for t in totals]})


def _totals(rows: tuple[Row, ...], sums: tuple[float, ...]) -> list[float]:
    """Log probabilities with the end of choices that others continue; without ``sums``, of the usual spelling."""
    totals = [math.fsum(row) for row in with_ends(rows)]
    if not sums:
        return totals
    return [total - math.fsum(values(row)) + whole for total, row, whole in zip(totals, rows, sums, strict=True)]


token_length_normalized = ChoicesMethod("token_length_normalized", _token_length_normalized, plain=True)
greedy_token_selection = ChoicesMethod("greedy_token_selection", _greedy_token_selection)
unconditional_likelihood_normalized = ChoicesMethod(
    "unconditional_likelihood_normalized", _unconditional_likelihood_normalized, needs_unconditional=True
)
exact = ChoicesMethod("exact", _exact, needs_sums=True)

METHODS = {m.name: m for m in (token_length_normalized, greedy_token_selection, exact)}
METHODS[unconditional_likelihood_normalized.name] = unconditional_likelihood_normalized


def find_method(method: ChoicesMethod | str | None) -> ChoicesMethod:
    """Raises ProgramError for what is no method."""
    if method is None:
        return token_length_normalized
    if isinstance(method, ChoicesMethod):
        return method
    if isinstance(method, str) and method in METHODS:
        return METHODS[method]
    raise ProgramError(f"choices_method must be one of {', '.join(sorted(METHODS))}, not {method!r}")


# -------------------------------------------------------------------------------------------------------- arithmetic


def values(row: Row) -> list[float]:
    """The logprobs; a position whose probability nobody knows counts as certain."""
    return [0.0 if t.logprob is None else t.logprob for t in row]


def with_ends(rows: Sequence[Row]) -> list[list[float]]:
    """Logprobs per choice; one that others continue gets the probability of not being continued as its last."""
    ids = [tuple(t.id for t in row) for row in rows]
    return [[*values(row), *_end(ids, rows, i)] for i, row in enumerate(rows)]


def _end(ids: Sequence[tuple[int, ...]], rows: Sequence[Row], index: int) -> list[float]:
    mine = ids[index]
    n = len(mine)
    following = {
        other[n]: values(row)[n] for other, row in zip(ids, rows, strict=True) if len(other) > n and other[:n] == mine
    }
    if not following:
        return []
    continued = math.fsum(math.exp(logprob) for logprob in following.values())
    return [math.log(max(1.0 - continued, 1e-9))]


def _own(rows: Sequence[Sequence[float]]) -> list[Sequence[float]]:
    """Without the values that all rows begin with: they cannot tell choices apart."""
    shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False)))
    shared = min(shared, min(map(len, rows)) - 1)
    return [row[shared:] for row in rows]


def log_sum(logs: Sequence[float]) -> float:
    """log(sum(exp(x))) without overflow."""
    top = max(logs)
    if top == -math.inf:
        return top
    return top + math.log(math.fsum(math.exp(value - top) for value in logs))


def _mean(numbers: Sequence[float]) -> float:
    return math.fsum(numbers) / len(numbers)


def mean_logprob(row: Row) -> float:
    return _mean(values(row)) if row else -math.inf


def _plain(row: Row) -> list[tuple[float | None, int, str]]:
    return [(t.logprob, t.id, t.text) for t in row]
