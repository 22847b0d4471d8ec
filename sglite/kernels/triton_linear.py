"""Products with weights of 8 or 4 bits: codes are read as they lie, widened in registers and multiplied in x's type.

Few rows (decoding) are bound by the codes' bytes: narrow tiles, several in flight, K split over programs until the card
is full and the parts summed in order. Many rows use the square tiles of an ordinary product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglite.kernels.triton_card import Card

GROUP = 32
"""Columns that share a scale in the grouped formats: GGUF's block, so its files need no rounding."""
HALF = 128
"""Columns whose codes are the low or the high nibbles of a run of bytes."""


@dataclass(slots=True)
class ChannelLinear:
    """``codes`` int8 or float8_e4m3fn [N, K], ``scale`` fp32 [N]: weight = code * scale of its row."""

    out_features: int
    in_features: int
    codes: Tensor
    scale: Tensor
    bias: Tensor | None


@dataclass(slots=True)
class GroupLinear:
    """weight = (code - shift) * scale + offset by groups of 32 columns, K rounded up to a multiple of 256 by zeros.

    8 bits: ``codes`` int8 [N, K], shift 0. 4 bits: uint8 [N, K / 2], where byte j of 128 holds column j of a step of
    256 in its low and column 128 + j in its high half; the shift is 8 unless there are offsets. ``scale``, ``offset``
    fp16 [N, K / 32].
    """

    out_features: int
    in_features: int
    bits: int
    codes: Tensor
    scale: Tensor
    offset: Tensor | None
    bias: Tensor | None


@triton.jit(do_not_specialize=["rows"])
def channel_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    rows: int,
    N: int,
    K: int,
    x_stride: int,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    steps = tl.cdiv(K, BLOCK_K)
    each = tl.cdiv(steps, SPLIT)
    first = tl.program_id(2) * each
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(first, tl.minimum(first + each, steps)):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        a = tl.load(
            x + m.to(tl.int64)[:, None] * x_stride + k[None, :], mask=(m < rows)[:, None] & (k < K)[None, :], other=0.0
        )
        w = tl.load(
            codes + n.to(tl.int64)[:, None] * K + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0
        )
        acc = tl.dot(a, tl.trans(w.to(a.dtype)), acc, input_precision=PRECISION)
    gain = tl.load(scale + n, mask=n < N, other=0.0)
    _finish(acc * gain[None, :], bias, y, m, n, rows, N, SPLIT, BIAS)


@triton.jit(do_not_specialize=["rows"])
def group_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scale: tl.tensor,
    offset: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    rows: int,
    N: int,
    K: int,
    steps: int,
    x_stride: int,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HALF: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A step is two halves of HALF columns, so that both nibbles of a byte are used where they lie."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    each = tl.cdiv(steps, SPLIT)
    first = tl.program_id(2) * each
    j = tl.arange(0, HALF)[None, :]
    real, asked = (n < N)[:, None], (m < rows)[:, None]
    a_row = x + m.to(tl.int64)[:, None] * x_stride + j
    w_row = codes + n.to(tl.int64)[:, None] * (steps * (HALF * BITS // 4)) + j
    s_row = n.to(tl.int64)[:, None] * (steps * (HALF // 16)) + tl.arange(0, HALF // 32)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(first, tl.minimum(first + each, steps)):
        k = step * (2 * HALF)
        a0 = tl.load(a_row + k, mask=asked & (k + j < K), other=0.0)
        a1 = tl.load(a_row + k + HALF, mask=asked & (k + HALF + j < K), other=0.0)
        if BITS == 4:
            packed = tl.load(w_row + step * HALF, mask=real, other=0)
            w0, w1 = (packed & 15).to(tl.int8), (packed >> 4).to(tl.int8)
            if not OFFSET:
                w0, w1 = w0 - 8, w1 - 8
        else:
            w0 = tl.load(w_row + k, mask=real, other=0)
            w1 = tl.load(w_row + k + HALF, mask=real, other=0)
        group = s_row + step * (HALF // 16)
        s0 = tl.load(scale + group, mask=real, other=0.0)
        s1 = tl.load(scale + group + HALF // 32, mask=real, other=0.0)
        o0, o1 = s0, s1
        if OFFSET:
            o0 = tl.load(offset + group, mask=real, other=0.0)
            o1 = tl.load(offset + group + HALF // 32, mask=real, other=0.0)
        w0 = _widened(w0, s0, o0, OFFSET, BLOCK_N, HALF).to(a0.dtype)
        w1 = _widened(w1, s1, o1, OFFSET, BLOCK_N, HALF).to(a1.dtype)
        acc = tl.dot(a0, tl.trans(w0), acc, input_precision=PRECISION)
        acc = tl.dot(a1, tl.trans(w1), acc, input_precision=PRECISION)
    _finish(acc, bias, y, m, n, rows, N, SPLIT, BIAS)


@triton.jit
def _widened(
    codes: tl.tensor,
    scale: tl.tensor,
    offset: tl.tensor,
    OFFSET: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HALF: tl.constexpr,
):
    """codes [BLOCK_N, HALF], scale and offset [BLOCK_N, HALF / 32] -> weights in fp32."""
    wide = tl.reshape(codes.to(tl.float32), [BLOCK_N, HALF // 32, 32]) * scale.to(tl.float32)[:, :, None]
    if OFFSET:
        wide += offset.to(tl.float32)[:, :, None]
    return tl.reshape(wide, [BLOCK_N, HALF])


@triton.jit
def _finish(
    acc: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    rows: tl.tensor,
    N: tl.tensor,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
):
    """The result into y [rows, N], or this part of K into fp32 [SPLIT, rows, N] for ``sum_kernel``."""
    inside = (m < rows)[:, None] & (n < N)[None, :]
    target = m.to(tl.int64)[:, None] * N + n[None, :]
    if SPLIT > 1:
        target += tl.program_id(2).to(tl.int64) * rows * N
    elif BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y + target, acc.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def sum_kernel(
    parts: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    rows: int,
    N: int,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(SPLIT):
        total += tl.load(parts + (part * rows + row) * N + n, mask=n < N, other=0.0)
    if BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y + row * N + n, total.to(y.dtype.element_ty), mask=n < N)


# ------------------------------------------------------------------------------------------------------------ launch


@dataclass(frozen=True, slots=True)
class ProductTile:
    """``k`` counts codes a step; ``split``: parts of K."""

    m: int
    n: int
    k: int
    split: int
    warps: int
    stages: int


def channel_tile(card: Card, rows: int, n: int, k: int, itemsize: int) -> ProductTile:
    wide = itemsize > 2
    if rows <= 16:
        block = 128 if wide or card.maker == "amd" else 256
        return ProductTile(16, 32, block, _parts(card, n, 32, k // block), 4, 2 if card.maker == "amd" else 4)
    if rows <= 64 or wide or card.maker == "amd":
        return ProductTile(64, 64, 64, 1, 4, 2)
    return ProductTile(128, 128, 64, 1, 8, 3)


def group_tile(card: Card, rows: int, n: int, k: int, itemsize: int) -> ProductTile:
    stages = 2 if card.maker == "amd" or itemsize > 2 else 3
    if rows <= 16 or itemsize > 2:
        return ProductTile(16, 32, 2 * HALF, _parts(card, n, 32, k // (2 * HALF)) if rows <= 16 else 1, 4, stages)
    return ProductTile(64 if card.maker == "nvidia" else 32, 64, 2 * HALF, 1, 4, stages)


def _parts(card: Card, n: int, block: int, steps: int) -> int:
    """Parts of K (a power of two up to 8, of two steps or more) that give every processor two programs."""
    parts = 1
    while parts < 8 and triton.cdiv(n, block) * parts < 2 * card.processors and steps >= 4 * parts:
        parts *= 2
    return parts


def linear(x: Tensor, weight: ChannelLinear | GroupLinear, card: Card) -> Tensor:
    """x [T, K] with dense rows -> [T, N] in x's type."""
    assert x.stride(1) == 1
    rows, n, k = len(x), weight.out_features, weight.in_features
    y = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    if rows == 0:
        return y
    choose = channel_tile if isinstance(weight, ChannelLinear) else group_tile
    tile = choose(card, rows, n, k, x.element_size())
    into = y if tile.split == 1 else torch.empty((tile.split, rows, n), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(n, tile.n), triton.cdiv(rows, tile.m), tile.split)
    biased = weight.bias is not None
    if isinstance(weight, ChannelLinear):
        channel_kernel[grid](
            x,
            weight.codes,
            weight.scale,
            weight.bias,
            into,
            rows,
            n,
            k,
            x.stride(0),
            SPLIT=tile.split,
            BIAS=biased,
            BLOCK_M=tile.m,
            BLOCK_N=tile.n,
            BLOCK_K=tile.k,
            PRECISION=card.precision,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    else:
        group_kernel[grid](
            x,
            weight.codes,
            weight.scale,
            weight.offset,
            weight.bias,
            into,
            rows,
            n,
            k,
            weight.scale.shape[1] * GROUP // (2 * HALF),
            x.stride(0),
            BITS=weight.bits,
            OFFSET=weight.offset is not None,
            SPLIT=tile.split,
            BIAS=biased,
            BLOCK_M=tile.m,
            BLOCK_N=tile.n,
            HALF=HALF,
            PRECISION=card.precision,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    if tile.split > 1:
        sum_kernel[(rows, triton.cdiv(n, 512))](
            into, weight.bias, y, rows, n, SPLIT=tile.split, BIAS=biased, BLOCK=512, num_warps=4
        )
    return y
