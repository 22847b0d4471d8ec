"""Logits and greedy text against Hugging Face transformers: tiny random models of each family, and the real one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from driver import Driver
from model_files import without_vocabulary
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from sglite.errors import ModelLoadError
from sglite.kernels import get_ops
from sglite.kernels.decoder import DecoderWeights
from sglite.kernels.ops import Ops
from sglite.kernels.reference import ReferenceOps
from sglite.kernels.weights import BlockQuantized, WeightSource
from sglite.protocol import Text
from sglite.runtime.hub import ModelSource
from sglite.runtime.loading import load_config, load_tokenizer, open_weights
from sglite.runtime.loading.config import ModelConfig
from sglite.runtime.loading.weights import Weights
from sglite.runtime.model.decoder import Decoder

CPU = torch.device("cpu")
TRITON = [("triton", 16)] if os.environ.get("TRITON_INTERPRET") == "1" else []
"""tests/kernels/test_triton.py starts a process with the interpreter"""


def make_ops(kernels: str = "cpu", dtype: torch.dtype = torch.float32, weights: str = "dense") -> Ops:
    return get_ops(kernels, CPU, dtype, weights)  # type: ignore[arg-type]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Steps are small, and torch's threads wait for each other badly where other processes use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The worst position's, in norms."""
    assert actual.dtype == torch.float32
    assert actual.shape == expected.shape
    return ((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()


# ---------------------------------------------------------------------------------------------- tiny models by family

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SOME_WINDOWS = ["full_attention", "sliding_attention", "full_attention"]
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}

FAMILIES = {
    "llama": LlamaConfig(**SIZES),
    "llama, tied": LlamaConfig(**SIZES | {"tie_word_embeddings": True}),
    "llama, biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama, head size of its own": LlamaConfig(**SIZES, head_dim=24),
    "llama, one key head": LlamaConfig(**SIZES | {"num_key_value_heads": 1}),
    "llama 3 rope": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "linear rope": LlamaConfig(**SIZES, rope_parameters=LINEAR),
    "mistral": MistralConfig(**SIZES, sliding_window=7),
    "mistral, no window": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2, tied": Qwen2Config(**SIZES | {"tie_word_embeddings": True}),
    "qwen2, windows": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=9, layer_types=SOME_WINDOWS),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "qwen3, biases, tied": Qwen3Config(**SIZES | {"tie_word_embeddings": True}, head_dim=16, attention_bias=True),
}


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    """All parameters random, also those that start as zeros and ones, and large enough for attention to matter."""
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    return model


def saved(model: PreTrainedModel, folder: Path) -> ModelSource:
    model.save_pretrained(folder)
    return ModelSource("tiny", folder, "folder")


def sequences(vocab_size: int, *lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in lengths]


@torch.inference_mode()
def expected_logits(model: PreTrainedModel, ids: list[int]) -> Tensor:
    return model(torch.tensor([ids]), use_cache=False).logits[0].float()


SCHEDULE: list[dict[int, int]] = [{0: 10, 1: 23}, {0: 1, 2: 5}, {1: 1, 0: 30, 2: 1}, {2: 3, 1: 1, 0: 1}]
"""Steps of {sequence: tokens}: chunks of a prompt, decoding, and both in one batch."""
LENGTHS = (42, 25, 9)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory) -> tuple[ModelSource, list[list[int]], list[Tensor]]:
    """A model's files, sequences, and transformers' logits for every position of them."""
    model = random_model(FAMILIES[request.param])
    texts = sequences(SIZES["vocab_size"], *LENGTHS)
    return saved(model, tmp_path_factory.mktemp("tiny")), texts, [expected_logits(model, ids) for ids in texts]


@pytest.mark.parametrize(("kernels", "page_size"), [("reference", 4), ("cpu", 1), ("cpu", 16), *TRITON])
def test_logits_equal_transformers_in_chunks_and_batches(family, kernels, page_size):
    source, texts, expected = family
    driver = Driver(Decoder(load_config(source), open_weights(source), make_ops(kernels)), texts, page_size)
    for counts in SCHEDULE:
        starts = list(driver.done)
        rows = [expected[slot][starts[slot] : starts[slot] + count] for slot, count in counts.items()]
        assert relative_error(driver.step(counts), torch.cat(rows)) < 1e-4
    assert driver.done == list(LENGTHS)


def test_a_step_without_wanted_positions_still_fills_the_cache(family):
    source, texts, expected = family
    driver = Driver(Decoder(load_config(source), open_weights(source), make_ops()), texts, 4)
    assert driver.step({0: 30}, wanted=0).shape == (0, SIZES["vocab_size"])
    assert relative_error(driver.step({0: 12}, wanted=1), expected[0][-1:]) < 1e-4


# ------------------------------------------------------------------------------------------------- dtypes and formats


class DictWeights:
    def __init__(self, tensors: dict[str, WeightSource]) -> None:
        self.tensors = tensors

    def names(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    def get(self, name: str) -> WeightSource:
        return self.tensors[name]


@pytest.fixture
def tiny(tmp_path) -> tuple[ModelConfig, dict[str, WeightSource]]:
    """A small Llama as its config and a dictionary of tensors that a test may damage."""
    source = saved(random_model(FAMILIES["llama"]), tmp_path)
    weights = open_weights(source)
    return load_config(source), {name: weights.get(name) for name in weights.names()}


def all_logits(config: ModelConfig, tensors: dict[str, WeightSource], ops: Ops) -> Tensor:
    weights: Weights = DictWeights(tensors)
    return Driver(Decoder(config, weights, ops), sequences(131, 20), 4).step({0: 20})


@pytest.mark.parametrize(
    ("kernels", "dtype", "weights", "error"),
    [
        ("reference", torch.bfloat16, "dense", 0.1),
        ("cpu", torch.bfloat16, "dense", 0.1),
        ("cpu", torch.float32, "int8", 0.1),
        ("cpu", torch.bfloat16, "int8", 0.15),
    ],
)
def test_narrower_arithmetic_stays_near(tiny, kernels, dtype, weights, error):
    exact = all_logits(*tiny, make_ops("reference"))
    assert 0 < relative_error(all_logits(*tiny, make_ops(kernels, dtype, weights)), exact) < error


def test_gguf_blocks_give_what_their_dense_form_gives(tiny):
    config, tensors = tiny
    blocks = {name: quantized(t) if t.ndim == 2 else t for name, t in tensors.items() if isinstance(t, Tensor)}
    plain = {name: t.dequantize() if isinstance(t, BlockQuantized) else t for name, t in blocks.items()}
    assert len(plain) == len(tensors)
    for kernels in ("reference", "cpu"):
        ops = make_ops(kernels)
        assert torch.equal(all_logits(config, blocks, ops), all_logits(config, plain, ops))


def quantized(weight: Tensor) -> BlockQuantized:
    """Q8_0."""
    blocks = weight.unflatten(1, (-1, 32))
    scale = blocks.abs().amax(-1) / 127
    return BlockQuantized("Q8_0", (blocks / scale.unsqueeze(-1)).round().to(torch.int8), scale)


class FusedOps(ReferenceOps):
    """Answers for the whole stack, with a hidden state that says what it was given."""

    given: DecoderWeights

    def fused_decoder(self, weights):
        self.given = weights
        return lambda batch, kv: torch.full((len(batch.logit_index), 64), float(len(batch.ids)))


def test_a_fused_form_is_used_where_the_ops_has_one(tiny):
    config, tensors = tiny
    ops = FusedOps(CPU, torch.float32)
    logits = all_logits(config, tensors, ops)
    assert torch.equal(logits, ops.linear(torch.full((20, 64), 20.0), ops.given.head))
    assert len(ops.given.layers) == config.layers


def test_rope_tables_span_the_context_of_the_config(tiny):
    config, tensors = tiny
    ops = FusedOps(CPU, torch.float32)
    all_logits(replace(config, context_length=50), tensors, ops)
    assert ops.given.cos.shape == ops.given.sin.shape == (50, 8)


# ------------------------------------------------------------------------------------------------------ damaged files

MISSING = [
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.norm.weight",
    "model.layers.1.self_attn.k_proj.weight",
    "model.layers.2.input_layernorm.weight",
    "model.layers.0.mlp.down_proj.weight",
]


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_tensor_is_named(tiny, name):
    config, tensors = tiny
    del tensors[name]
    with pytest.raises(ModelLoadError, match=f"lack the tensor {name}"):
        all_logits(config, tensors, make_ops())


@pytest.mark.parametrize("name", MISSING)
def test_a_misshapen_tensor_is_named_with_both_shapes(tiny, name):
    config, tensors = tiny
    shape = list(tensors[name].shape)
    tensors[name] = torch.zeros(shape[0] + 1, *shape[1:])
    with pytest.raises(ModelLoadError, match=rf"{name} has shape \[{shape[0] + 1}.*asks for \[{shape[0]}"):
        all_logits(config, tensors, make_ops())


def test_a_tensor_without_a_place_is_named(tiny):
    config, tensors = tiny
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    with pytest.raises(ModelLoadError, match=r"1 tensor.* model\.layers\.0\.self_attn\.q_proj\.bias"):
        all_logits(config, tensors, make_ops())


def test_more_layers_in_the_config_than_in_the_files(tiny):
    config, tensors = tiny
    deeper = replace(config, layers=4, windows=(None,) * 4)
    with pytest.raises(ModelLoadError, match=r"model\.layers\.3\."):
        all_logits(deeper, tensors, make_ops())


def test_old_files_rope_buffers_and_repeated_head_of_a_tied_model_are_passed_over(tiny):
    config, tensors = tiny
    tied = replace(config, tied_embeddings=True)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    with_head = all_logits(tied, tensors, make_ops())
    del tensors["lm_head.weight"]
    assert torch.equal(with_head, all_logits(tied, tensors, make_ops()))


# ----------------------------------------------------------------------------------------------------- the real model

TOPICS = ["the sea", "a lost key", "coffee", "bread", "an old bridge", "music", "two brothers", "a garden"]
"""Chosen so that the two likeliest tokens are never nearer than 0.004: rounding differs between machines by 0.0001."""
FRAMES = [
    "Write one sentence about {}.",
    "Question: what do people say about {}?\nAnswer:",
    "Once upon a time there was a story of {}, and",
    "def describe():\n    # {}\n    return",
]
PROMPTS = [frame.format(topic) for frame in FRAMES for topic in TOPICS]


SMOLLM2 = LlamaConfig(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49152,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    tie_word_embeddings=True,
)
"""Written out, since the copy that transformers reads has no vocabulary."""


@pytest.fixture(scope="module")
def transformers_smollm2(smollm2, tmp_path_factory) -> Iterator[PreTrainedModel]:
    copy = without_vocabulary(smollm2.path, tmp_path_factory.mktemp("smollm2") / "tensors.gguf")
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # transformers' own, while it converts the file
        patch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))  # asked for once a tensor
        yield AutoModelForCausalLM.from_pretrained(
            copy.parent,
            config=SMOLLM2,
            gguf_file=copy.name,
            dtype=torch.float32,
            attn_implementation="eager",
        ).eval()


@pytest.fixture(scope="module")
def smollm2_config(smollm2) -> ModelConfig:
    return replace(load_config(smollm2), context_length=512)


@pytest.fixture(scope="module")
def prompts(smollm2, smollm2_config) -> list[list[int]]:
    tokenizer = load_tokenizer(smollm2, smollm2_config)
    return [list(tokenizer.encode((Text(text),))) for text in PROMPTS]


@pytest.fixture(scope="module")
def decoder(smollm2, smollm2_config) -> Decoder:
    return Decoder(smollm2_config, open_weights(smollm2), make_ops())


def test_logits_of_the_real_model_equal_transformers(decoder, transformers_smollm2, prompts):
    some = prompts[::9]
    driver = Driver(decoder, some, 16)
    driver.step(dict.fromkeys(range(len(some)), 3))
    actual = driver.step({slot: len(ids) - 3 for slot, ids in enumerate(some)})
    expected = torch.cat([expected_logits(transformers_smollm2, ids)[3:] for ids in some])
    assert relative_error(actual, expected) < 1e-4


def test_reference_and_cpu_agree_on_the_real_model(smollm2, smollm2_config, decoder, prompts):
    reference = Decoder(smollm2_config, open_weights(smollm2), make_ops("reference"))
    some = prompts[:2]
    counts = {slot: len(ids) for slot, ids in enumerate(some)}
    assert relative_error(*(Driver(m, some, 16).step(counts) for m in (decoder, reference))) < 1e-4


@pytest.mark.timeout(300)
def test_greedy_text_of_the_real_model_equals_transformers(decoder, transformers_smollm2, prompts):
    """Transformers reads our text: greedy text is equal exactly if its likeliest token at each position is ours."""
    answers = Driver(decoder, prompts, 16, room=64).greedy(64)
    assert len(answers) == 32
    for prompt, answer in zip(prompts, answers, strict=True):
        judged = expected_logits(transformers_smollm2, prompt + answer[:-1])[len(prompt) - 1 :]
        assert judged.argmax(-1).tolist() == answer
