"""A model's weights handed to the library once, and a step's batch at every call."""

from __future__ import annotations

import ctypes
import weakref
from ctypes import byref
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from sglite.kernels.decoder import DecoderWeights, LayerWeights
from sglite.kernels.native import library
from sglite.kernels.native.pack import NativeLinear, address
from sglite.kernels.ops import AttentionSpec, ForwardBatch, KVPool

if TYPE_CHECKING:
    from sglite.kernels.native.ops import NativeKV, NativeOps

_MAX_HEAD_DIM = 256
_EMBEDDING_KINDS = {torch.float32: 0, torch.bfloat16: 1}
_PACKED_EMBEDDING = 2


def fits(head_dim: int) -> bool:
    """Whether the attention kernels have a form for heads of this size: whole vectors, and not too many."""
    return head_dim % 16 == 0 and head_dim <= _MAX_HEAD_DIM


def supported(weights: DecoderWeights) -> bool:
    """Whether vectors and tiles fit: head size, hidden and intermediate size in whole vectors, one kind of head."""
    specs = [weights.attention, *(layer.attention for layer in weights.layers if layer.attention)]
    sizes = [weights.layers[0].qkv.in_features, weights.layers[0].down.in_features]
    return (
        all(size % 16 == 0 for size in sizes)
        and fits(weights.attention.head_dim)
        and all(_same_but_window(spec, weights.attention) for spec in specs)
    )


def _same_but_window(a: AttentionSpec, b: AttentionSpec) -> bool:
    return (a.heads, a.kv_heads, a.head_dim, a.scale, a.softcap) == (
        b.heads,
        b.kv_heads,
        b.head_dim,
        b.scale,
        b.softcap,
    )


def as_attention(spec: AttentionSpec) -> library.Attention:
    return library.Attention(
        spec.heads, spec.kv_heads, spec.head_dim, spec.window or 0, spec.scale, spec.softcap or 0.0
    )


def as_batch(batch: ForwardBatch) -> library.Batch:
    """Pointers into the batch's tensors, which must outlive it."""
    return library.Batch(
        len(batch.ids),
        batch.rows,
        len(batch.logit_index),
        batch.page_table.shape[1],
        batch.page_size,
        0,
        batch.ids.data_ptr(),
        batch.positions.data_ptr(),
        batch.indptr.data_ptr(),
        batch.kv_lengths.data_ptr(),
        batch.page_table.data_ptr(),
        batch.write_slots.data_ptr(),
        batch.logit_index.data_ptr(),
    )


class FusedDecoder:
    """(batch, kv) -> hidden states of the wanted positions, float32 [R, E]."""

    def __init__(self, native: ctypes.CDLL, weights: DecoderWeights, ops: NativeOps) -> None:
        self._run = native.sglite_decoder_run
        self._hidden = weights.layers[0].qkv.in_features
        self._ops = ops  # its threads run this decoder
        self._kept: list[object] = [weights]
        described = self._describe(weights)
        self._decoder = native.sglite_decoder(ops.context, byref(described))
        weakref.finalize(self, native.sglite_decoder_free, self._decoder)

    def __call__(self, batch: ForwardBatch, kv: KVPool) -> Tensor:
        hidden = torch.empty(len(batch.logit_index), self._hidden)
        self._run(self._decoder, byref(as_batch(batch)), byref(cast("NativeKV", kv).pool), hidden.data_ptr())
        return hidden

    def _describe(self, weights: DecoderWeights) -> library.Decoder:
        layers = (library.Layer * len(weights.layers))(*(self._layer(layer, weights) for layer in weights.layers))
        embedding, kind = self._embedding(weights)
        self._kept.append(layers)
        return library.Decoder(
            len(weights.layers),
            self._hidden,
            weights.layers[0].down.in_features,
            weights.head.out_features,
            weights.eps,
            kind,
            as_attention(weights.attention),
            embedding,
            self._floats(weights.final_norm),
            self._floats(weights.cos),
            self._floats(weights.sin),
            layers,
        )

    def _layer(self, layer: LayerWeights, weights: DecoderWeights) -> library.Layer:
        products = (layer.qkv, layer.o, layer.gate_up, layer.down)
        return library.Layer(
            self._floats(layer.attention_norm),
            self._floats(layer.mlp_norm),
            self._floats(layer.q_norm),
            self._floats(layer.k_norm),
            *(cast(NativeLinear, product).matrix for product in products),
            (layer.attention or weights.attention).window or 0,
            0,
        )

    def _embedding(self, weights: DecoderWeights) -> tuple[int, int]:
        """Its address and kind: a plain table, or the head itself where the two are tied."""
        table = weights.embedding
        if isinstance(table, NativeLinear):
            return ctypes.addressof(table.matrix), _PACKED_EMBEDDING
        plain = cast(Tensor, table).contiguous()
        self._kept.append(plain)
        return plain.data_ptr(), _EMBEDDING_KINDS[plain.dtype]

    def _floats(self, tensor: Tensor | None) -> int | None:
        """The address of the values in fp32, kept as long as the decoder."""
        if tensor is None:
            return None
        values = tensor.float().contiguous()
        self._kept.append(values)
        return address(values)
