"""From tensors by Hugging Face name to a decoder's packed weights, each one accounted for."""

from __future__ import annotations

import torch
from torch import Tensor

from sglite.errors import ModelLoadError
from sglite.kernels.decoder import DecoderWeights, LayerWeights
from sglite.kernels.ops import AttentionSpec, Linear, Ops
from sglite.kernels.weights import WeightSource, dense
from sglite.runtime.loading.config import ModelConfig
from sglite.runtime.loading.weights import Weights
from sglite.runtime.model.rope import rope_tables

EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def build_decoder(config: ModelConfig, weights: Weights, ops: Ops) -> DecoderWeights:
    """Raises ModelLoadError naming a tensor that is missing, has the wrong shape, or that nothing uses."""
    files = _Reader(weights, ops)
    size = (config.vocab_size, config.hidden_size)
    embedding = files.take(EMBEDDING, *size)
    if config.tied_embeddings:
        files.ignore(HEAD)  # some files repeat the embedding under this name
    head = embedding if config.tied_embeddings else files.take(HEAD, *size)
    layers = tuple(_layer(config, index, files) for index in range(config.layers))
    final_norm = files.vector(FINAL_NORM, config.hidden_size)
    files.finish()
    cos, sin = rope_tables(config.rope, config.head_dim, config.context_length, ops.device)
    packed_head = ops.pack(head)
    return DecoderWeights(
        embedding=ops.table(embedding, packed_head if config.tied_embeddings else None),
        layers=layers,
        final_norm=final_norm,
        head=packed_head,
        cos=cos,
        sin=sin,
        attention=_spec(config, 0),
        eps=config.norm_eps,
    )


def _spec(config: ModelConfig, layer: int) -> AttentionSpec:
    c = config
    return AttentionSpec(c.heads, c.kv_heads, c.head_dim, scale=c.head_dim**-0.5, window=c.windows[layer])


def _layer(config: ModelConfig, index: int, files: _Reader) -> LayerWeights:
    c = config
    q_size, kv_size = c.heads * c.head_dim, c.kv_heads * c.head_dim
    at = f"model.layers.{index}."
    attention, mlp = at + "self_attn.", at + "mlp."
    return LayerWeights(
        attention_norm=files.vector(at + "input_layernorm.weight", c.hidden_size),
        qkv=files.stack(
            {attention + "q_proj": q_size, attention + "k_proj": kv_size, attention + "v_proj": kv_size},
            c.hidden_size,
            bias=c.qkv_bias,
        ),
        o=files.stack({attention + "o_proj": c.hidden_size}, q_size, bias=c.o_bias),
        mlp_norm=files.vector(at + "post_attention_layernorm.weight", c.hidden_size),
        gate_up=files.stack(
            {mlp + "gate_proj": c.intermediate_size, mlp + "up_proj": c.intermediate_size},
            c.hidden_size,
            bias=c.mlp_bias,
        ),
        down=files.stack({mlp + "down_proj": c.hidden_size}, c.intermediate_size, bias=c.mlp_bias),
        q_norm=files.vector(attention + "q_norm.weight", c.head_dim) if c.qk_norm else None,
        k_norm=files.vector(attention + "k_norm.weight", c.head_dim) if c.qk_norm else None,
        attention=None if c.windows[index] == c.windows[0] else _spec(c, index),
    )


class _Reader:
    """Takes each tensor once, checked, and knows in the end which were left over."""

    def __init__(self, weights: Weights, ops: Ops) -> None:
        self._weights = weights
        self._ops = ops
        self._unread = {name for name in weights.names() if not name.endswith("rotary_emb.inv_freq")}

    def take(self, name: str, *shape: int) -> WeightSource:
        if name not in self._unread:
            raise ModelLoadError(f"the model's files lack the tensor {name}; the download may be incomplete")
        self._unread.remove(name)
        tensor = self._weights.get(name)
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(
                f"the tensor {name} has shape {list(tensor.shape)} where the model's config asks for {list(shape)}"
            )
        return tensor

    def ignore(self, name: str) -> None:
        self._unread.discard(name)

    def plain(self, tensor: WeightSource) -> Tensor:
        return dense(tensor, self._ops.dtype).to(self._ops.device)

    def vector(self, name: str, size: int) -> Tensor:
        return self.plain(self.take(name, size))

    def stack(self, rows: dict[str, int], columns: int, *, bias: bool) -> Linear:
        """The named products [rows, columns] over one input, packed as one."""
        weights = [self.take(f"{name}.weight", size, columns) for name, size in rows.items()]
        biases = [self.vector(f"{name}.bias", size) for name, size in rows.items()] if bias else None
        return self._ops.pack_many(weights, None if biases is None else torch.cat(biases))

    def finish(self) -> None:
        if self._unread:
            some = ", ".join(sorted(self._unread)[:4])
            raise ModelLoadError(
                f"the model's files hold {len(self._unread)} tensors that its architecture has no place for: {some}"
            )
