"""Which programs attend to what in a step: units, their pieces, and the buffers in which pieces meet.

A step in which every row brings few tokens is planned by the device from the batch's tensors alone, so that a CUDA
graph of it stays right while lengths grow. Rows with many tokens are cut into tiles here, the longest first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sglite.kernels import triton_attention as kernels
from sglite.kernels.cascade import SharedPrefixes
from sglite.kernels.ops import AttentionSpec, ForwardBatch
from sglite.kernels.triton_card import Card, Tile, decode_tile, prompt_tile

_LOG2_E = 1.4426950408889634
_WAVES = 4
"""Programs planned for each processor: enough that a few late ones do not matter."""


@dataclass(frozen=True, slots=True)
class Units:
    """int32 [U] each: tokens ``[start, stop)`` of a unit, the row of the page table, and keys ``[low, high)``.

    ``most``: tokens of the largest unit. ``order`` int32: where set, start and stop count in it and it names tokens.
    """

    start: Tensor
    stop: Tensor
    row: Tensor
    low: Tensor | None
    high: Tensor
    most: int
    order: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Pieces:
    """What ``split_kernel`` decided, and the results of pieces that are not alone: fp32 [pieces, G, m, D], [.., m]."""

    unit: Tensor
    low: Tensor
    high: Tensor
    first: Tensor
    count: Tensor
    partial: Tensor
    lse: Tensor


@dataclass(frozen=True, slots=True)
class Pass:
    """One launch over units of one tile. ``alone``: its pieces are the whole result of their tokens."""

    units: Units
    tile: Tile
    pieces: Pieces
    alone: bool

    @property
    def merges(self) -> bool:
        """Whether the launch may leave results in pieces."""
        return len(self.pieces.partial) > 0


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """``rows`` in passes, and the pass over shared prefixes that the first of them continues."""

    passes: tuple[Pass, ...]
    prefix: Pass | None = None
    shared: SharedPrefixes | None = None


class Planner:
    def __init__(self, card: Card, dtype: torch.dtype) -> None:
        self._card = card
        self._itemsize = dtype.itemsize
        self._programs = _WAVES * card.processors

    def plan(self, batch: ForwardBatch, spec: AttentionSpec) -> AttentionPlan:
        few, many = self._tiles_of(spec)
        ratio = spec.heads // spec.kv_heads
        new = np.diff(batch.indptr_host)
        short = few.m // ratio
        if int(new.max()) <= short:
            return self._short_rows(batch, spec, int(new.max()))
        passes = []
        if (rows := np.flatnonzero(new <= short)).size:
            passes.append(self._pass(_tiles(batch, rows, short), few, spec))
        units = _tiles(batch, np.flatnonzero(new > short), many.m // ratio)
        busy = 2 * len(units.start) * spec.kv_heads >= self._programs
        passes.append(self._pass(units, many, spec, whole=busy))
        return AttentionPlan(tuple(passes))

    def prefix_tokens(self, spec: AttentionSpec) -> int:
        """How many rows that share a prefix go into one unit: ``tile_tokens`` of a batch's ``shared``."""
        return self._tiles_of(spec)[1].m // (spec.heads // spec.kv_heads)

    def _tiles_of(self, spec: AttentionSpec) -> tuple[Tile, Tile]:
        """For few queries a key head, and for many."""
        ratio = spec.heads // spec.kv_heads
        shape = ratio, spec.head_dim, self._itemsize
        return decode_tile(self._card, *shape), prompt_tile(self._card, *shape)

    def _short_rows(self, batch: ForwardBatch, spec: AttentionSpec, most: int) -> AttentionPlan:
        """All of it from tensors on the device: nothing here may depend on a length."""
        few, many = self._tiles_of(spec)
        rows = torch.arange(batch.rows, dtype=torch.int32, device=batch.indptr.device)
        shared = batch.shared if spec.window is None else None  # a window may begin behind the prefix
        low = None if shared is None else shared.lengths
        units = Units(batch.indptr[:-1], batch.indptr[1:], rows, low, batch.kv_lengths, most)
        if shared is None:
            return AttentionPlan((self._pass(units, few, spec),))
        assert most == 1
        assert shared.tile_tokens == self.prefix_tokens(spec)
        prefix = Units(shared.start, shared.stop, shared.row, None, shared.high, shared.tile_tokens, shared.order)
        tail = self._pass(units, few, spec, alone=False)
        return AttentionPlan((tail,), self._pass(prefix, many, spec, alone=False), shared)

    def _pass(self, units: Units, tile: Tile, spec: AttentionSpec, *, whole: bool = False, alone: bool = True) -> Pass:
        budget = 0 if whole else max(1, self._programs // spec.kv_heads)
        return Pass(units, tile, _split(units, tile, spec, budget), alone)


def _tiles(batch: ForwardBatch, rows: npt.NDArray[np.intp], tokens: int) -> Units:
    """Units of at most ``tokens`` tokens of these rows, those with most keys first."""
    indptr, lengths = np.array(batch.indptr_host), np.array(batch.kv_lengths_host)
    begin, end = indptr[rows], indptr[rows + 1]
    number = -(-(end - begin) // tokens)
    of = np.repeat(np.arange(len(rows)), number)
    start = begin[of] + tokens * (np.arange(len(of)) - (np.cumsum(number) - number)[of])
    stop = np.minimum(start + tokens, end[of])
    high = lengths[rows][of] - end[of] + stop
    first = np.argsort(-high, kind="stable")
    packed = np.stack([column[first] for column in (start, stop, rows[of], high)]).astype(np.int32)
    begins, ends, row, highest = to_device(packed, batch.indptr.device)
    return Units(begins, ends, row, None, highest, int((stop - start).max()))


def to_device(packed: npt.NDArray[np.int32], device: torch.device) -> tuple[Tensor, ...]:
    """The rows of an array there, in one copy that nobody waits for."""
    sent = torch.from_numpy(packed)
    return (sent.pin_memory() if device.type == "cuda" else sent).to(device, non_blocking=True).unbind()


def _split(units: Units, tile: Tile, spec: AttentionSpec, budget: int) -> Pieces:
    """At most ``budget`` pieces more than units; 0 leaves every unit whole."""
    number, device = len(units.start), units.start.device
    total = number + budget
    unit, low, high = torch.empty((3, total), dtype=torch.int32, device=device)
    first, count = torch.empty((2, number), dtype=torch.int32, device=device)
    met = (total if budget else 0, spec.kv_heads, tile.m)
    partial = torch.empty((*met, spec.head_dim), dtype=torch.float32, device=device)
    lse = torch.empty(met, dtype=torch.float32, device=device)
    kernels.split_kernel[(number,)](
        units.start,
        units.stop,
        units.low,
        units.high,
        first,
        count,
        unit,
        low,
        high,
        number,
        max(1, budget),
        total,
        WINDOW=spec.window or 0,
        LOW=units.low is not None,
        LEAST=max(kernels.PIECE, 4 * tile.m) if budget else 1 << 30,
        UNIT=kernels.ALIGN,
        SCAN=kernels.SCAN,
        FILL=kernels.FILL,
        num_warps=4,
    )
    return Pieces(unit, low, high, first, count, partial, lse)


# ------------------------------------------------------------------------------------------------------------ launch


def attend(
    q: Tensor, keys: Tensor, values: Tensor, batch: ForwardBatch, spec: AttentionSpec, plan: AttentionPlan
) -> Tensor:
    """q [T, H, D] with dense heads over keys, values [slots, G, D] -> dense [T, H, D]."""
    assert q.stride()[1:] == (spec.head_dim, 1)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if plan.prefix is not None:
        _attend_pass(q, keys, values, batch, spec, plan.prefix, out)
    for part in plan.passes:
        _attend_pass(q, keys, values, batch, spec, part, out)
        if part.merges:
            _merge(out, spec, part, plan.prefix, plan.shared)
    return out


def _attend_pass(
    q: Tensor, keys: Tensor, values: Tensor, batch: ForwardBatch, spec: AttentionSpec, part: Pass, out: Tensor
) -> None:
    units, tile, pieces = part.units, part.tile, part.pieces
    kernels.attend_kernel[(len(pieces.unit) * spec.kv_heads,)](
        q,
        keys,
        values,
        batch.page_table,
        batch.positions,
        units.order,
        units.start,
        units.stop,
        units.row,
        pieces.count,
        pieces.unit,
        pieces.low,
        pieces.high,
        out,
        pieces.partial,
        pieces.lse,
        q.stride(0),
        batch.page_table.stride(0),
        spec.scale if spec.softcap else spec.scale * _LOG2_E,
        spec.softcap or 1.0,
        H=spec.heads,
        G=spec.kv_heads,
        D=spec.head_dim,
        PAGE=batch.page_size,
        WINDOW=spec.window or 0,
        SOFTCAP=spec.softcap is not None,
        ORDERED=units.order is not None,
        PARTIAL=not part.alone,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_D=tile.d,
        PRECISION=tile.precision,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _merge(out: Tensor, spec: AttentionSpec, part: Pass, prefix: Pass | None, shared: SharedPrefixes | None) -> None:
    units, pieces = part.units, part.pieces
    before = None if prefix is None else prefix.pieces
    kernels.merge_kernel[(len(units.start), units.most, spec.heads)](
        out,
        units.start,
        units.stop,
        pieces.first,
        pieces.count,
        pieces.partial,
        pieces.lse,
        None if shared is None else shared.unit,
        None if shared is None else shared.place,
        None if before is None else before.first,
        None if before is None else before.count,
        None if before is None else before.partial,
        None if before is None else before.lse,
        H=spec.heads,
        G=spec.kv_heads,
        D=spec.head_dim,
        PREFIXED=prefix is not None,
        BLOCK_M=part.tile.m,
        PREFIX_M=16 if prefix is None else prefix.tile.m,
        BLOCK_D=part.tile.d,
        PIECES=kernels.MERGED,
        num_warps=4,
    )
