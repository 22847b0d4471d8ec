"""Which token of each row: the likeliest, or one drawn from what top-k, top-p and min-p leave. Plain torch.

``choose`` is the twin of the compiled one (``NativeOps.choose``): the same numbers give the same tokens, but where a
number falls within a rounding error of the boundary between two of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_SHORTLIST = 1024
"""Top-p and min-p look at this many likeliest tokens first; only flatter distributions pay for a full sort."""

PackedMask = npt.NDArray[np.int32]
"""[R, ceil(V / 32)]: bit i of word w allows token 32 w + i."""


class Draw(NamedTuple):
    """One row's filters, and the number in [0, 1) that decides. ``temperature`` above 0; ``top_k`` -1: no limit."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    number: float


class Choose(Protocol):
    """A token of each row, and the row's largest allowed logit: NaN, or -inf where nothing is allowed, and then the
    token means nothing. ``logits`` fp32 [R, V] may be changed; a draw of None takes the likeliest token."""

    def __call__(
        self, logits: Tensor, mask: PackedMask | None, draws: Sequence[Draw | None]
    ) -> tuple[list[int], list[float]]: ...


@runtime_checkable
class Chooses(Protocol):
    """An Ops with a faster form of ``choose``."""

    @property
    def choose(self) -> Choose: ...


def choose(logits: Tensor, mask: PackedMask | None, draws: Sequence[Draw | None]) -> tuple[list[int], list[float]]:
    """See :class:`Choose`."""
    if mask is not None:
        logits.masked_fill_(~unpack_mask(mask, logits.shape[1], logits.device), -math.inf)
    best = torch.max(logits, dim=-1)
    ids, peaks = best.indices.tolist(), best.values.tolist()
    for i, draw in enumerate(draws):
        if draw is not None and math.isfinite(peaks[i]):
            ids[i] = _drawn(logits[i], draw, peaks[i])
    return ids, peaks


def unpack_mask(mask: PackedMask, width: int, device: torch.device) -> Tensor:
    """bool [R, width], True where allowed."""
    bits = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")[:, :width]
    return torch.from_numpy(bits).to(device).bool()


def _drawn(logits: Tensor, draw: Draw, peak: float) -> int:
    """Inverse transform over the kept tokens: weights relative to the peak, so nothing overflows."""
    weights = torch.exp((logits - peak) / draw.temperature)
    if draw.top_k == -1 and draw.top_p == 1.0 and draw.min_p == 0.0:
        return _invert(weights, draw.number)
    kept, ids = _likeliest(weights, draw)
    return int(ids[_invert(kept, draw.number)])


def _likeliest(weights: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
    """The tokens that survive top-k, then top-p, then min-p, in order of probability: (weights, ids)."""
    vocabulary = weights.shape[0]
    k = vocabulary if draw.top_k == -1 else min(draw.top_k, vocabulary)
    total = float(weights.sum()) if k == vocabulary else None
    kept, ids = torch.topk(weights, min(k, _SHORTLIST))
    if k > _SHORTLIST and not _covers(kept, draw, total):
        kept, ids = torch.topk(weights, k)
    mass = kept.cumsum(0)
    whole = total if total is not None else float(mass[-1])
    # a token stays while the mass before it is under top_p: the first one always does
    stays = ((mass - kept) < draw.top_p * whole) & (kept >= draw.min_p * kept[0])
    count = int(stays.sum())
    return kept[:count], ids[:count]


def _covers(kept: Tensor, draw: Draw, total: float | None) -> bool:
    """Whether the shortlist already holds everything the filters would keep. ``total``: None under a top-k, of whose
    mass top-p is a part, so that all of it has to be looked at."""
    if total is None:
        return False
    if draw.min_p > 0.0 and float(kept[-1]) < draw.min_p * float(kept[0]):
        return True
    return draw.top_p < 1.0 and float(kept.sum()) >= draw.top_p * total


def _invert(weights: Tensor, number: float) -> int:
    """The index where the cumulative weight passes that part of the total; never one of weight 0."""
    mass = weights.to(torch.float64).cumsum(0)
    index = int(torch.searchsorted(mass, number * float(mass[-1]), right=True))
    if index >= weights.shape[0]:
        index = int(weights.nonzero()[-1])
    return index
