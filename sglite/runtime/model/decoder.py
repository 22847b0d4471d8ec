"""The decoder-only transformer of the Llama family: Llama, Mistral, Qwen2 and Qwen3, told apart by their config.

Grouped-query attention with RoPE, RMS norms before each half of a block, SwiGLU. A model is its config, its weights
and the Ops it runs on; nothing is global.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglite.kernels import draws
from sglite.kernels.decoder import DecoderWeights, LayerWeights
from sglite.kernels.draws import Choose, Chooses
from sglite.kernels.ops import AttentionSpec, Capturing, ForwardBatch, KVPool, KVShape, Ops
from sglite.runtime.loading.config import ModelConfig
from sglite.runtime.loading.weights import Weights
from sglite.runtime.model.building import build_decoder


class Decoder:
    """``Decoder(config, weights, ops)``; raises ModelLoadError naming the tensor that is missing, extra or misshapen.

    RoPE tables span ``config.context_length`` positions; a shorter context is a config with a smaller one.
    """

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self._ops = ops
        self._weights = build_decoder(config, weights, ops)
        fused = ops.fused_decoder(self._weights)
        self.fused = fused is not None
        """The Ops computes the whole stack in one call."""
        self._run = fused or self._run_by_operation

    @property
    def choose(self) -> Choose:
        """How tokens are chosen from this model's logits."""
        return self._ops.choose if isinstance(self._ops, Chooses) else draws.choose

    @property
    def captures(self) -> bool:
        """Whether a step of one token a row can be recorded in a CUDA graph."""
        ops, weights = self._ops, self._weights
        specs = {layer.attention or weights.attention for layer in weights.layers}
        return isinstance(ops, Capturing) and all(ops.captures(spec) for spec in specs)

    @property
    def prefix_tokens(self) -> int:
        """``tile_tokens`` of ``kernels.cascade`` for a step that can be recorded."""
        assert isinstance(self._ops, Capturing)
        return self._ops.prefix_tokens(self._weights.attention)

    def kv_shape(self, pages: int, page_size: int) -> KVShape:
        c = self.config
        return KVShape(c.layers, pages, page_size, c.kv_heads, c.head_dim, self._ops.dtype, self._ops.device)

    def allocate_kv(self, pages: int, page_size: int) -> KVPool:
        return self._ops.allocate_kv(self.kv_shape(pages, page_size))

    def forward(self, batch: ForwardBatch, kv: KVPool) -> Tensor:
        """Compute every token of the batch, writing its keys and values; hidden states [R, E] of the wanted ones."""
        return self._run(batch, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [R, V]"""
        logits = self._ops.linear(hidden, self._weights.head)
        return logits if logits.dtype == torch.float32 else logits.float()

    def _run_by_operation(self, batch: ForwardBatch, kv: KVPool) -> Tensor:
        ops, weights = self._ops, self._weights
        step = _Step(ops, weights, batch, kv)
        residual = ops.embed(batch.ids, weights.embedding)
        x = ops.rms_norm(residual, weights.layers[0].attention_norm, weights.eps)
        next_norms = [layer.attention_norm for layer in weights.layers[1:]] + [weights.final_norm]
        for index, (layer, next_norm) in enumerate(zip(weights.layers, next_norms, strict=True)):
            x = step.attention(x, index, layer)
            x, residual = ops.add_rms_norm(x, residual, layer.mlp_norm, weights.eps)
            x = step.mlp(x, layer)
            x, residual = ops.add_rms_norm(x, residual, next_norm, weights.eps)
        return x[batch.logit_index]


class _Step:
    """One pass over the layers: what they share besides the activations."""

    def __init__(self, ops: Ops, weights: DecoderWeights, batch: ForwardBatch, kv: KVPool) -> None:
        self.ops = ops
        self.weights = weights
        self.batch = batch
        self.kv = kv
        self.cos, self.sin = weights.cos[batch.positions], weights.sin[batch.positions]
        specs = {layer.attention or weights.attention for layer in weights.layers}
        self.plans = {spec: ops.plan(batch, spec) for spec in specs}

    def attention(self, x: Tensor, index: int, layer: LayerWeights) -> Tensor:
        ops, batch = self.ops, self.batch
        spec = layer.attention or self.weights.attention
        q, k, v = self._split(ops.linear(x, layer.qkv), spec)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = (ops.rms_norm(x, w, self.weights.eps) for x, w in ((q, layer.q_norm), (k, layer.k_norm)))
        q, k = ops.rope(q, k, self.cos, self.sin)
        ops.write_kv(self.kv, index, k, v, batch)
        y = ops.attend(q, self.kv, index, batch, spec, self.plans[spec])
        return ops.linear(y.flatten(1), layer.o)

    def _split(self, qkv: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
        """[T, (H + 2 G) D] -> q [T, H, D], k and v [T, G, D]; views."""
        heads = qkv.view(len(qkv), -1, spec.head_dim)
        kv_start, v_start = spec.heads, spec.heads + spec.kv_heads
        return heads[:, :kv_start], heads[:, kv_start:v_start], heads[:, v_start:]

    def mlp(self, x: Tensor, layer: LayerWeights) -> Tensor:
        return self.ops.linear(self.ops.silu_mul(self.ops.linear(x, layer.gate_up)), layer.down)
