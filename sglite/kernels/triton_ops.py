"""The Ops of a GPU: Triton kernels behind the seam, dense products by the vendor's library.

What a CUDA graph may rely on: for a batch in which every row has one token, ``plan``, ``attend`` and every other method
launch work whose shape depends on the sizes of the batch's tensors alone; lengths, pages and slots are read on the
device, nothing synchronises. A row of length 0 attends to nothing and yields zeros, a negative write slot is not
written: that is how a captured bucket is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from sglite.kernels import triton_elementwise as elementwise
from sglite.kernels.decoder import DecoderWeights
from sglite.kernels.ops import AttentionSpec, ForwardBatch, KVPool, KVShape, Linear, Table
from sglite.kernels.reference import DenseLinear, PagedKV, ReferenceOps, allocate_paged_kv, attend_rows
from sglite.kernels.triton_card import HEAD_DIM_LIMIT, card_of
from sglite.kernels.triton_plan import Planner, attend
from sglite.kernels.weights import WeightSource, dense

TritonWeights = Literal["dense", "int8", "int4", "fp8"]


class TritonOps:
    """Implements :class:`sglite.kernels.ops.Ops`."""

    name = "triton"

    def __init__(self, device: torch.device, dtype: torch.dtype, weights: TritonWeights = "dense") -> None:
        self.device = device
        self.dtype = dtype
        self.card = card_of(device)
        self._planner = Planner(self.card, dtype)
        self._reference = ReferenceOps(device, dtype)

    def pack(self, weight: WeightSource, bias: Tensor | None = None) -> Linear:
        return self.pack_many([weight], bias)

    def pack_many(self, weights: Sequence[WeightSource], bias: Tensor | None = None) -> Linear:
        return self._reference.pack_many(weights, bias)

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        return self._reference.linear(x, weight)

    def allocate_kv(self, shape: KVShape) -> PagedKV:
        return allocate_paged_kv(shape)

    def plan(self, batch: ForwardBatch, spec: AttentionSpec) -> Any:
        return self._planner.plan(batch, spec) if self.captures(spec) else None

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

    def fused_decoder(self, weights: DecoderWeights) -> Callable[[ForwardBatch, KVPool], Tensor] | None:
        return None
