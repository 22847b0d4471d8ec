"""From logits to tokens: masks, penalties, the usual filters, and randomness that depends on nothing but the row.

A row's random number is a hash of (seed, sample index, position), so the same request draws the same tokens alone
and in any batch. All-greedy batches take one argmax; the other rows are filtered one by one, since their parameters
differ and each touches only its likeliest tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sglite.protocol import SamplingParams

MIN_LOGPROB = -9999.0
"""Floor for logprobs of impossible tokens: JSON has no infinity."""

_SHORTLIST = 1024
"""Top-p and min-p look at this many likeliest tokens first; only flatter distributions pay for a full sort."""


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What the sampler needs to know of one row. ``banned`` ids get no probability (EOS before min_new_tokens)."""

    params: SamplingParams
    seed: int
    index: int
    position: int
    output_counts: Mapping[int, int] = field(default_factory=dict)
    context_ids: Sequence[int] = ()
    """Prompt and output, read only for the repetition penalty."""
    banned: Sequence[int] = ()
    top_logprobs: int | None = None
    """None: no logprobs; k: the chosen token's, and the k likeliest."""
    given: Sequence[int] = ()
    """With logprobs: more tokens whose logprobs are wanted."""
    constrained: bool = False
    """Logprobs under the mask instead of the model's own."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen id with, on request, its logprob and the likeliest alternatives under the model's own distribution."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    given: tuple[tuple[int, float], ...] = ()


class BadLogitsError(ArithmeticError):
    """The row's logits hold NaN, or nothing is allowed."""


def sample(
    logits: Tensor, rows: Sequence[SampleRow], mask: npt.NDArray[np.int32] | None = None
) -> list[Choice | BadLogitsError]:
    """One choice per row of ``logits`` (fp32 [R, V]; changed in place), a BadLogitsError where a row has none.

    ``mask``: packed int32 [R, ceil(V / 32)], see ``grammar.base.MaskRow``.
    """
    logprobs = _Logprobs(logits, rows)
    for row_logits, row in zip(logits, rows, strict=True):
        _penalise(row_logits, row)
    if mask is not None:
        allowed = unpack_mask(mask, logits.shape[1], logits.device)
        logprobs.restrict(rows, allowed)
        logits.masked_fill_(~allowed, -math.inf)
    best = torch.max(logits, dim=-1)
    peaks, ids = best.values.tolist(), best.indices.tolist()
    return [_choose(logits[i], row, peaks[i], ids[i], logprobs.of_row(i)) for i, row in enumerate(rows)]


def unpack_mask(mask: npt.NDArray[np.int32], width: int, device: torch.device) -> Tensor:
    """Packed int32 [R, W] -> bool [R, width], True where allowed."""
    bits = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")[:, :width]
    return torch.from_numpy(bits).to(device).bool()


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

    def restrict(self, rows: Sequence[SampleRow], allowed: Tensor) -> None:
        """To what is allowed (bool [R, V]), for the rows that want them so."""
        for i, scores in self._scores.items():
            if rows[i].constrained:
                self._scores[i] = torch.log_softmax(scores.masked_fill(~allowed[i], -math.inf), dim=-1)

    def of_row(self, i: int) -> Tensor | None:
        return self._scores.get(i)


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


def _choose(logits: Tensor, row: SampleRow, peak: float, best: int, logprobs: Tensor | None) -> Choice | BadLogitsError:
    if not math.isfinite(peak):
        return BadLogitsError("the model's logits are not finite" if math.isnan(peak) else "no token is allowed here")
    token = best if row.params.temperature == 0 or row.params.top_k == 1 else _draw(logits, row, peak)
    if logprobs is None:
        return Choice(token)
    assert row.top_logprobs is not None
    top = _top(logprobs.unsqueeze(0), row.top_logprobs)[0]
    given = tuple((i, max(float(logprobs[i]), MIN_LOGPROB)) for i in row.given)
    return Choice(token, max(float(logprobs[token]), MIN_LOGPROB), top, given)


def _draw(logits: Tensor, row: SampleRow, peak: float) -> int:
    """Inverse transform over the kept tokens: weights relative to the peak, so nothing overflows."""
    params = row.params
    weights = torch.exp((logits - peak) / params.temperature)
    u = uniform(row.seed, row.index, row.position)
    if params.top_k == -1 and params.top_p == 1.0 and params.min_p == 0.0:
        return _invert(weights, u)
    kept, ids = _likeliest(weights, params)
    return int(ids[_invert(kept, u)])


def _likeliest(weights: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """The tokens that survive top-k, then top-p, then min-p, in order of probability: (weights, ids)."""
    vocabulary = weights.shape[0]
    k = vocabulary if params.top_k == -1 else min(params.top_k, vocabulary)
    total = float(weights.sum()) if k == vocabulary else None
    kept, ids = torch.topk(weights, min(k, _SHORTLIST))
    if k > _SHORTLIST and not _covers(kept, params, total):
        kept, ids = torch.topk(weights, k)
    mass = kept.cumsum(0)
    whole = total if total is not None else float(mass[-1])
    # a token stays while the mass before it is under top_p: the first one always does
    stays = ((mass - kept) < params.top_p * whole) & (kept >= params.min_p * kept[0])
    count = int(stays.sum())
    return kept[:count], ids[:count]


def _covers(kept: Tensor, params: SamplingParams, total: float | None) -> bool:
    """Whether the shortlist already holds everything the filters would keep."""
    if params.min_p > 0.0 and float(kept[-1]) < params.min_p * float(kept[0]):
        return True
    return params.top_p < 1.0 and total is not None and float(kept.sum()) >= params.top_p * total


def _invert(weights: Tensor, u: float) -> int:
    """The index where the cumulative weight passes u of the total; never one of weight 0."""
    mass = weights.to(torch.float64).cumsum(0)
    index = int(torch.searchsorted(mass, u * float(mass[-1]), right=True))
    if index >= weights.shape[0]:
        index = int(weights.nonzero()[-1])
    return index


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
