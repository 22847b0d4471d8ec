"""Triton kernels that stream through memory once: norms, RoPE with the write into KV pages, SiLU·mul, row gathers.

Each program moves a tile of a few kilobytes and keeps it in registers between its one read and its one write.
Tile sizes depend on the row's width alone, so results do not depend on the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048
"""Elements a program keeps in registers, where one row is not longer than that."""


def _block(width: int, least: int = 16) -> int:
    return max(least, int(triton.next_power_of_2(width)))


def _warps(elements: int) -> int:
    """Eight to sixteen elements a thread."""
    return min(16, max(1, elements // 512))


# ------------------------------------------------------------------------------------------------------------- norms


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    total: tl.tensor,
    rows: int,
    width: int,
    heads: int,
    x_stride: int,
    head_stride: int,
    eps: float,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < width)
    source = (row // heads).to(tl.int64) * x_stride + (row % heads) * head_stride + column
    target = row.to(tl.int64) * width + column
    value = tl.load(x + source, mask=inside, other=0.0)
    if ADD:
        value += tl.load(residual + target, mask=inside, other=0.0)
        tl.store(total + target, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / width + eps)[:, None]
    gain = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(y + target, (wide * scale * gain).to(y.dtype.element_ty), mask=inside)


def norm_tile(width: int) -> tuple[int, int, int]:
    """BLOCK, ROWS and warps of a norm over rows of that width."""
    block = _block(width)
    rows = max(1, _TILE // block)
    return block, rows, _warps(block * rows)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, E] or [T, heads, D], last dimension dense -> the same shape, dense."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(x, None, weight, y, None, eps)
    return y


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual [T, E] -> (norm of the sum, the sum)."""
    y, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch_norm(x, residual.contiguous(), weight, y, total, eps)
    return y, total


def _launch_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, y: Tensor, total: Tensor | None, eps: float
) -> None:
    assert x.stride(-1) == 1
    width = x.shape[-1]
    rows = x.numel() // width
    heads, head_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    block, tile, warps = norm_tile(width)
    if rows:
        rms_norm_kernel[(triton.cdiv(rows, tile),)](
            x,
            residual,
            weight,
            y,
            total,
            rows,
            width,
            heads,
            x.stride(0),
            head_stride,
            eps,
            ADD=residual is not None,
            BLOCK=block,
            ROWS=tile,
            num_warps=warps,
        )


# -------------------------------------------------------------------------------------------------------------- rope


@triton.jit
def rope_kernel(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    y: tl.tensor,
    heads: int,
    x_stride: int,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    half = tl.arange(0, BLOCK)[None, :]
    inside = (head < heads) & (half < HALF)
    source = x + token * x_stride + head * (2 * HALF) + half
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + token * HALF + half, mask=half < HALF, other=0.0)
    s = tl.load(sin + token * HALF + half, mask=half < HALF, other=0.0)
    target = y + (token * heads + head) * (2 * HALF) + half
    tl.store(target, (first * c - second * s).to(y.dtype.element_ty), mask=inside)
    tl.store(target + HALF, (second * c + first * s).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots"])
def write_kv_kernel(
    k: tl.tensor,
    v: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    tokens: int,
    k_stride: int,
    v_stride: int,
    width: int,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    slot = tl.load(slots + token, mask=token < tokens, other=-1)
    inside = (column < width) & (slot >= 0)
    new_key = tl.load(k + token * k_stride + column, mask=inside)
    new_value = tl.load(v + token * v_stride + column, mask=inside)
    tl.store(keys + slot * width + column, new_key.to(keys.dtype.element_ty), mask=inside)
    tl.store(values + slot * width + column, new_value.to(values.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def qkv_to_pages_kernel(
    qkv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    eps: float,
    H: tl.constexpr,
    G: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """One token's next HEADS heads out of q, k and v: norm, turn, and store where they belong."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    half = tl.arange(0, BLOCK)[None, :]
    inside = (head < H + 2 * G) & (half < HALF)
    source = qkv + (token * (H + 2 * G) + head) * (2 * HALF) + half
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    turned = head < H + G
    if NORM:
        squares = tl.sum(first * first + second * second, axis=1)[:, None]
        scale = tl.where(turned, tl.rsqrt(squares / (2 * HALF) + eps), 1.0)
        first *= scale * _gain(q_norm, k_norm, head, half, H, G, HALF)
        second *= scale * _gain(q_norm, k_norm, head, half + HALF, H, G, 2 * HALF)
        first = first.to(q.dtype.element_ty).to(tl.float32)  # as if the norm were an operation of its own
        second = second.to(q.dtype.element_ty).to(tl.float32)
    position = tl.load(positions + token)
    angle = position * HALF + half
    c = tl.where(turned, tl.load(cos + angle, mask=half < HALF, other=0.0), 1.0)
    s = tl.where(turned, tl.load(sin + angle, mask=half < HALF, other=0.0), 0.0)
    low, high = first * c - second * s, second * c + first * s
    low, high = low.to(q.dtype.element_ty), high.to(q.dtype.element_ty)

    to_q = inside & (head < H)
    target = q + (token * H + head) * (2 * HALF) + half
    tl.store(target, low, mask=to_q)
    tl.store(target + HALF, high, mask=to_q)

    slot = tl.load(slots + token)
    to_k = inside & (head >= H) & turned & (slot >= 0)
    target = keys + (slot * G + head - H) * (2 * HALF) + half
    tl.store(target, low.to(keys.dtype.element_ty), mask=to_k)
    tl.store(target + HALF, high.to(keys.dtype.element_ty), mask=to_k)

    to_v = inside & (head >= H + G) & (slot >= 0)
    target = values + (slot * G + head - H - G) * (2 * HALF) + half
    tl.store(target, low.to(values.dtype.element_ty), mask=to_v)
    tl.store(target + HALF, high.to(values.dtype.element_ty), mask=to_v)


@triton.jit
def _gain(
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    head: tl.tensor,
    column: tl.tensor,
    H: tl.constexpr,
    G: tl.constexpr,
    stop: tl.tensor,
):
    """The norm weight of each head at those columns: q's, k's, or 1 for values."""
    q_gain = tl.load(q_norm + column, mask=column < stop, other=0.0).to(tl.float32)
    k_gain = tl.load(k_norm + column, mask=column < stop, other=0.0).to(tl.float32)
    return tl.where(head < H, q_gain, tl.where(head < H + G, k_gain, 1.0))


def head_tile(half: int) -> tuple[int, int, int]:
    """BLOCK, HEADS and warps of the kernels that turn heads of twice that size."""
    block = _block(half)
    heads = max(1, _TILE // 4 // block)
    return block, heads, _warps(2 * heads * block)


def write_tile(width: int) -> tuple[int, int, int]:
    """BLOCK, TOKENS and warps of the write of rows of that width."""
    block = min(1024, _block(width))
    tokens = _TILE // 2 // block
    return block, tokens, _warps(2 * block * tokens)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D] with dense heads, cos and sin fp32 [T, D / 2] -> dense [T, heads, D]."""
    tokens, heads, size = x.shape
    assert x.stride()[1:] == (size, 1)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block, tile, warps = head_tile(size // 2)
    if tokens:
        rope_kernel[(tokens, triton.cdiv(heads, tile))](
            x, cos, sin, y, heads, x.stride(0), HALF=size // 2, BLOCK=block, HEADS=tile, num_warps=warps
        )
    return y


def write_kv(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """k, v [T, G, D] with dense heads into keys, values [slots, G, D]; a negative slot is not written."""
    tokens, heads, size = k.shape
    assert k.stride()[1:] == v.stride()[1:] == (size, 1)
    width = heads * size
    block, tile, warps = write_tile(width)
    if tokens:
        write_kv_kernel[(triton.cdiv(tokens, tile), triton.cdiv(width, block))](
            k,
            v,
            keys,
            values,
            slots,
            tokens,
            k.stride(0),
            v.stride(0),
            width,
            BLOCK=block,
            TOKENS=tile,
            num_warps=warps,
        )


def qkv_to_pages(
    qkv: Tensor,
    heads: int,
    positions: Tensor,
    slots: Tensor,
    tables: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """qkv [T, (H + 2 G) D] dense: q normed and turned -> [T, H, D]; k likewise, and v, into ``keys``, ``values``.

    ``tables``: cos and sin, fp32 [context, D / 2]. ``norms``: weights [D] of q and k. A negative slot is not written.
    """
    kv_heads, size = keys.shape[1:]
    assert qkv.is_contiguous()
    q = torch.empty((len(qkv), heads, size), dtype=qkv.dtype, device=qkv.device)
    block, tile, warps = head_tile(size // 2)
    q_norm, k_norm = norms if norms is not None else (None, None)
    if len(qkv):
        qkv_to_pages_kernel[(len(qkv), triton.cdiv(heads + 2 * kv_heads, tile))](
            qkv,
            *tables,
            positions,
            slots,
            q_norm,
            k_norm,
            q,
            keys,
            values,
            eps,
            H=heads,
            G=kv_heads,
            HALF=size // 2,
            NORM=norms is not None,
            BLOCK=block,
            HEADS=tile,
            num_warps=warps,
        )
    return q


# ------------------------------------------------------------------------------------------------ activation, gathers


@triton.jit
def silu_mul_kernel(gate_up: tl.tensor, y: tl.tensor, width: int, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    source = gate_up + token * 2 * width + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + token * width + column, (gate * tl.sigmoid(gate) * up).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["index"])
def gather_rows_kernel(table: tl.tensor, index: tl.tensor, y: tl.tensor, width: int, stride: int, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(index + row).to(tl.int64) * stride
    value = tl.load(table + source + column, mask=column < width)
    tl.store(y + row * width + column, value, mask=column < width)


def column_tile(width: int) -> tuple[int, int]:
    """BLOCK and warps of the kernels that go through a row in pieces."""
    block = min(1024, _block(width))
    return block, _warps(2 * block)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 F] dense -> [T, F]"""
    assert gate_up.is_contiguous()
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    block, warps = column_tile(width)
    if tokens:
        silu_mul_kernel[(tokens, triton.cdiv(width, block))](gate_up, y, width, BLOCK=block, num_warps=warps)
    return y


def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    """table [V, E] with dense rows, index int [N] -> [N, E]: embeddings by id, hidden states by position."""
    assert table.stride(1) == 1
    width = table.shape[1]
    y = torch.empty((len(index), width), dtype=table.dtype, device=table.device)
    block, warps = column_tile(width)
    if len(index):
        gather_rows_kernel[(len(index), triton.cdiv(width, block))](
            table, index, y, width, table.stride(0), BLOCK=block, num_warps=warps
        )
    return y
