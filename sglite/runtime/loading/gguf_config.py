"""A ModelConfig from the metadata of a GGUF file."""

from __future__ import annotations

import math
from typing import cast

import numpy as np

from sglite.errors import ModelLoadError
from sglite.runtime.loading.config import Family, Fields, ModelConfig, RopeConfig, checked
from sglite.runtime.loading.gguf import GGUFFile

FAMILIES = ("llama", "qwen2", "qwen3")
ROPE_FREQUENCIES = "rope_freqs.weight"


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """Raises ModelLoadError naming the file and what in it is missing or not supported."""
    fields = _ArchitectureFields(file)
    hidden, heads = fields.integer("embedding_length"), _heads(fields)
    layers, context = fields.layers("block_count"), fields.integer("context_length")
    head_dim = fields.integer("attention.key_length", hidden // max(heads, 1))
    _refuse_unusual(fields, head_dim, context)
    config = ModelConfig(
        family=fields.family,
        layers=layers,
        hidden_size=hidden,
        intermediate_size=fields.integer("feed_forward_length"),
        heads=heads,
        kv_heads=fields.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=_rows(file, "token_embd.weight"),
        context_length=context,
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(fields, file, head_dim),
        tied_embeddings="output.weight" not in file.tensors,
        windows=(None,) * layers,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        eos_ids=_eos(file),
        bos_id=next(iter(Fields(file.metadata, str(file.path)).ids("tokenizer.ggml.bos_token_id")), None),
        name=str(file.metadata.get("general.name", file.path.stem)),
    )
    return checked(config, str(file.path))


class _ArchitectureFields(Fields):
    """The metadata whose keys begin with the architecture's name, without it."""

    def __init__(self, file: GGUFFile) -> None:
        family = file.metadata.get("general.architecture")
        if family not in FAMILIES:
            raise ModelLoadError(
                f"{file.path}: architecture {family!r} is not supported; supported in GGUF are {', '.join(FAMILIES)}"
            )
        self.family = cast(Family, family)
        prefix = f"{family}."
        own = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
        super().__init__(own, f"{file.path}, {family}")


def _heads(fields: Fields) -> int:
    if isinstance(fields.values.get("attention.head_count"), list):
        raise ModelLoadError(f"{fields.where}: a different number of heads in each layer is not supported")
    return fields.integer("attention.head_count")


def _refuse_unusual(fields: Fields, head_dim: int, context: int) -> None:
    """Whatever the layers here would compute wrongly."""
    if fields.integer("expert_count", 0):
        raise ModelLoadError(f"{fields.where}: mixtures of experts are not supported in GGUF files")
    for key in ("attention.value_length", "rope.dimension_count"):
        if (found := fields.integer(key, head_dim)) != head_dim:
            raise ModelLoadError(
                f"{fields.where}: {key} {found} is not supported; it must equal the head size {head_dim}"
            )
    if (window := fields.integer("attention.sliding_window", context)) < context:
        raise ModelLoadError(f"{fields.where}: sliding windows ({window} tokens) are not supported in GGUF files")


def _rows(file: GGUFFile, name: str) -> int:
    if name not in file.tensors:
        raise ModelLoadError(f"{file.path} lacks the tensor {name}")
    return file.tensors[name].shape[0]


def _eos(file: GGUFFile) -> tuple[int, ...]:
    """The end of the text, and where the file names them, the ends of a turn and of a message."""
    fields = Fields(file.metadata, str(file.path))
    found = [i for kind in ("eos", "eot", "eom") for i in fields.ids(f"tokenizer.ggml.{kind}_token_id")]
    return tuple(dict.fromkeys(found))


def _rope(fields: Fields, file: GGUFFile, head_dim: int) -> RopeConfig:
    theta = fields.number("rope.freq_base", 10_000.0)
    kind = fields.values.get("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ModelLoadError(f"{fields.where}: RoPE scaling {kind!r} is not supported; supported are none and linear")
    if ROPE_FREQUENCIES in file.tensors:
        return _llama3(file, theta, head_dim)
    if kind == "linear":
        return RopeConfig(theta, "linear", fields.number("rope.scaling.factor"))
    return RopeConfig(theta)


def _llama3(file: GGUFFile, theta: float, head_dim: int) -> RopeConfig:
    """Files of Llama 3.1 and later hold a divisor for each frequency instead of the four numbers they came from;
    those numbers are the same in every published model but for the factor, which is the largest divisor."""
    tensor = file.tensors[ROPE_FREQUENCIES]
    found = np.frombuffer(file.raw(tensor), np.float32) if tensor.type.name == "F32" else np.zeros(0)
    rope = RopeConfig(theta, "llama3", float(found.max(initial=1.0)))
    if found.shape != (head_dim // 2,) or not np.allclose(found, _divisors(rope, head_dim), rtol=1e-3):
        raise ModelLoadError(f"{file.path}: {ROPE_FREQUENCIES} is not Llama 3's RoPE scaling; no other is supported")
    return rope


def _divisors(rope: RopeConfig, head_dim: int) -> list[float]:
    """What Llama 3's scaling divides each frequency by."""
    frequencies = [rope.theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    turns = [rope.original_context * f / (2 * math.pi) for f in frequencies]
    low, high = rope.low_freq_factor, rope.high_freq_factor
    kept = [min(max((t - low) / (high - low), 0.0), 1.0) for t in turns]
    return [1 / (k + (1 - k) / rope.factor) for k in kept]
