"""Torch's own best CPU operators: products on weights packed once, attention over rows gathered into batches.

The prepacked and integer products are private operators of torch. Each is tried once when the Ops is made; where one
is absent or refuses this machine, ``F.linear`` takes its place, with one notice in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from sglite.errors import ConfigError
from sglite.kernels.decoder import DecoderWeights
from sglite.kernels.ops import AttentionSpec, ForwardBatch, KVPool, KVShape, Linear, Table
from sglite.kernels.reference import PagedKV, allocate_paged_kv, attend_rows, stacked, visible
from sglite.kernels.weights import WeightSource, dense

log = logging.getLogger(__name__)

# ---------------------------------------------------------------------------------------------------------- products


class CpuLinear(Protocol):
    """A Linear that knows how to multiply."""

    out_features: int
    in_features: int

    def __call__(self, x: Tensor) -> Tensor: ...


class PlainLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class PrepackedLinear:
    """oneDNN's product on a weight that is reordered once: 1.3 to 2.6 times F.linear for up to 32 rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, 32)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        product = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return cast(Tensor, product)


class Int8Linear:
    """Symmetric int8: weights per output channel, activations per row, so a row's result never depends on others."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        codes, scale = _quantize_rows(weight.float())
        self._codes, self._scale, self._bias = codes.t(), scale.t(), bias

    def __call__(self, x: Tensor) -> Tensor:
        codes, scale = _quantize_rows(x.float())
        product = torch._int_mm(codes, self._codes) * (scale * self._scale)
        return (product if self._bias is None else product + self._bias).to(x.dtype)


def _quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes [N, K] and fp32 scales [N, 1] with x close to codes * scales."""
    scale = x.abs().amax(dim=1, keepdim=True).clamp_min(1e-30) / 127
    return (x / scale).round().to(torch.int8), scale


LinearMaker = Callable[[Tensor, Tensor | None], CpuLinear]


def _linear_maker(weights: Literal["dense", "int8", "int4"], dtype: torch.dtype) -> LinearMaker:
    if weights == "int4":
        raise ConfigError("weights=int4 needs the compiled CPU kernels; without them use weights=int8 or weights=dense")
    best: LinearMaker = Int8Linear if weights == "int8" else PrepackedLinear
    if _works(best, dtype):
        return best
    log.warning("torch %s lacks the fast %s products for %s here: using F.linear", torch.__version__, weights, dtype)
    return PlainLinear


def _works(maker: LinearMaker, dtype: torch.dtype) -> bool:
    try:
        maker(torch.ones(32, 32, dtype=dtype), None)(torch.ones(2, 32, dtype=dtype))
    except (AttributeError, RuntimeError):  # NotImplementedError is a RuntimeError
        return False
    return True


# --------------------------------------------------------------------------------------------------------- attention

_BLOCK = 256
"""Most query tokens of a row in one attention call; bounds the mask and skips most of what causality hides."""
_SHORT = 16
"""Rows with up to this many new tokens share a call with rows of similar length."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Query positions ``[start, stop)`` of ``row``, whose first is token ``token``; keys from ``first`` to ``stop``."""

    row: int
    token: int
    start: int
    stop: int
    first: int


@dataclass(frozen=True, slots=True)
class _Group:
    """b blocks of n queries that attend in one call over L keys each.

    ``tokens`` int64 [b n] indexes T, ``slots`` int64 [b L] the pool. ``mask`` [b, 1, n H / G, L] is added to scores.
    """

    tokens: Tensor
    slots: Tensor
    mask: Tensor
    blocks: int


def _blocks(batch: ForwardBatch, window: int | None) -> list[_Block]:
    blocks = []
    for row, ((begin, end), length) in enumerate(zip(pairwise(batch.indptr_host), batch.kv_lengths_host, strict=True)):
        for token in range(begin, end, _BLOCK):
            start, stop = length - end + token, length - end + min(token + _BLOCK, end)
            first = 0 if window is None else max(0, start - window + 1)
            blocks.append(_Block(row, token, start, stop, first))
    return blocks


def _grouped(blocks: list[_Block]) -> list[list[_Block]]:
    """Short blocks of equal size whose key counts differ by less than a factor of two go together."""
    groups: dict[tuple[int, int], list[_Block]] = {}
    for index, block in enumerate(blocks):
        size = block.stop - block.start
        key = (size, (block.stop - block.first).bit_length()) if size <= _SHORT else (-1, index)
        groups.setdefault(key, []).append(block)
    return list(groups.values())


def _group(blocks: list[_Block], batch: ForwardBatch, spec: AttentionSpec, dtype: torch.dtype) -> _Group:
    row, token, start, stop, first = torch.tensor(
        [(b.row, b.token, b.start, b.stop, b.first) for b in blocks]
    ).T.unsqueeze(-1)  # each [b, 1]
    new = torch.arange(blocks[0].stop - blocks[0].start)
    keys = first + torch.arange(max(b.stop - b.first for b in blocks))
    inside = keys.minimum(stop - 1)  # what is behind a row's end is masked, but must be a slot that was written
    pages = batch.page_table[row, inside // batch.page_size].to(torch.int64)
    slots = pages * batch.page_size + inside % batch.page_size
    seen = visible(start + new, keys.unsqueeze(1), spec.window)
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)
    repeated = mask.unsqueeze(2).expand(-1, -1, spec.heads // spec.kv_heads, -1).flatten(1, 2).unsqueeze(1)
    return _Group((token + new).flatten(), slots.flatten(), repeated, len(blocks))


def _attend_group(q: Tensor, keys: Tensor, values: Tensor, group: _Group, spec: AttentionSpec) -> Tensor:
    """q [b n, H, D] -> [b n, H, D]. Heads that share keys are laid out as further queries, so no key is repeated."""
    by_kv_head = (group.blocks, -1, spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim)
    queries = q.view(by_kv_head).transpose(1, 2).flatten(2, 3)
    k, v = (
        pool.index_select(0, group.slots).view(group.blocks, -1, spec.kv_heads, spec.head_dim).transpose(1, 2)
        for pool in (keys, values)
    )
    out = F.scaled_dot_product_attention(queries, k, v, attn_mask=group.mask, scale=spec.scale)
    ratio = spec.heads // spec.kv_heads
    return out.view(group.blocks, spec.kv_heads, -1, ratio, spec.head_dim).transpose(1, 2).reshape(q.shape)


# --------------------------------------------------------------------------------------------------------------- ops


class CpuOps:
    """Implements :class:`sglite.kernels.ops.Ops` on a CPU; ConfigError for a format it cannot hold weights in."""

    name = "cpu"

    def __init__(self, device: torch.device, dtype: torch.dtype, weights: Literal["dense", "int8", "int4"]) -> None:
        if device.type != "cpu":
            raise ConfigError(f"kernels=cpu does not run on device={device.type}")
        self.device = device
        self.dtype = dtype
        self._make_linear = _linear_maker(weights, dtype)

    def pack(self, weight: WeightSource, bias: Tensor | None = None) -> Linear:
        return self.pack_many([weight], bias)

    def pack_many(self, weights: Sequence[WeightSource], bias: Tensor | None = None) -> Linear:
        bias = None if bias is None else bias.to(self.device, self.dtype)
        return self._make_linear(stacked(weights, self.device, self.dtype), bias)

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        return cast(CpuLinear, weight)(x)

    def allocate_kv(self, shape: KVShape) -> PagedKV:
        return allocate_paged_kv(shape)

    def plan(self, batch: ForwardBatch, spec: AttentionSpec) -> list[_Group]:
        return [_group(blocks, batch, spec, self.dtype) for blocks in _grouped(_blocks(batch, spec.window))]

    def write_kv(self, kv: KVPool, layer: int, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        assert isinstance(kv, PagedKV)
        for pool, new in zip(kv.layer(layer), (k, v), strict=True):
            pool.index_copy_(0, batch.write_slots, new)

    def attend(self, q: Tensor, kv: KVPool, layer: int, batch: ForwardBatch, spec: AttentionSpec, plan: Any) -> Tensor:
        assert isinstance(kv, PagedKV)
        if spec.softcap is not None:  # torch's fused attention has no such step
            return attend_rows(q, kv, layer, batch, spec)
        keys, values = kv.layer(layer)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in plan:
            out[group.tokens] = _attend_group(q.index_select(0, group.tokens), keys, values, group, spec)
        return out

    def table(self, weight: WeightSource, head: Linear | None) -> Tensor:
        return dense(weight, self.dtype).to(self.device)  # oneDNN's packed weights cannot be read by row

    def embed(self, ids: Tensor, table: Table) -> Tensor:
        assert isinstance(table, Tensor)
        return F.embedding(ids, table)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = residual + x
        return self.rms_norm(total, weight, eps), total

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos[:, None, None], sin[:, None]
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def fused_decoder(self, weights: DecoderWeights) -> Callable[[ForwardBatch, KVPool], Tensor] | None:
        return None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The reference's ``rotate_halves`` in three passes: x [T, heads, D], cos [T, 1, 1, D / 2], sin [T, 1, D / 2]."""
    halves = x.float().view(*x.shape[:2], 2, -1)
    out = halves * cos
    out[:, :, 0].addcmul_(halves[:, :, 1], sin, value=-1)
    out[:, :, 1].addcmul_(halves[:, :, 0], sin)
    return out.flatten(2).to(x.dtype)
