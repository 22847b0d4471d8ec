"""The Ops of a GPU: Triton kernels behind the seam, dense products by the vendor's library.

What a CUDA graph may rely on: for a batch in which every row has one token, ``plan``, ``attend`` and every other method
launch work whose shape depends on the sizes of the batch's tensors alone; lengths, pages and slots are read on the
device, nothing synchronises. A row of length 0 attends to nothing and yields zeros, a negative write slot is not
written: that is how a captured bucket is padded.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from sglite.errors import ConfigError
from sglite.kernels import triton_elementwise as elementwise
from sglite.kernels import triton_lora as lora
from sglite.kernels.decoder import DecoderWeights
from sglite.kernels.ops import Adapters, AttentionSpec, ForwardBatch, KVPool, KVShape, Linear, Table
from sglite.kernels.reference import DenseLinear, PagedKV, allocate_paged_kv, attend_rows, stacked
from sglite.kernels.triton_card import HEAD_DIM_LIMIT, Card, card_of
from sglite.kernels.triton_decoder import TritonDecoder
from sglite.kernels.triton_linear import ChannelLinear, GroupLinear, linear
from sglite.kernels.triton_pack import pack
from sglite.kernels.triton_plan import Planner, attend
from sglite.kernels.weights import WeightSource, dense

log = logging.getLogger(__name__)

DTYPES = torch.bfloat16, torch.float16, torch.float32
TritonWeights = Literal["dense", "int8", "int4", "fp8"]


class TritonOps:
    """Implements :class:`sglite.kernels.ops.Ops`."""

    name = "triton"

    def __init__(
        self, device: torch.device, dtype: torch.dtype, weights: TritonWeights = "dense", card: Card | None = None
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.card = card or card_of(device)
        self._planner = Planner(self.card, dtype)
        self._weights: TritonWeights = weights
        _check(dtype, weights, self.card)

    def pack(self, weight: WeightSource, bias: Tensor | None = None) -> Linear:
        return self.pack_many([weight], bias)

    def pack_many(self, weights: Sequence[WeightSource], bias: Tensor | None = None) -> Linear:
        bias = None if bias is None else bias.to(self.device, self.dtype)
        if self._weights == "dense":
            weight = stacked(weights, self.device, self.dtype)
            return DenseLinear(weight.shape[0], weight.shape[1], weight, bias)
        return pack(weights, bias, self._weights, self.device)

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        if isinstance(weight, DenseLinear):
            return functional.linear(x, weight.weight, weight.bias)  # the vendor's library
        assert isinstance(weight, ChannelLinear | GroupLinear)
        return linear(x, weight, self.card)

    def allocate_kv(self, shape: KVShape) -> PagedKV:
        return allocate_paged_kv(shape)

    def plan(self, batch: ForwardBatch, spec: AttentionSpec) -> Any:
        if self.captures(spec):
            return self._planner.plan(batch, spec)
        _say_once(spec.head_dim)
        return None

    def write_kv(self, kv: KVPool, layer: int, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        assert isinstance(kv, PagedKV)
        elementwise.write_kv(k, v, *kv.layer(layer), batch.write_slots)

    def attend(self, q: Tensor, kv: KVPool, layer: int, batch: ForwardBatch, spec: AttentionSpec, plan: Any) -> Tensor:
        assert isinstance(kv, PagedKV)
        if plan is None:
            return attend_rows(q, kv, layer, batch, spec)
        return attend(q, *kv.layer(layer), batch, spec, plan)

    def captures(self, spec: AttentionSpec) -> bool:
        """Whether a step of one token a row with this attention can be captured in a CUDA graph."""
        return spec.head_dim <= HEAD_DIM_LIMIT

    def prefix_tokens(self, spec: AttentionSpec) -> int:
        """``tile_tokens`` for ``pack_shared`` and ``shared_views``, whose result goes into ``ForwardBatch.shared``."""
        return self._planner.prefix_tokens(spec)

    def table(self, weight: WeightSource, head: Linear | None) -> Tensor:
        return head.weight if isinstance(head, DenseLinear) else dense(weight, self.dtype).to(self.device)

    def embed(self, ids: Tensor, table: Table) -> Tensor:
        assert isinstance(table, Tensor)
        return elementwise.gather_rows(table, ids)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return elementwise.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return elementwise.add_rms_norm(x, residual, weight, eps)

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return elementwise.rope(q, cos, sin), elementwise.rope(k, cos, sin)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return elementwise.silu_mul(gate_up)

    def plan_adapters(self, batch: ForwardBatch, adapters: Sequence[int]) -> lora.LoraUnits:
        return lora.plan(batch.indptr_host, adapters, self.device)

    def add_adapters(self, y: Tensor, x: Tensor, adapters: Adapters, plan: lora.LoraUnits) -> None:
        lora.add(y, x, adapters, plan)

    def fused_decoder(self, weights: DecoderWeights) -> Callable[[ForwardBatch, KVPool], Tensor] | None:
        """None where a layer's heads are larger than the attention kernels take."""
        specs = {layer.attention or weights.attention for layer in weights.layers}
        return TritonDecoder(self, weights) if all(map(self.captures, specs)) else None


def _check(dtype: torch.dtype, weights: TritonWeights, card: Card) -> None:
    if dtype not in DTYPES:
        raise ConfigError(f"kernels=triton computes in {', '.join(map(str, DTYPES))}, not {dtype}; set dtype")
    if weights == "fp8" and not card.has_fp8:
        raise ConfigError("weights=fp8 needs an NVIDIA card of compute capability 8.9 or newer; use weights=int8")


@functools.cache
def _say_once(head_dim: int) -> None:
    log.warning(
        "kernels=triton attends to heads of up to %d; heads of %d go through plain torch", HEAD_DIM_LIMIT, head_dim
    )
