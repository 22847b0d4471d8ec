"""What a decoder is made of, and how to read it from a folder in Hugging Face's layout.

The defaults for keys that config.json may leave out are those of transformers' classes of the same family.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

from sglite.errors import ModelLoadError

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
RopeKind = Literal["none", "linear", "llama3"]
MAX_LAYERS = 1024
MAX_CONTEXT = 1 << 22
"""Positions: tables of angles are made for all of them, so a file may not ask for any number."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding over the whole head. ``linear`` divides every frequency by ``factor``; ``llama3`` only the
    low ones, with a smooth passage between wavelengths ``original_context / high_freq_factor`` and ``/ low``."""

    theta: float = 10_000.0
    kind: RopeKind = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes in elements, ``context_length`` and ``windows`` in tokens.

    ``vocab_size`` is the width of the logits; the tokenizer may know fewer tokens. ``windows[n]`` is how many
    positions, its own included, a token of layer n sees (None: all). ``eos_ids`` end an answer; the generation
    config's win over the model's.
    """

    family: Family
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope: RopeConfig
    tied_embeddings: bool
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    name: str = field(default="", compare=False)
    """What the files call the model, for messages."""


def checked(config: ModelConfig, where: str) -> ModelConfig:
    """The same config; ModelLoadError naming ``where`` if its numbers cannot belong to one model."""
    for name in ("layers", "hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim", "vocab_size"):
        if getattr(config, name) < 1:
            raise ModelLoadError(f"{where}: {name} must be at least 1, not {getattr(config, name)}")
    if not 1 <= config.context_length <= MAX_CONTEXT:
        raise ModelLoadError(f"{where}: context_length must be from 1 to {MAX_CONTEXT}, not {config.context_length}")
    if outside := [token for token in config.eos_ids if token >= config.vocab_size]:
        raise ModelLoadError(f"{where}: the end-of-text token {outside[0]} is outside {config.vocab_size} logits")
    if config.heads % config.kv_heads:
        raise ModelLoadError(f"{where}: {config.heads} heads cannot share {config.kv_heads} key/value heads evenly")
    if config.rope.low_freq_factor >= config.rope.high_freq_factor:
        raise ModelLoadError(f"{where}: RoPE's low_freq_factor must be below its high_freq_factor")
    if config.head_dim % 2:
        raise ModelLoadError(f"{where}: head size {config.head_dim} is odd, rotary embedding needs pairs")
    return config


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelLoadError naming the file if it is not there or not that."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path} is missing; the folder of a model holds it") from None
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


class Fields:
    """Typed reads out of a mapping, with errors that name the file and the key."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            raise ModelLoadError(f"{self.where}: {key} must be an integer from 0 to 2^31 - 1, not {value!r}")
        return value

    def layers(self, key: str) -> int:
        if (count := self.integer(key)) > MAX_LAYERS:
            raise ModelLoadError(f"{self.where}: {key} is {count}; at most {MAX_LAYERS} layers are supported")
        return count

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ModelLoadError(f"{self.where}: {key} must be a number above 0, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise ModelLoadError(f"{self.where}: {key} must be true or false, not {value!r}")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """One id, a list of ids, or none."""
        value = self.values.get(key)
        if value is None:
            return ()
        found = value if isinstance(value, list) else [value]
        if not all(type(i) is int and i >= 0 for i in found):
            raise ModelLoadError(f"{self.where}: {key} must be a token id or a list of them, not {value!r}")
        return tuple(dict.fromkeys(found))

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None and default is None:
            raise ModelLoadError(f"{self.where}: {key} is missing")
        return default if value is None else value


# ---------------------------------------------------------------------------------------------------- config.json


def config_from_folder(folder: Path) -> ModelConfig:
    """From config.json and, if there is one, generation_config.json.

    Raises ModelLoadError naming the file and what in it is missing or not supported.
    """
    raw = read_json(folder / "config.json")
    fields = Fields(raw, str(folder / "config.json"))
    family = _family(fields)
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    layers, context = fields.layers("num_hidden_layers"), fields.integer("max_position_embeddings")
    attention_bias = family in ("llama", "qwen3") and fields.flag("attention_bias")
    config = ModelConfig(
        family=family,
        layers=layers,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", 128 if family == "qwen3" else hidden // max(heads, 1)),
        vocab_size=fields.integer("vocab_size"),
        context_length=context,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields, context),
        tied_embeddings=fields.flag("tie_word_embeddings"),
        windows=_windows(fields, family, layers),
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=attention_bias,
        mlp_bias=family == "llama" and fields.flag("mlp_bias"),
        qk_norm=family == "qwen3",
        eos_ids=_eos(folder, fields),
        bos_id=next(iter(fields.ids("bos_token_id")), None),
        name=str(raw.get("_name_or_path") or folder.name),
    )
    return checked(config, fields.where)


def _family(fields: Fields) -> Family:
    """Refuses by name whatever the layers here would compute wrongly."""
    raw, supported = fields.values, ", ".join(get_args(Family))
    family = raw.get("model_type")
    if family not in get_args(Family):
        raise ModelLoadError(f"{fields.where}: architecture {family!r} is not supported; supported are {supported}")
    classes = raw.get("architectures") or []
    if classes and not any(str(name).endswith("ForCausalLM") for name in classes):
        raise ModelLoadError(f"{fields.where}: {classes[0]} does not generate text; a ...ForCausalLM model does")
    if (method := raw.get("quantization_config")) is not None:
        kind = method.get("quant_method", "unnamed") if isinstance(method, dict) else method
        raise ModelLoadError(
            f"{fields.where}: quantisation {kind!r} is not supported; supported are unquantised safetensors and "
            "GGUF files in F32, F16, BF16, Q8_0, Q4_0 or Q4_1"
        )
    if (act := raw.get("hidden_act", "silu")) != "silu":
        raise ModelLoadError(f"{fields.where}: hidden_act {act!r} is not supported; supported is 'silu'")
    return cast(Family, family)


def _rope(fields: Fields, context: int) -> RopeConfig:
    """transformers 5 writes ``rope_parameters``; older ones ``rope_theta`` beside ``rope_scaling``."""
    raw = fields.values
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ModelLoadError(f"{fields.where}: rope_parameters must be an object, not {scaling!r}")
    rope = Fields({"rope_theta": raw.get("rope_theta"), **scaling}, f"{fields.where}, rope")
    partial = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise ModelLoadError(f"{fields.where}: partial_rotary_factor {partial} is not supported; supported is 1")
    theta = rope.number("rope_theta", 10_000.0)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", rope.number("factor"))
    if kind == "llama3":
        return RopeConfig(
            theta,
            "llama3",
            rope.number("factor"),
            rope.number("low_freq_factor"),
            rope.number("high_freq_factor"),
            rope.integer("original_max_position_embeddings", context),
        )
    raise ModelLoadError(
        f"{fields.where}: RoPE scaling {kind!r} is not supported; supported are default, linear and llama3"
    )


def _windows(fields: Fields, family: Family, layers: int) -> tuple[int | None, ...]:
    if family == "mistral":
        window = fields.values.get("sliding_window", 4096)
        return (None if window is None else _window(fields, 4096),) * layers
    if family == "llama" or not fields.flag("use_sliding_window") or fields.values.get("sliding_window", 0) is None:
        return (None,) * layers
    window = _window(fields, 4096)
    kinds = fields.values.get("layer_types")
    if kinds is None:
        first = fields.integer("max_window_layers", 28)
        return tuple(window if n >= first else None for n in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= _LAYER_KINDS:
        raise ModelLoadError(f"{fields.where}: layer_types must name one of {sorted(_LAYER_KINDS)} for each layer")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


_LAYER_KINDS = {"full_attention", "sliding_attention"}


def _window(fields: Fields, default: int) -> int:
    window = fields.integer("sliding_window", default)
    if window < 1:
        raise ModelLoadError(f"{fields.where}: sliding_window must be at least 1, not {window}")
    return window


def _eos(folder: Path, fields: Fields) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    generation = Fields(read_json(path), str(path)).ids("eos_token_id") if path.exists() else ()
    return generation or fields.ids("eos_token_id")
