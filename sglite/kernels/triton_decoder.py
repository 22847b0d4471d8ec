"""The whole stack on a GPU: the model's own loop with norm, RoPE and the write into pages in one launch."""

from __future__ import annotations

from torch import Tensor

from sglite.kernels import triton_elementwise as elementwise
from sglite.kernels.decoder import DecoderWeights, LayerWeights
from sglite.kernels.ops import ForwardBatch, KVPool, Ops
from sglite.kernels.reference import PagedKV
from sglite.kernels.triton_plan import AttentionPlan, attend


class TritonDecoder:
    """``decoder(batch, kv)`` -> hidden [R, E] of the wanted positions; may be captured in a CUDA graph.

    ``ops`` is the TritonOps that packed the weights.
    """

    def __init__(self, ops: Ops, weights: DecoderWeights) -> None:
        self._ops = ops
        self._weights = weights
        self._specs = {layer.attention or weights.attention for layer in weights.layers}
        layers = weights.layers
        self._next_norms = [layer.attention_norm for layer in layers[1:]] + [weights.final_norm]

    def __call__(self, batch: ForwardBatch, kv: KVPool) -> Tensor:
        assert isinstance(kv, PagedKV)
        ops, weights = self._ops, self._weights
        plans = {spec: ops.plan(batch, spec) for spec in self._specs}
        residual = ops.embed(batch.ids, weights.embedding)
        x = elementwise.rms_norm(residual, weights.layers[0].attention_norm, weights.eps)
        for index, (layer, next_norm) in enumerate(zip(weights.layers, self._next_norms, strict=True)):
            spec = layer.attention or weights.attention
            x = self._attention(x, layer, batch, *kv.layer(index), plans[spec])
            x, residual = elementwise.add_rms_norm(x, residual, layer.mlp_norm, weights.eps)
            x = ops.linear(elementwise.silu_mul(ops.linear(x, layer.gate_up)), layer.down)
            x, residual = elementwise.add_rms_norm(x, residual, next_norm, weights.eps)
        return elementwise.gather_rows(x, batch.logit_index)

    def _attention(
        self, x: Tensor, layer: LayerWeights, batch: ForwardBatch, keys: Tensor, values: Tensor, plan: AttentionPlan
    ) -> Tensor:
        weights = self._weights
        spec = layer.attention or weights.attention
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = layer.q_norm, layer.k_norm
        q = elementwise.qkv_to_pages(
            self._ops.linear(x, layer.qkv),
            spec.heads,
            batch.positions,
            batch.write_slots,
            (weights.cos, weights.sin),
            norms,
            weights.eps,
            keys,
            values,
        )
        y = attend(q, keys, values, batch, spec, plan)
        return self._ops.linear(y.flatten(1), layer.o)
