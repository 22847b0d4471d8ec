"""Small models in files: random Hugging Face models of each family, and GGUF files written from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from sglite.runtime.loading.gguf import GGUFFile

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 160,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    return CONFIGS[family](**{**SIZES, **changes})


def tiny_model(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():  # transformers starts biases and norms at 0 and 1
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=0.5)
    return model


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[rest]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row order of q and k in GGUF files of the Llama architecture: the two halves of each head, interleaved."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    metadata: dict[str, Any] | None = None,
    arch: str | None = None,
    tokens: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """``kind`` is the type of the matrices; vectors are F32. ``metadata`` adds or replaces integer keys."""
    config = model.config
    arch = arch or {"mistral": "llama"}.get(config.model_type, config.model_type)
    writer = GGUFWriter(path, arch)
    numbers = {
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": getattr(config, "head_dim", config.hidden_size // config.num_attention_heads),
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.bos_token_id": 1,
    }
    for key, value in {**numbers, **(metadata or {})}.items():
        _add(writer, key, value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32(f"{arch}.rope.freq_base", config.rope_parameters["rope_theta"])
    for key, value in (tokens or {}).items():
        _add(writer, f"tokenizer.{key}", value)
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if not (tied and name == "lm_head.weight"):
            _add_tensor(writer, name, tensor.float().numpy(), kind, config if arch == "llama" else None)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    return _written(writer, path)


def without_vocabulary(source: Path, copy: Path) -> Path:
    """A Llama's numbers and tensors as they are, without what transformers needs ten seconds to read."""
    file, writer = GGUFFile(source), GGUFWriter(copy, "llama")
    for key, value in file.metadata.items():
        if key.startswith("llama."):
            _add(writer, key, value)
    for name, tensor in file.tensors.items():
        raw = np.frombuffer(file.raw(tensor), np.float32 if tensor.type == GGMLQuantizationType.F32 else np.uint8)
        writer.add_tensor(name, raw.reshape(*tensor.shape[:-1], -1), raw_dtype=tensor.type)
    return _written(writer, copy)


def _written(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_tensor(
    writer: GGUFWriter, name: str, array: np.ndarray, kind: GGMLQuantizationType, permuted: PreTrainedConfig | None
) -> None:
    if permuted and "q_proj" in name:
        array = interleaved(array, permuted.num_attention_heads)
    if permuted and "k_proj" in name:
        array = interleaved(array, permuted.num_key_value_heads)
    if array.ndim == 1:
        kind = GGMLQuantizationType.F32
    writer.add_tensor(gguf_name(name), quants.quantize(array, kind), raw_dtype=kind)
