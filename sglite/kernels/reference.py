"""Every operation in the plainest torch: the oracle that faster Ops are tested against.

All arithmetic is fp32 and each result is rounded once to the activation dtype. Runs on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from sglite.kernels.decoder import DecoderWeights
from sglite.kernels.ops import Adapters, AttentionSpec, ForwardBatch, KVPool, KVShape, Linear, Table
from sglite.kernels.weights import WeightSource, dense


@dataclass(slots=True)
class DenseLinear:
    """``weight`` [N, K] and ``bias`` [N], both in the activation dtype."""

    out_features: int
    in_features: int
    weight: Tensor
    bias: Tensor | None


@dataclass(slots=True)
class PagedKV:
    """``k`` and ``v``: [layers, pages, page_size, kv_heads, head_dim]."""

    shape: KVShape
    k: Tensor
    v: Tensor

    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        for pool in (self.k, self.v):
            pool[:, targets] = pool[:, sources]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Views of one layer's keys and values by slot: [pages * page_size, kv_heads, head_dim]."""
        return self.k[layer].flatten(0, 1), self.v[layer].flatten(0, 1)


def allocate_paged_kv(shape: KVShape) -> PagedKV:
    size = (shape.layers, shape.pages, shape.page_size, shape.kv_heads, shape.head_dim)
    k, v = (torch.zeros(size, dtype=shape.dtype, device=shape.device) for _ in range(2))
    return PagedKV(shape, k, v)


def stacked(weights: Sequence[WeightSource], device: torch.device, dtype: torch.dtype) -> Tensor:
    """One plain [sum N, K] weight from several of the same K."""
    return torch.cat([dense(weight, dtype).to(device) for weight in weights])


def row_slots(batch: ForwardBatch, row: int) -> Tensor:
    """Where in the pool positions 0 .. kv_length - 1 of a row lie: int64 [kv_length]."""
    positions = torch.arange(batch.kv_lengths_host[row], device=batch.page_table.device)
    pages = batch.page_table[row, positions // batch.page_size].to(torch.int64)
    return pages * batch.page_size + positions % batch.page_size


def visible(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Which key positions [L] each query position [n] may see: bool [n, L]."""
    distance = queries.unsqueeze(-1) - keys
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def attend_row(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention of one row in fp32: q [n, H, D] are the last n of the L positions of k, v [L, G, D]."""
    length, new = k.shape[0], q.shape[0]
    positions = torch.arange(length, device=q.device)
    repeat = spec.heads // spec.kv_heads
    keys, values = (x.float().repeat_interleave(repeat, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.float(), keys) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.masked_fill(~visible(positions[length - new :], positions, spec.window), -torch.inf)
    return torch.einsum("hnl,lhd->nhd", scores.softmax(dim=-1), values).to(q.dtype)


def attend_rows(q: Tensor, kv: PagedKV, layer: int, batch: ForwardBatch, spec: AttentionSpec) -> Tensor:
    """Attention of the whole batch, row by row: [T, H, D]."""
    keys, values = kv.layer(layer)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for row, (start, stop) in enumerate(pairwise(batch.indptr_host)):
        slots = row_slots(batch, row)
        out[start:stop] = attend_row(q[start:stop], keys[slots], values[slots], spec)
    return out


class ReferenceOps:
    """The oracle; implements :class:`sglite.kernels.ops.Ops` with dense weights."""

    name = "reference"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype

    def pack(self, weight: WeightSource, bias: Tensor | None = None) -> Linear:
        return self.pack_many([weight], bias)

    def pack_many(self, weights: Sequence[WeightSource], bias: Tensor | None = None) -> Linear:
        weight = stacked(weights, self.device, self.dtype)
        bias = None if bias is None else bias.to(self.device, self.dtype)
        return DenseLinear(weight.shape[0], weight.shape[1], weight, bias)

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        assert isinstance(weight, DenseLinear)
        y = x.float() @ weight.weight.float().T
        return (y if weight.bias is None else y + weight.bias.float()).to(self.dtype)

    def allocate_kv(self, shape: KVShape) -> PagedKV:
        return allocate_paged_kv(shape)

    def plan(self, batch: ForwardBatch, spec: AttentionSpec) -> None:
        """Nothing is prepared: ``attend`` looks everything up itself."""

    def write_kv(self, kv: KVPool, layer: int, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        assert isinstance(kv, PagedKV)
        keys, values = kv.layer(layer)
        keys[batch.write_slots] = k.to(keys.dtype)
        values[batch.write_slots] = v.to(values.dtype)

    def attend(self, q: Tensor, kv: KVPool, layer: int, batch: ForwardBatch, spec: AttentionSpec, plan: Any) -> Tensor:
        assert isinstance(kv, PagedKV)
        return attend_rows(q, kv, layer, batch, spec)

    def table(self, weight: WeightSource, head: Linear | None) -> Tensor:
        return head.weight if isinstance(head, DenseLinear) else dense(weight, self.dtype).to(self.device)

    def embed(self, ids: Tensor, table: Table) -> Tensor:
        assert isinstance(table, Tensor)
        return table[ids]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
        return (wide * scale * weight.float()).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = residual + x
        return self.rms_norm(total, weight, eps), total

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotate_halves(q, cos, sin), rotate_halves(k, cos, sin)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)

    def plan_adapters(self, batch: ForwardBatch, adapters: Sequence[int]) -> list[tuple[int, slice]]:
        """Each row's adapter and tokens, of the rows that have one."""
        spans = zip(adapters, pairwise(batch.indptr_host), strict=True)
        return [(which, slice(start, stop)) for which, (start, stop) in spans if which >= 0]

    def add_adapters(self, y: Tensor, x: Tensor, adapters: Adapters, plan: list[tuple[int, slice]]) -> None:
        for which, tokens in plan:
            added = x[tokens].float() @ adapters.a[which].float().T @ adapters.b[which].float().T
            y[tokens] = (y[tokens].float() + added).to(y.dtype)

    def fused_decoder(self, weights: DecoderWeights) -> Callable[[ForwardBatch, KVPool], Tensor] | None:
        return None


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on x [T, heads, D] in fp32; component i pairs with i + D / 2 (the layout of Hugging Face checkpoints)."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
