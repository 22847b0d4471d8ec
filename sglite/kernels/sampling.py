"""Mask and sample on the device: what a step's rows ask for as tensors, and the plain form of the kernels' answer.

The kept tokens are those of ``runtime.sampler``: a prefix of the order (logit descending, then id ascending) that
top-k, top-p and min-p each cut. The draw is another one: the sampler on the host inverts one uniform number a row,
which needs the whole order; here every token has a number of its own and the best score wins (Gumbel's trick, as an
exponential race). Both depend on (seed, sample, position) alone, so a row draws the same token in any batch; the two
agree in distribution, not token by token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

OK, NOT_FINITE, NOTHING_ALLOWED = 0, 1, 2
"""Status of a row."""

COLDEST = 1e-5
"""Below this temperature a draw is greedy: scores would no longer fit fp32."""

_WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Parameters of R rows, on the device. ``top_k`` is V where there is no limit, ``temperature`` 0 for greedy."""

    key: Tensor
    """int64 [R], the row's source of randomness: a hash of seed, sample and position"""
    temperature: Tensor
    """fp32 [R]"""
    top_k: Tensor
    """int32 [R], at least 1"""
    top_p: Tensor
    """fp32 [R]"""
    min_p: Tensor
    """fp32 [R]"""

    def __len__(self) -> int:
        return len(self.key)


@dataclass(frozen=True, slots=True)
class Edits:
    """Changes of single logits; no (row, token) comes twice. x -> (x / factor if x > 0 else x * factor) + shift."""

    where: Tensor
    """int32 [2, E]: row, token"""
    how: Tensor
    """fp32 [2, E]: factor, shift (-inf bans)"""


@dataclass(frozen=True, slots=True)
class Chosen:
    """One answer per row; where ``status`` is not OK the token is 0 and means nothing."""

    token: Tensor
    """int32 [R]"""
    status: Tensor
    """int32 [R]"""
    logprob: Tensor
    """fp32 [R], under the model's own distribution; 0 where it was not asked for"""


def choose(
    logits: Tensor,
    rows: SampleRows,
    mask: Tensor | None,
    edits: Edits | None,
    *,
    filtered: bool = True,
    logprobs: bool = False,
    own: Tensor | None = None,
) -> Chosen:
    """A token per row of ``logits`` (fp32 [R, V]; changed in place), row by row in plain torch: the kernels' twin.

    ``mask``: packed int32 [R, ceil(V / 32)]. ``own`` [R, V]: the logits under which ``logprobs`` are told; without it
    those are ``logits`` before anything changes them. ``filtered`` is only a promise that kernels use: that without it
    no row has a top-k, top-p or min-p.
    """
    scores = torch.log_softmax(logits if own is None else own, dim=-1) if logprobs else None
    if edits is not None:
        apply_edits(logits, edits)
    if mask is not None:
        logits.masked_fill_(~unpacked(mask, logits.shape[1]), -math.inf)
    peaks = logits.max(dim=-1).values
    status = torch.where(peaks.isnan(), NOT_FINITE, torch.where(peaks.isfinite(), OK, NOTHING_ALLOWED)).to(torch.int32)
    token = torch.zeros_like(status)
    for i, state in enumerate(status.tolist()):
        if state == OK:
            token[i] = _choose_row(logits[i], rows, i)
    logprob = torch.zeros_like(peaks) if scores is None else scores.gather(1, token.long()[:, None])[:, 0]
    return Chosen(token, status, logprob)


def apply_edits(logits: Tensor, edits: Edits) -> None:
    row, token = edits.where.long()
    factor, shift = edits.how
    x = logits[row, token]
    logits[row, token] = torch.where(x > 0, x / factor, x * factor) + shift


def unpacked(mask: Tensor, width: int) -> Tensor:
    """Packed int32 [R, W] -> bool [R, width], True where allowed."""
    bits = (mask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=mask.device)) & 1
    return bits.flatten(1)[:, :width].bool()


def _choose_row(logits: Tensor, rows: SampleRows, i: int) -> int:
    temperature = float(rows.temperature[i])
    if temperature < COLDEST or int(rows.top_k[i]) == 1:
        return int(logits.argmax())
    values, ids = kept_tokens(logits, rows, i)
    scores = values / temperature - exponential(rows.key[i], ids).log()
    return int(ids[scores.argmax()])


def kept_tokens(logits: Tensor, rows: SampleRows, i: int) -> tuple[Tensor, Tensor]:
    """(logits, ids) of the tokens that survive row i's filters, in order. ``logits`` [V], edited and masked."""
    values, ids = logits.sort(descending=True, stable=True)
    weights = ((values - values[0]) / float(rows.temperature[i])).exp()
    k = int(rows.top_k[i])
    mass = weights[:k].cumsum(0)
    before = mass - weights[:k]
    top_p = float(rows.top_p[i])
    stays = (weights[:k] >= float(rows.min_p[i])) & (values[:k] > -math.inf)
    if top_p < 1.0:
        stays &= before < top_p * mass[-1]
    count = int(stays.sum())
    return values[:count], ids[:count]


def exponential(key: Tensor, ids: Tensor) -> Tensor:
    """A number from Exp(1) for each token id under a row's key: fp32, the same in the kernels up to rounding.

    MurmurHash3's finaliser (Appleby, 2011) over the token and one half of the key, then over the other half. Near
    zero, where the winners of the race are, the number keeps its relative precision.
    """
    word = _finalise((ids.long() * 0x9E3779B9 + (key & _WORD)) & _WORD)
    word = _finalise(word ^ ((key >> 32) & _WORD))
    v = ((word.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return torch.where(v < 2.0**-8, v * (1 + v * (0.5 + v * (1 / 3))), -torch.log(1 - v))


def _finalise(h: Tensor) -> Tensor:
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & _WORD
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & _WORD
    return h ^ (h >> 16)
