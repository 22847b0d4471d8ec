"""Low-rank adapters by row: y += x Aᵀ Bᵀ, each token with its own adapter's A and B, for all of them in two launches.

Tokens come in units of one adapter (a row of the batch, or a tile of a long one), so that a matrix instruction serves
several tokens. K is split over programs in the first product, because R is narrow; the second sums the parts in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from sglite.kernels.ops import Adapters
from sglite.kernels.triton_plan import to_device

TOKENS = 16
"""Most tokens of a unit."""
_PARTS = 8


@dataclass(frozen=True, slots=True)
class LoraUnits:
    """int32 [U]: tokens ``[start, stop)`` (at most TOKENS) and their adapter (-1: none)."""

    start: Tensor
    stop: Tensor
    adapter: Tensor


def plan(indptr: Sequence[int], adapters: Sequence[int], device: torch.device) -> LoraUnits:
    """Units of a batch whose row b has tokens ``indptr[b]:indptr[b + 1]`` and adapter ``adapters[b]`` (-1: none)."""
    begin, end = np.array(indptr[:-1]), np.array(indptr[1:])
    number = -(-(end - begin) // TOKENS)
    row = np.repeat(np.arange(len(begin)), number)
    start = begin[row] + TOKENS * (np.arange(len(row)) - (np.cumsum(number) - number)[row])
    packed = np.stack([start, np.minimum(start + TOKENS, end[row]), np.array(adapters)[row]]).astype(np.int32)
    return LoraUnits(*to_device(packed, device))


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["start", "stop", "adapter"])
def shrink_kernel(
    x: tl.tensor,
    a: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    adapter: tl.tensor,
    h: tl.tensor,
    tokens: int,
    K: int,
    x_stride: int,
    R: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    unit, part = tl.program_id(0), tl.program_id(1)
    which = tl.load(adapter + unit)
    if which >= 0:
        m = tl.load(start + unit) + tl.arange(0, BLOCK_M)
        valid = m < tl.load(stop + unit)
        r = tl.arange(0, BLOCK_R)
        steps = tl.cdiv(K, BLOCK_K)
        each = tl.cdiv(steps, PARTS)
        weight = a + which.to(tl.int64) * (R * K) + r[:, None] * K
        acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for step in range(part * each, tl.minimum((part + 1) * each, steps)):
            k = step * BLOCK_K + tl.arange(0, BLOCK_K)
            inside = (k < K)[None, :]
            tile = tl.load(x + m.to(tl.int64)[:, None] * x_stride + k[None, :], mask=valid[:, None] & inside, other=0.0)
            w = tl.load(weight + k[None, :], mask=(r < R)[:, None] & inside, other=0.0)
            acc = tl.dot(tile, tl.trans(w), acc, input_precision="ieee")
        place = (part.to(tl.int64) * tokens + m)[:, None] * R + r[None, :]
        tl.store(h + place, acc, mask=valid[:, None] & (r < R)[None, :])


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["start", "stop", "adapter"])
def expand_kernel(
    h: tl.tensor,
    b: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    adapter: tl.tensor,
    y: tl.tensor,
    tokens: int,
    N: int,
    R: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    unit = tl.program_id(0)
    which = tl.load(adapter + unit)
    if which >= 0:
        m = tl.load(start + unit) + tl.arange(0, BLOCK_M)
        valid = m < tl.load(stop + unit)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        r = tl.arange(0, BLOCK_R)
        narrow = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for part in tl.static_range(PARTS):
            place = (part * tokens + m).to(tl.int64)[:, None] * R + r[None, :]
            narrow += tl.load(h + place, mask=valid[:, None] & (r < R)[None, :], other=0.0)
        weight = b + which.to(tl.int64) * N * R + n[:, None] * R + r[None, :]
        w = tl.load(weight, mask=(n < N)[:, None] & (r < R)[None, :], other=0.0)
        inside = valid[:, None] & (n < N)[None, :]
        target = y + m.to(tl.int64)[:, None] * N + n[None, :]
        base = tl.load(target, mask=inside, other=0.0).to(tl.float32)
        total = tl.dot(narrow.to(w.dtype), tl.trans(w), base, input_precision="ieee")
        tl.store(target, total.to(y.dtype.element_ty), mask=inside)


def add(y: Tensor, x: Tensor, adapters: Adapters, units: LoraUnits) -> None:
    """y [T, N] dense += each token's adapter applied to x [T, K]; tokens without one are not touched."""
    assert y.is_contiguous()
    assert x.stride(1) == 1
    _, rank, k = adapters.a.shape
    tokens, n = y.shape
    h = torch.empty((_PARTS, tokens, rank), dtype=torch.float32, device=x.device)
    block_r = max(16, int(triton.next_power_of_2(rank)))
    number = len(units.start)
    if tokens == 0:
        return
    described = units.start, units.stop, units.adapter
    shrink_kernel[(number, _PARTS)](
        x,
        adapters.a,
        *described,
        h,
        tokens,
        k,
        x.stride(0),
        R=rank,
        PARTS=_PARTS,
        BLOCK_M=TOKENS,
        BLOCK_R=block_r,
        BLOCK_K=64,
        num_warps=4,
        num_stages=3,
    )
    expand_kernel[(number, triton.cdiv(n, 64))](
        h,
        adapters.b,
        *described,
        y,
        tokens,
        n,
        R=rank,
        PARTS=_PARTS,
        BLOCK_M=TOKENS,
        BLOCK_R=block_r,
        BLOCK_N=64,
        num_warps=4,
    )
