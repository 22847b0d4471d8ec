"""Configs and weights out of folders and GGUF files, checked against transformers and the gguf package."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, quants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_files import CONFIGS, gguf_name, interleaved, tiny_config, tiny_model, write_gguf
from safetensors.torch import save_file
from transformers import GenerationConfig

from sglite.errors import ModelLoadError
from sglite.kernels.weights import BlockQuantized, dense
from sglite.runtime.hub import ModelSource
from sglite.runtime.loading import load_config, load_tokenizer, open_weights
from sglite.runtime.loading.config import RopeConfig
from sglite.runtime.loading.gguf import GGUFFile
from sglite.runtime.loading.gguf_weights import hugging_face_name

FAMILIES = sorted(CONFIGS)


def folder(path: Path) -> ModelSource:
    return ModelSource(str(path), path, "folder")


def gguf(path: Path) -> ModelSource:
    return ModelSource(str(path), path, "gguf")


def refused(source: ModelSource) -> str:
    """The one line that says why neither config nor weights can be had."""
    with pytest.raises(ModelLoadError) as failure:
        load_config(source)
        weights = open_weights(source)
        for name in weights.names():
            weights.get(name)
    assert str(source.path) in str(failure.value)
    assert "\n" not in str(failure.value)
    return str(failure.value)


# ---------------------------------------------------------------------------------------------------------- folders


@pytest.mark.parametrize("shard_size", ["5GB", "60KB"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_folder_comes_back(tmp_path: Path, family: str, shard_size: str):
    model = tiny_model(tiny_config(family, tie_word_embeddings=family == "qwen3"))
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard_size == "60KB")
    weights = open_weights(folder(tmp_path))
    state = {n: t for n, t in model.state_dict().items() if n in weights.names()}
    assert set(model.state_dict()) - set(state) == ({"lm_head.weight"} if family == "qwen3" else set())
    assert set(weights.names()) == set(state)
    for name, tensor in state.items():
        assert torch.equal(weights.get(name), tensor), name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_of_a_folder(tmp_path: Path, family: str):
    saved = tiny_config(family, rms_norm_eps=2e-5, rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    saved.save_pretrained(tmp_path)
    config = load_config(folder(tmp_path))
    assert (config.family, config.layers, config.hidden_size, config.intermediate_size) == (family, 2, 64, 96)
    assert (config.heads, config.kv_heads, config.head_dim) == (4, 2, 32)
    assert (config.vocab_size, config.context_length, config.norm_eps) == (160, 512, 2e-5)
    assert config.rope == RopeConfig(5e5)
    assert (config.eos_ids, config.bos_id) == ((2,), 1)
    assert (config.qkv_bias, config.qk_norm) == (family == "qwen2", family == "qwen3")
    assert not (config.o_bias or config.mlp_bias or config.tied_embeddings)
    assert config.windows == ((4096, 4096) if family == "mistral" else (None, None))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_biases_are_as_in_the_saved_model(tmp_path: Path, family: str):
    changes = {"attention_bias": True} | ({"mlp_bias": True} if family == "llama" else {})
    model = tiny_model(tiny_config(family, **changes))
    model.save_pretrained(tmp_path)
    config, names = load_config(folder(tmp_path)), set(open_weights(folder(tmp_path)).names())
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, True, family == "llama")
    assert ("model.layers.0.self_attn.o_proj.bias" in names) == config.o_bias
    assert ("model.layers.1.mlp.down_proj.bias" in names) == config.mlp_bias


def edited(path: Path, family: str = "llama", /, **changes: Any) -> ModelSource:
    """A folder with a config.json in which keys were replaced, or dropped (None)."""
    tiny_config(family).save_pretrained(path)
    raw = json.loads((path / "config.json").read_text())
    raw = {k: v for k, v in {**raw, **changes}.items() if changes.get(k, "") is not None}
    (path / "config.json").write_text(json.dumps(raw))
    return folder(path)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 9e3, "factor": 4}}, RopeConfig(9e3, "linear", 4.0)),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 64),
        ),
        # as transformers 4 wrote them
        ({"rope_parameters": None, "rope_theta": 1e6}, RopeConfig(1e6)),
        ({"rope_parameters": None}, RopeConfig(1e4)),
        (
            {"rope_parameters": None, "rope_theta": 9e3, "rope_scaling": {"type": "linear", "factor": 2.0}},
            RopeConfig(9e3, "linear", 2.0),
        ),
        (
            {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 64),
        ),
    ],
)
def test_rope_in_both_spellings(tmp_path: Path, changes: dict, rope: RopeConfig):
    assert load_config(edited(tmp_path, **changes)).rope == rope


WINDOW = {"use_sliding_window": True, "sliding_window": 64}


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("mistral", {"sliding_window": 128}, (128, 128)),
        ("mistral", {"sliding_window": None}, (4096, 4096)),  # the key is dropped: transformers' default holds
        ("qwen2", {**WINDOW, "max_window_layers": 1, "layer_types": None}, (None, 64)),
        ("qwen3", {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}, (64, None)),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 64}, (None, None)),
        ("llama", {"sliding_window": 64}, (None, None)),
    ],
)  # fmt: skip
def test_sliding_windows(tmp_path: Path, family: str, changes: dict, windows: tuple):
    assert load_config(edited(tmp_path, family, **changes)).windows == windows


def test_mistral_may_say_that_it_has_no_window(tmp_path: Path):
    tiny_config("mistral", sliding_window=None).save_pretrained(tmp_path)
    assert load_config(folder(tmp_path)).windows == (None, None)


def test_the_generation_config_says_what_ends_an_answer(tmp_path: Path):
    source = edited(tmp_path)
    GenerationConfig(eos_token_id=[7, 2, 7]).save_pretrained(tmp_path)
    assert load_config(source).eos_ids == (7, 2)
    GenerationConfig().save_pretrained(tmp_path)
    assert load_config(source).eos_ids == (2,)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gpt2"}, "architecture 'gpt2' is not supported; supported are llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "architecture None is not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "does not generate text"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantisation 'gptq' is not supported; supported are"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported is 'silu'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "RoPE scaling 'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        (
            {"rope_parameters": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}},
            "low_freq_factor must be below",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be an integer from 0 to 2^31 - 1, not '64'"),
        ({"vocab_size": 0}, "vocab_size must be at least 1"),
        ({"num_attention_heads": 0}, "heads must be at least 1"),
        ({"num_hidden_layers": 10**9}, "at most 1024 layers"),
        ({"max_position_embeddings": 2**31 - 1}, "from 1 to 4194304"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ({"head_dim": 33}, "head size 33 is odd"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a number above 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": ["x"]}, "eos_token_id must be a token id"),
        ({"eos_token_id": 10**9}, "end-of-text token 1000000000 is outside 160 logits"),
    ],
)
def test_what_a_config_cannot_be(tmp_path: Path, changes: dict, says: str):
    assert says in refused(edited(tmp_path, **changes))


@pytest.mark.parametrize(
    ("text", "says"),
    [(None, "is missing"), ("{", "not valid JSON"), ("[]", "must hold a JSON object"), ("[" * 99999, "not valid JSON"),
     ('{"a": "\xff"}', "not valid JSON")],
)  # fmt: skip
def test_a_damaged_config_file(tmp_path: Path, text: str | None, says: str):
    if text is not None:
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
    assert says in refused(folder(tmp_path))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sharded")
    tiny_model(tiny_config("llama")).save_pretrained(path, max_shard_size="60KB")
    return path


def shards(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def edit_index(path: Path, old: str, new: str) -> None:
    index = path / "model.safetensors.index.json"
    text = index.read_text()
    assert old in text
    index.write_text(text.replace(old, new))


def truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def long_header(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 10**15) + b"{}")


def no_json(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 4) + b"}}}}")


DAMAGED, NO_NAME = "is truncated or damaged", "is not the name of a .safetensors file in the same folder"
DAMAGE = {
    "missing shard": (lambda p: shards(p)[1].unlink(), "is missing"),
    "truncated data": (lambda p: truncate(shards(p)[0], shards(p)[0].stat().st_size - 8), DAMAGED),
    "truncated header": (lambda p: truncate(shards(p)[0], 100), DAMAGED),
    "empty file": (lambda p: truncate(shards(p)[0], 0), DAMAGED),
    "header longer than the file": (lambda p: long_header(shards(p)[0]), DAMAGED),
    "header is no JSON": (lambda p: no_json(shards(p)[0]), DAMAGED),
    "announced but absent": (lambda p: edit_index(p, '"model.norm.weight"', '"model.x.weight"'), "lacks the tensor"),
    "outside the folder": (lambda p: edit_index(p, '"model-00001', '"../model-00001'), NO_NAME),
    "a pickle": (lambda p: edit_index(p, '.safetensors"', '.bin"'), NO_NAME),
    "no weight map": (lambda p: edit_index(p, "weight_map", "weights"), "weight_map is missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_shards(tmp_path: Path, sharded: Path, damage: str):
    path = tmp_path / "copy"
    shutil.copytree(sharded, path)
    harm, says = DAMAGE[damage]
    harm(path)
    assert says in refused(folder(path))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none(tmp_path: Path, value: float):
    source = edited(tmp_path)
    tensor = torch.zeros(4, 4)
    tensor[1, 2] = value
    save_file({"model.norm.weight": tensor}, tmp_path / "model.safetensors")
    assert "tensor model.norm.weight holds NaN or infinite numbers" in refused(source)


def test_large_finite_numbers_are_no_damage(tmp_path: Path):
    edited(tmp_path)
    tensor = torch.full((64,), 3e38)
    save_file({"model.norm.weight": tensor}, tmp_path / "model.safetensors")
    assert torch.equal(open_weights(folder(tmp_path)).get("model.norm.weight"), tensor)


def test_types_that_are_not_weights(tmp_path: Path):
    save_file({"w": torch.zeros(4, dtype=torch.int8)}, edited(tmp_path).path / "model.safetensors")
    assert "tensor w is I8, which is not supported" in refused(folder(tmp_path))


def test_pickles_are_never_loaded(tmp_path: Path):
    source = edited(tmp_path)
    assert "holds no .safetensors file; fetch its weights too" in refused(source)
    (tmp_path / "pytest_model.bin").write_bytes(b"")
    assert "its pickled weights are never loaded" in refused(source)


def test_a_tensor_nobody_saved(sharded: Path):
    with pytest.raises(ModelLoadError, match=r"lack the tensor model\.nothing\.weight"):
        open_weights(folder(sharded)).get("model.nothing.weight")


# ------------------------------------------------------------------------------------------------------------- GGUF

Q = GGMLQuantizationType
KINDS = [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file_comes_back(tmp_path: Path, family: str, kind: Q):
    """Each weight equals the model's after a round through the gguf package's own quantisation."""
    model = tiny_model(tiny_config(family))
    weights = open_weights(gguf(write_gguf(tmp_path / "m.gguf", model, kind)))
    assert set(weights.names()) == set(model.state_dict())
    for name, tensor in model.state_dict().items():
        kept = Q.F32 if tensor.ndim == 1 else kind
        expected = quants.dequantize(quants.quantize(tensor.numpy(), kept), kept)
        found = weights.get(name)
        assert isinstance(found, BlockQuantized) == (kept in (Q.Q8_0, Q.Q4_0, Q.Q4_1))
        assert tuple(found.shape) == tuple(tensor.shape)
        np.testing.assert_array_equal(dense(found).numpy(), expected.reshape(tensor.shape), err_msg=name)


def test_the_config_of_a_gguf_file(tmp_path: Path):
    tied = tiny_model(tiny_config("llama", tie_word_embeddings=True, attention_bias=True))
    config = load_config(gguf(write_gguf(tmp_path / "m.gguf", tied)))
    assert (config.family, config.layers, config.hidden_size, config.intermediate_size) == ("llama", 2, 64, 96)
    assert (config.heads, config.kv_heads, config.head_dim, config.vocab_size) == (4, 2, 32, 160)
    assert (config.tied_embeddings, config.qkv_bias, config.o_bias, config.mlp_bias) == (True, True, True, False)
    assert (config.eos_ids, config.bos_id, config.windows) == ((2,), 1, (None, None))
    assert config.norm_eps == pytest.approx(1e-6)
    assert config.rope == RopeConfig(10_000.0)
    qwen = load_config(gguf(write_gguf(tmp_path / "q.gguf", tiny_model(tiny_config("qwen3")))))
    assert (qwen.family, qwen.qk_norm, qwen.tied_embeddings, qwen.qkv_bias) == ("qwen3", True, False, False)


def test_every_kind_of_end_ends_an_answer(tmp_path: Path):
    ids = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 2}
    source = gguf(write_gguf(tmp_path / "m.gguf", tiny_model(tiny_config("llama")), metadata=ids))
    assert load_config(source).eos_ids == (2, 5)


def test_rope_scaling_of_a_gguf_file(tmp_path: Path):
    model = tiny_model(tiny_config("llama"))
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    source = gguf(write_gguf(tmp_path / "linear.gguf", model, metadata=linear))
    assert load_config(source).rope == RopeConfig(1e4, "linear", 4.0)
    yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    assert "RoPE scaling 'yarn'" in refused(gguf(write_gguf(tmp_path / "yarn.gguf", model, metadata=yarn)))


def test_llama3_scaling_is_recognised_by_its_divisors(tmp_path: Path):
    """transformers' own frequencies with and without scaling give the divisors that converters write."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 8192}
    model = tiny_model(tiny_config("llama", rope_parameters=rope))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))
    plain = 1.0 / 5e5 ** (torch.arange(0, 32, 2).float() / 32)
    divisors = (plain / scaled).numpy()
    assert len(set(divisors.tolist())) > 2  # one between the two ends at least
    source = gguf(write_gguf(tmp_path / "m.gguf", model, extra={"rope_freqs.weight": divisors}))
    assert load_config(source).rope == RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192)
    assert "rope_freqs.weight" not in open_weights(source).names()
    other = write_gguf(tmp_path / "other.gguf", model, extra={"rope_freqs.weight": divisors[::-1].copy()})
    assert "is not Llama 3's RoPE scaling" in refused(gguf(other))


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"llama.expert_count": 8}, "mixtures of experts are not supported"),
        ({"llama.attention.head_count": [4, 2]}, "different number of heads in each layer"),
        ({"llama.attention.value_length": 64}, "attention.value_length 64 is not supported"),
        ({"llama.rope.dimension_count": 16}, "rope.dimension_count 16 is not supported"),
        ({"llama.attention.sliding_window": 128}, "sliding windows (128 tokens) are not supported"),
        ({"llama.block_count": "two"}, "block_count must be an integer"),
    ],
)
def test_what_a_gguf_file_cannot_be(tmp_path: Path, metadata: dict, says: str):
    assert says in refused(gguf(write_gguf(tmp_path / "m.gguf", tiny_model(tiny_config("llama")), metadata=metadata)))


def test_unsupported_architectures_and_quantisations_are_named(tmp_path: Path):
    model = tiny_model(tiny_config("llama"))
    assert "architecture 'gemma3' is not supported; supported in GGUF are llama, qwen2, qwen3" in refused(
        gguf(write_gguf(tmp_path / "arch.gguf", model, arch="gemma3"))
    )
    assert "quantisation Q5_0 (tensor token_embd.weight) is not supported; supported are F32, F16, BF16" in refused(
        gguf(write_gguf(tmp_path / "kind.gguf", model, Q.Q5_0))
    )


def test_unknown_tensors_keep_their_names_for_the_model_to_refuse():
    assert hugging_face_name("blk.3.ffn_gate_inp.weight") == "blk.3.ffn_gate_inp.weight"
    assert hugging_face_name("blk.12.attn_q.bias") == "model.layers.12.self_attn.q_proj.bias"


def test_numbers_that_are_none_in_blocks(tmp_path: Path):
    path = write_gguf(tmp_path / "m.gguf", tiny_model(tiny_config("qwen2")), Q.Q8_0)
    tensor = GGUFFile(path).tensors["blk.1.attn_q.weight"]
    data = bytearray(path.read_bytes())
    data[tensor.offset : tensor.offset + 2] = np.float16("nan").tobytes()
    path.write_bytes(data)
    assert "tensor model.layers.1.self_attn.q_proj.weight holds NaN" in refused(gguf(path))


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model(tiny_config("llama", num_hidden_layers=1, hidden_size=32, intermediate_size=32, head_dim=8))
    tokens = {
        "ggml.model": "gpt2",
        "ggml.pre": "llama-bpe",
        "ggml.tokens": ["a", "b", "ab"],
        "ggml.token_type": [1, 1, 3],
        "ggml.merges": ["a b"],
        "chat_template": "{{ x }}",
    }
    return write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", model, Q.Q4_1, tokens=tokens)


def read_everything(path: Path) -> None:
    load_tokenizer(gguf(path), load_config(gguf(path)))
    weights = open_weights(gguf(path))
    for name in weights.names():
        weights.get(name)


def test_an_empty_gguf_file(tmp_path: Path):
    path = tmp_path / "m.gguf"
    path.touch()
    assert "m.gguf cannot be read: it is empty; fetch it again" in refused(ModelSource(str(path), path, "gguf"))


def test_a_file_cut_anywhere_is_a_clear_error(tmp_path: Path, small_gguf: Path):
    read_everything(small_gguf)
    path, data = tmp_path / "m.gguf", small_gguf.read_bytes()
    for size in [*range(0, 2000, 7), *range(2000, len(data), 397), len(data) - 33]:
        path.write_bytes(data[:size])
        message = refused(gguf(path))
        assert size < 8 or "truncated" in message or "announced" in message, (size, message)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 2500), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_header_never_ends_in_another_error(tmp_path: Path, small_gguf: Path, flips: list[tuple[int, int]]):
    data = bytearray(small_gguf.read_bytes())
    for at, value in flips:
        data[at] = value
    (tmp_path / "m.gguf").write_bytes(data)
    try:
        read_everything(tmp_path / "m.gguf")
    except ModelLoadError as error:
        assert str(tmp_path) in str(error)


def test_the_container_reader_agrees_with_the_gguf_package(small_gguf: Path):
    ours, theirs = GGUFFile(small_gguf), GGUFReader(small_gguf)
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == fields
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert (info.shape, info.type) == (tuple(tensor.shape.tolist())[::-1], tensor.tensor_type)
        assert bytes(ours.raw(info)) == tensor.data.tobytes()


# --------------------------------------------------------------------------------------------------- the real model


def test_the_real_models_config(smollm2: ModelSource):
    config = load_config(smollm2)
    assert (config.family, config.layers, config.hidden_size, config.intermediate_size) == ("llama", 30, 576, 1536)
    assert (config.heads, config.kv_heads, config.head_dim, config.vocab_size) == (9, 3, 64, 49_152)
    assert (config.context_length, config.rope, config.tied_embeddings) == (8192, RopeConfig(100_000.0), True)
    assert config.norm_eps == pytest.approx(1e-5)
    assert (config.eos_ids, config.bos_id) == ((2,), 1)


def test_the_real_models_weights(smollm2: ModelSource):
    """Against the gguf package's dequantisation, with the permutation done the converters' way."""
    weights, file = open_weights(smollm2), GGUFFile(smollm2.path)
    assert {gguf_name(name) for name in weights.names()} == set(file.tensors)

    def last_rows(name: str) -> np.ndarray:
        info = file.tensors[gguf_name(name)]
        rows = np.frombuffer(file.raw(info), np.uint8).reshape(info.shape[0], -1)[-192:]
        return quants.dequantize(rows, info.type).reshape(-1, *info.shape[1:])

    for name, heads in [("model.layers.0.self_attn.q_proj.weight", 9), ("model.layers.29.self_attn.k_proj.weight", 3)]:
        np.testing.assert_array_equal(interleaved(dense(weights.get(name)).numpy(), heads)[-192:], last_rows(name))
    for name in ["model.layers.7.mlp.down_proj.weight", "model.embed_tokens.weight", "model.norm.weight"]:
        np.testing.assert_array_equal(dense(weights.get(name))[-192:].numpy(), last_rows(name))
