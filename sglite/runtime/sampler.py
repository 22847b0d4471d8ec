"""From logits to tokens: masks, penalties, the usual filters, and randomness that depends on nothing but the row.

A row's random number is a hash of (seed, sample index, position), so the same request draws the same tokens alone
and in any batch. What is drawn with it is the business of ``kernels.draws`` and its faster twins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from math import isfinite
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from sglite.kernels import draws
from sglite.kernels.draws import Choose, Draw, PackedMask, unpack_mask
from sglite.protocol import SamplingParams

MIN_LOGPROB = -9999.0
"""Floor for logprobs of impossible tokens: JSON has no infinity."""


class SampleRow(NamedTuple):
    """What the sampler needs to know of one row. ``banned`` ids get no probability (EOS before min_new_tokens)."""

    params: SamplingParams
    seed: int
    sample: int
    position: int
    output_counts: Mapping[int, int] = MappingProxyType({})
    context_ids: Sequence[int] = ()
    """Prompt and output, read only for the repetition penalty."""
    banned: Sequence[int] = ()
    top_logprobs: int | None = None
    """None: no logprobs; k: the chosen token's, and the k likeliest."""
    given: Sequence[int] = ()
    """With logprobs: more tokens whose logprobs are wanted."""
    constrained: bool = False
    """Logprobs under the mask instead of the model's own."""


class Choice(NamedTuple):
    """The chosen id with, on request, its logprob and the likeliest alternatives under the model's own distribution."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    given: tuple[tuple[int, float], ...] = ()


class BadLogitsError(ArithmeticError):
    """The row's logits hold NaN, or nothing is allowed."""


def sample(
    logits: Tensor, rows: Sequence[SampleRow], mask: PackedMask | None = None, choose: Choose = draws.choose
) -> list[Choice | BadLogitsError]:
    """One choice per row of ``logits`` (fp32 [R, V]; changed in place), a BadLogitsError where a row has none.

    ``mask``: see ``grammar.base.MaskRow``. ``choose``: another form of the same choice.
    """
    logprobs = _Logprobs(logits, rows)
    for i, row in enumerate(rows):
        if _edits(row):
            _penalise(logits[i], row)
    if mask is not None:
        logprobs.restrict(rows, mask)
    tokens, peaks = choose(logits, mask, [_draw(row) for row in rows])
    chosen = zip(rows, tokens, peaks, strict=True)
    return [_choice(row, token, peak, logprobs.of_row(i)) for i, (row, token, peak) in enumerate(chosen)]


def logprobs_of(logits: Tensor, ids: Sequence[Sequence[int]], top: int) -> list[list[Choice]]:
    """For each row of ``logits`` [R, V] the logprobs of its ``ids``, each with the row's ``top`` likeliest.

    Raises BadLogitsError when a logit is not a number.
    """
    scores = torch.log_softmax(logits, dim=-1)
    rows = torch.tensor([r for r, row_ids in enumerate(ids) for _ in row_ids], device=logits.device)
    columns = torch.tensor([i for row_ids in ids for i in row_ids], device=logits.device)
    picked = scores[rows, columns].tolist()
    if any(math.isnan(value) for value in picked):
        raise BadLogitsError("the model's logits are not finite")
    values = iter(picked)
    return [
        [Choice(i, max(next(values), MIN_LOGPROB), likeliest) for i in row_ids]
        for row_ids, likeliest in zip(ids, _top(scores, top), strict=True)
    ]


def _top(scores: Tensor, k: int) -> list[tuple[tuple[int, float], ...]]:
    if k == 0:
        return [()] * len(scores)
    values, ids = torch.topk(scores, k, dim=-1)
    return [
        tuple((i, max(v, MIN_LOGPROB)) for i, v in zip(row_ids, row_values, strict=True))
        for row_ids, row_values in zip(ids.tolist(), values.tolist(), strict=True)
    ]


class _Logprobs:
    """Log-softmax of the model's own logits, for the rows that asked, taken before penalties change them."""

    def __init__(self, logits: Tensor, rows: Sequence[SampleRow]) -> None:
        asked = [i for i, row in enumerate(rows) if row.top_logprobs is not None]
        self._scores = dict(zip(asked, torch.log_softmax(logits[asked], dim=-1), strict=True)) if asked else {}

    def restrict(self, rows: Sequence[SampleRow], mask: PackedMask) -> None:
        """To what the mask allows, for the rows that want them so."""
        for i, scores in self._scores.items():
            if rows[i].constrained:
                allowed = unpack_mask(mask[i : i + 1], len(scores), scores.device)[0]
                self._scores[i] = torch.log_softmax(scores.masked_fill(~allowed, -math.inf), dim=-1)

    def of_row(self, i: int) -> Tensor | None:
        return self._scores.get(i)


def _edits(row: SampleRow) -> bool:
    """Whether the row's logits change before a token is chosen: looking at a row of them costs more than this."""
    params = row.params
    penalties = params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
    return bool(penalties or params.logit_bias or row.banned)


def _penalise(logits: Tensor, row: SampleRow) -> None:
    params = row.params
    if params.repetition_penalty != 1.0 and row.context_ids:
        seen = torch.tensor(sorted(set(row.context_ids)), device=logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.frequency_penalty or params.presence_penalty) and row.output_counts:
        ids = torch.tensor(list(row.output_counts), device=logits.device)
        counts = torch.tensor(list(row.output_counts.values()), dtype=torch.float32, device=logits.device)
        logits[ids] -= params.frequency_penalty * counts + params.presence_penalty
    for token, bias in params.logit_bias:
        logits[token] += bias
    if row.banned:
        logits[list(row.banned)] = -math.inf


def _choice(row: SampleRow, token: int, peak: float, logprobs: Tensor | None) -> Choice | BadLogitsError:
    if not isfinite(peak):
        return BadLogitsError("the model's logits are not finite" if math.isnan(peak) else "no token is allowed here")
    if logprobs is None:
        return Choice(token)
    assert row.top_logprobs is not None
    top = _top(logprobs.unsqueeze(0), row.top_logprobs)[0]
    given = tuple((i, max(float(logprobs[i]), MIN_LOGPROB)) for i in row.given)
    return Choice(token, max(float(logprobs[token]), MIN_LOGPROB), top, given)


def _draw(row: SampleRow) -> Draw | None:
    params = row.params
    if params.temperature == 0 or params.top_k == 1:
        return None
    number = uniform(row.seed, row.sample, row.position)
    return Draw(params.temperature, params.top_k, params.top_p, params.min_p, number)


_MASK64 = (1 << 64) - 1


def uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) from the three integers."""
    return (row_key(seed, index, position) >> 11) / (1 << 53)


def row_key(seed: int, index: int, position: int) -> int:
    """64 random bits from the three integers: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), chained."""
    state = seed & _MASK64
    for value in (index, position):
        state = _mix((state + 0x9E3779B97F4A7C15 * (value + 1)) & _MASK64)
    return state


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)
