"""Models of real shapes with random weights made on the device, as sglite's engine and as transformers'."""

from __future__ import annotations

import zlib
from dataclasses import replace

import torch

from gpu.common import Context
from sglite.kernels.ops import Ops
from sglite.kernels.triton_ops import TritonOps
from sglite.runtime.assembly import assemble
from sglite.runtime.byte_tokenizer import byte_tokenizer
from sglite.runtime.config import config_from
from sglite.runtime.engine import Engine
from sglite.runtime.gpu.device import Host
from sglite.runtime.gpu.runner import GpuRunner
from sglite.runtime.loading.config import ModelConfig, RopeConfig
from sglite.runtime.model.decoder import Decoder


def config(family, layers, hidden, inner, heads, kv_heads, head_dim, vocabulary, **more) -> ModelConfig:
    return ModelConfig(
        family=family,
        layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocabulary,
        windows=(None,) * layers,
        norm_eps=1e-5,
        **{"context_length": 8192, "tied_embeddings": False, "rope": RopeConfig(500_000.0), **more},
    )


LLAMA_8B = config("llama", 32, 4096, 14_336, 32, 8, 128, 128_256)
QWEN3_06B = config(
    "qwen3", 28, 1024, 3072, 16, 8, 128, 151_936, tied_embeddings=True, qk_norm=True, rope=RopeConfig(1_000_000.0)
)
TINY = config("llama", 2, 32, 64, 4, 2, 16, 320, context_length=256, rope=RopeConfig(10_000.0))
SMALL = config("llama", 4, 512, 1536, 8, 2, 64, 2048, context_length=2048, rope=RopeConfig(10_000.0))


class RandomWeights:
    """Weights by Hugging Face's names; a name gives the same numbers each time it is asked for."""

    def __init__(self, model: ModelConfig, device: torch.device, dtype: torch.dtype, scale: float = 1.0) -> None:
        self._shapes = shapes(model)
        self._device, self._dtype, self._scale = device, dtype, scale

    def names(self) -> tuple[str, ...]:
        return tuple(self._shapes)

    def get(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        drawn = torch.randn(shape, generator=generator, device=self._device, dtype=torch.float32)
        spread = drawn * 0.1 + 1 if len(shape) == 1 else drawn * (self._scale * shape[-1] ** -0.5)
        return spread.to(self._dtype)


def shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    found = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size), "model.norm.weight": (c.hidden_size,)}
    if not c.tied_embeddings:
        found["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    for layer in range(c.layers):
        at = f"model.layers.{layer}."
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        found |= {
            f"{at}input_layernorm.weight": (c.hidden_size,),
            f"{at}post_attention_layernorm.weight": (c.hidden_size,),
            f"{at}self_attn.q_proj.weight": (q, c.hidden_size),
            f"{at}self_attn.k_proj.weight": (kv, c.hidden_size),
            f"{at}self_attn.v_proj.weight": (kv, c.hidden_size),
            f"{at}self_attn.o_proj.weight": (c.hidden_size, q),
            f"{at}mlp.gate_proj.weight": (c.intermediate_size, c.hidden_size),
            f"{at}mlp.up_proj.weight": (c.intermediate_size, c.hidden_size),
            f"{at}mlp.down_proj.weight": (c.hidden_size, c.intermediate_size),
        }
        if c.qk_norm:
            found |= {f"{at}self_attn.{n}_norm.weight": (c.head_dim,) for n in "qk"}
    return found


def weight_bytes(c: ModelConfig, itemsize: int) -> int:
    """What a decode step reads of the weights: all but the embedding's rows it does not look up."""
    skipped = () if c.tied_embeddings else ("model.embed_tokens.weight",)
    sizes = (torch.Size(shape).numel() for name, shape in shapes(c).items() if name not in skipped)
    return itemsize * sum(sizes)


def prompt_flops(c: ModelConfig, tokens: int) -> int:
    """Of one prompt: the layers' products, attention, and the head for its last token."""
    layers = sum(torch.Size(shape).numel() for name, shape in shapes(c).items() if ".layers." in name)
    attention = 4 * c.layers * c.heads * c.head_dim * (tokens * (tokens + 1) // 2)
    return 2 * layers * tokens + attention + 2 * c.vocab_size * c.hidden_size


# -------------------------------------------------------------------------------------------------------------- sglite


class _HostRunners:
    """The GPU's runner on the processor, for the check's own test."""

    copies = False

    def pool(self, config, model) -> int:
        return 2048

    def runner(self, config, model, pages):
        from sglite.kernels import sampling

        return GpuRunner(
            model,
            device=Host(),
            choose=sampling.choose,
            captures=model.captures,
            tile_tokens=model.prefix_tokens,
            pages=pages,
            page_size=config.page_size,
            slots=config.max_running,
            context_length=config.context_length,
        )


def engine(context: Context, model: ModelConfig, ops: Ops | None = None, **options) -> Engine:
    """An engine as a user's, but for its weights and its tokenizer of bytes."""
    ops = ops or TritonOps(context.device, context.half)
    kernels = "reference" if context.tiny else "triton"
    asked = {"model": "random", "device": context.device.type, "kernels": kernels, "dtype": "bfloat16", **options}
    resolved = config_from(asked).resolve(cuda=not context.tiny)
    resolved = replace(resolved, context_length=model.context_length)
    decoder = Decoder(model, RandomWeights(model, context.device, ops.dtype), ops)
    tokenizer = byte_tokenizer(logits_width=model.vocab_size)
    runners = _HostRunners() if context.tiny else None
    return Engine.of(assemble(resolved, decoder, tokenizer, context.device, runners))


# -------------------------------------------------------------------------------------------------------- transformers


def peer(context: Context, c: ModelConfig):
    """The same model in transformers, with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    settings = {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.context_length,
        "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tied_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope.theta},
        "attn_implementation": "sdpa",
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    kind, made = (Qwen3Config, Qwen3ForCausalLM) if c.family == "qwen3" else (LlamaConfig, LlamaForCausalLM)
    before = torch.get_default_dtype()
    torch.set_default_dtype(context.half)
    try:
        with torch.device(context.device):
            model = made(kind(**settings)).eval()
    finally:
        torch.set_default_dtype(before)
    weights = RandomWeights(c, context.device, context.half)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.get(name))
    return model
