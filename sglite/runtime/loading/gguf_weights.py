"""Weights out of a GGUF file under Hugging Face's names; quantised blocks stay as they are."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from sglite.errors import ModelLoadError
from sglite.kernels.weights import BLOCK, BlockFormat, BlockQuantized, WeightSource
from sglite.runtime.loading.gguf import GGUFFile, TensorInfo
from sglite.runtime.loading.gguf_config import ROPE_FREQUENCIES, config_from_gguf
from sglite.runtime.loading.weights import finite

_DENSE = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_BLOCKS: dict[GGMLQuantizationType, BlockFormat] = {
    GGMLQuantizationType.Q4_0: "Q4_0",
    GGMLQuantizationType.Q4_1: "Q4_1",
    GGMLQuantizationType.Q8_0: "Q8_0",
}

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IN_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def hugging_face_name(name: str) -> str:
    """A tensor's name in the one naming; a name unknown to it stays, for the model to refuse."""
    if (found := _IN_LAYER.fullmatch(name)) and found[2] in _LAYER:
        return f"model.layers.{int(found[1])}.{_LAYER[found[2]]}.{found[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_TOP[stem]}.{kind}" if stem in _TOP else name


class GGUFWeights:
    """Tensors are views into the memory map where their type allows; they keep it alive."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        config = config_from_gguf(file)
        tensors = [t for t in self._file.tensors.values() if t.name != ROPE_FREQUENCIES]
        self._tensors = {hugging_face_name(t.name): t for t in tensors}
        self._permuted = {"q_proj": config.heads, "k_proj": config.kv_heads} if config.family == "llama" else {}
        for tensor in tensors:
            _check_type(tensor, file.path)

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def get(self, name: str) -> WeightSource:
        if name not in self._tensors:
            raise ModelLoadError(f"{self._file.path} lacks the tensor {name}")
        weight = finite(self._read(self._tensors[name]), name, self._file.path)
        heads = self._permuted.get(name.split(".")[-2]) if "." in name else None
        if heads is None:
            return weight
        if weight.shape[0] % (2 * heads):
            raise ModelLoadError(f"{self._file.path}: tensor {name} has {weight.shape[0]} rows for {heads} heads")
        return _unpermute(weight, heads)

    def _read(self, tensor: TensorInfo) -> WeightSource:
        data = torch.frombuffer(self._file.raw(tensor), dtype=torch.uint8)
        if tensor.type in _DENSE:
            return data.view(_DENSE[tensor.type]).view(tensor.shape)
        return _blocks(_BLOCKS[tensor.type], data, tensor.shape)


def _check_type(tensor: TensorInfo, path: Path) -> None:
    if tensor.type not in _DENSE and tensor.type not in _BLOCKS:
        known = ", ".join(t.name for t in (*_DENSE, *_BLOCKS))
        raise ModelLoadError(
            f"{path}: quantisation {tensor.type.name} (tensor {tensor.name}) is not supported; supported are {known}"
        )
    if tensor.type in _BLOCKS and len(tensor.shape) != 2:
        raise ModelLoadError(f"{path}: tensor {tensor.name} is {tensor.type.name} but not a matrix")


def _blocks(kind: BlockFormat, data: Tensor, shape: tuple[int, ...]) -> BlockQuantized:
    """From interleaved blocks (fp16 scale, fp16 minimum in Q4_1, then the codes) to a tensor of each."""
    blocks = data.view(shape[0], shape[1] // BLOCK, -1)
    halves = 4 if kind == "Q4_1" else 2
    factors = blocks[..., :halves].contiguous().view(torch.float16).float()
    codes = blocks[..., halves:].contiguous()
    return BlockQuantized(
        kind,
        codes.view(torch.int8) if kind == "Q8_0" else codes,
        factors[..., 0].contiguous(),
        factors[..., 1].contiguous() if kind == "Q4_1" else None,
    )


def _unpermute(weight: WeightSource, heads: int) -> WeightSource:
    """GGUF files of the Llama architecture order the rows of a head for rotating neighbours (0, D/2, 1, D/2 + 1, ...);
    here, as in Hugging Face's layout, the halves of a head rotate."""
    index = torch.arange(weight.shape[0]).view(heads, -1, 2).transpose(1, 2).flatten()
    return weight.rows(index) if isinstance(weight, BlockQuantized) else weight[index]
