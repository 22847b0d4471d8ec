"""The kernels seam: what a model asks of the hardware, and the batch it asks for.

``Ops`` is implemented by ``reference`` (plain torch, the oracle), ``cpu`` and ``triton``. A model is written once
against it. Layouts that only kernels care about (packed weights, the KV pool) are made by the Ops and opaque to
everyone else.

Shapes: T tokens of the step over all rows, B rows (sequences), R positions that want logits, H query heads,
G key/value heads, D head size, E hidden size, V width of the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from sglite.kernels.cascade import SharedPrefixes
from sglite.kernels.weights import WeightSource

if TYPE_CHECKING:
    from sglite.kernels.decoder import DecoderWeights


@dataclass(frozen=True, slots=True)
class KVShape:
    """Size of a KV pool. Slot s of page p is position ``p * page_size + s`` of the pool."""

    layers: int
    pages: int
    page_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's work, as tensors. Built once by the runner and never changed.

    Row b owns tokens ``indptr[b]:indptr[b+1]``: the last positions before ``kv_lengths[b]``. They attend causally to
    themselves and to all positions before them, found through ``page_table[b]``.
    ``indptr_host`` and ``kv_lengths_host`` repeat two tensors as Python ints so that planning never synchronises.
    """

    ids: Tensor
    """int64 [T]"""
    positions: Tensor
    """int64 [T]"""
    indptr: Tensor
    """int32 [B + 1]"""
    kv_lengths: Tensor
    """int32 [B], the row's tokens of this step included"""
    page_table: Tensor
    """int32 [B, P]; entries past a row's last page are 0 and must not be read"""
    page_size: int
    write_slots: Tensor
    """int64 [T], where in the pool each token's key and value go"""
    logit_index: Tensor
    """int64 [R], the tokens (index into T) whose logits are wanted"""
    indptr_host: tuple[int, ...]
    kv_lengths_host: tuple[int, ...]
    shared: SharedPrefixes | None = None
    """Prefixes that rows of one token each have in common; an Ops may read them once for all (or ignore this)"""

    @property
    def rows(self) -> int:
        return len(self.kv_lengths_host)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What stays the same over a layer's calls. ``window`` counts positions (None: all); ``softcap`` bounds scores."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None


class Linear(Protocol):
    """A packed weight [N, K] with an optional bias; made by ``Ops.pack`` and used by ``Ops.linear``."""

    out_features: int
    in_features: int


@dataclass(frozen=True, slots=True)
class Adapters:
    """Low-rank additions to one product [N, K]: ``a`` [n, R, K] and ``b`` [n, N, R] in the activation dtype.

    A scale is multiplied into ``b``. Adapters of smaller rank are padded with zeros; a product of stacked weights takes
    stacked ranks and a ``b`` that is zero off the diagonal.
    """

    a: Tensor
    b: Tensor


Table = Tensor | Linear
"""An embedding that ``Ops.table`` made."""


class KVPool(Protocol):
    """Keys and values of every layer, in the layout its Ops prefers."""

    shape: KVShape

    def nbytes(self) -> int: ...

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        """Of every layer. All sources are read before any target is written."""
        ...


class Ops(Protocol):
    """The operations a decoder needs. Activations are row-major [T, ...] in ``dtype`` on ``device``."""

    name: str
    device: torch.device
    dtype: torch.dtype

    def pack(self, weight: WeightSource, bias: Tensor | None = None) -> Linear:
        """Lay a weight [N, K] out for this hardware, in the weight format the Ops was made for."""
        ...

    def pack_many(self, weights: Sequence[WeightSource], bias: Tensor | None = None) -> Linear:
        """Stack weights that share their input (q, k, v; gate, up) into one [sum N, K] product."""
        ...

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        """x [T, K] -> [T, N]"""
        ...

    def allocate_kv(self, shape: KVShape) -> KVPool: ...

    def plan(self, batch: ForwardBatch, spec: AttentionSpec) -> Any:
        """Work that depends on the batch but not on the layer; its result goes to ``attend`` unseen."""
        ...

    def write_kv(self, kv: KVPool, layer: int, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        """k, v [T, G, D] into the pool at ``batch.write_slots``."""
        ...

    def attend(self, q: Tensor, kv: KVPool, layer: int, batch: ForwardBatch, spec: AttentionSpec, plan: Any) -> Tensor:
        """q [T, H, D] over the pages of each row, causal -> [T, H, D]"""
        ...

    def table(self, weight: WeightSource, head: Linear | None) -> Table:
        """The embedding [V, E] as ``embed`` reads it. ``head``: the same weight, packed, where the model ties the two;
        an Ops that can read rows of it returns it, so that the weight lies in memory once."""
        ...

    def embed(self, ids: Tensor, table: Table) -> Tensor:
        """Rows of the table: ids [T] -> [T, E]"""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last dimension, computed in fp32."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """residual + x, and its norm: returns (normed, new residual)."""
        ...

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate halves of q [T, H, D] and k [T, G, D] by cos, sin [T, D / 2] (fp32)."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(left half) * right half: [T, 2F] -> [T, F]"""
        ...

    def fused_decoder(self, weights: DecoderWeights) -> Callable[[ForwardBatch, KVPool], Tensor] | None:
        """The whole stack, embedding to final norm, in one call: (batch, kv) -> hidden [R, E] of the wanted positions.

        None where this Ops has no such form for these weights; the model then runs operation by operation.
        """
        ...


@runtime_checkable
class Capturing(Protocol):
    """An Ops whose work may be recorded in a CUDA graph."""

    def captures(self, spec: AttentionSpec) -> bool:
        """Whether a step of one token a row with this attention can be: its launches depend on sizes alone."""
        ...

    def prefix_tokens(self, spec: AttentionSpec) -> int:
        """``tile_tokens`` for ``kernels.cascade``: what attention asks of a batch that names shared prefixes."""
        ...


@runtime_checkable
class Adapting(Protocol):
    """An Ops that adds low-rank adapters to its products, each row of a batch its own."""

    def plan_adapters(self, batch: ForwardBatch, adapters: Sequence[int]) -> Any:
        """What is the same for all layers. ``adapters`` [B]: which one a row wants, -1 for none."""
        ...

    def add_adapters(self, y: Tensor, x: Tensor, adapters: Adapters, plan: Any) -> None:
        """y [T, N] += x Aᵀ Bᵀ in place, with each token's own A and B; x [T, K]. Others' tokens are not touched."""
        ...
