"""The compiled kernels: the whole decoder against the oracle, the same bits however the work is cut, the build."""

from __future__ import annotations

import math
import subprocess
import time
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from shapes import batch_of
from torch import Tensor

from sglite.errors import ConfigError
from sglite.kernels import draws
from sglite.kernels.decoder import DecoderWeights, LayerWeights
from sglite.kernels.draws import Draw
from sglite.kernels.native import NativeOps, available, build
from sglite.kernels.native.pack import NativeLinear, WeightFormat
from sglite.kernels.ops import AttentionSpec, ForwardBatch, KVPool, KVShape, Ops
from sglite.kernels.reference import ReferenceOps
from sglite.kernels.weights import BlockQuantized, WeightSource

CPU = torch.device("cpu")
needs_native = pytest.mark.skipif(available() is not None, reason=str(available()))

VARIANTS = [(weights, amx) for weights in ("dense", "int8", "int4") for amx in (True, False)]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(11)
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda v: f"{v[0]}-{'tiles' if v[1] else 'vectors'}")
def ops(request: pytest.FixtureRequest) -> NativeOps:
    weights, amx = request.param
    return NativeOps(CPU, torch.bfloat16, weights, 2, amx=amx)


# -------------------------------------------------------------------------------------------------------- tiny models


@dataclass(frozen=True)
class Tiny:
    """A decoder's sizes. ``windows``: each layer's, which also says how many layers there are."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    hidden: int = 64
    intermediate: int = 96
    vocabulary: int = 50
    windows: tuple[int | None, ...] = (None, None)
    qk_norm: bool = False
    bias: bool = False

    @property
    def whole_blocks(self) -> bool:
        """Whether 4 bits can hold every matrix exactly: the others are rounded to 4 bits when packed."""
        return all(size % 32 == 0 for size in (self.hidden, self.intermediate, self.heads * self.head_dim))

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(self.heads, self.kv_heads, self.head_dim, self.head_dim**-0.5, self.windows[0])


MODELS = {
    "llama": Tiny(),
    "smollm": Tiny(heads=9, kv_heads=3, head_dim=64, hidden=192, intermediate=320),
    "qwen2, biases": Tiny(bias=True),
    "qwen3, norms of heads": Tiny(qk_norm=True, head_dim=32),
    "windows": Tiny(windows=(40, None, 7)),
    "head size 80": Tiny(head_dim=80),
    "head size 96, sizes that are no multiple of 64": Tiny(head_dim=96, hidden=48, intermediate=80),
    "head size 128, one key head": Tiny(heads=8, kv_heads=1, head_dim=128),
    "more heads a key than a tile has rows": Tiny(heads=20, kv_heads=1, head_dim=16),
    "every head its own keys": Tiny(heads=3, kv_heads=3, head_dim=48),
}


def blocks_of(weight: Tensor) -> BlockQuantized:
    """A Q4_1 matrix near ``weight``: every Ops then has exactly the same numbers to hold."""
    groups = weight.view(len(weight), -1, 32)
    low, high = groups.aminmax(dim=2)
    scale, low = ((high - low) / 15).half().float(), low.half().float()
    codes = ((groups - low.unsqueeze(2)) / scale.unsqueeze(2)).round().clamp(0, 15).to(torch.uint8)
    return BlockQuantized("Q4_1", codes[..., :16] | codes[..., 16:] << 4, scale, low)


@cache
def model_of(size: Tiny) -> Model:
    return Model(size)


class Model:
    """Random weights, and the same decoder on any Ops."""

    def __init__(self, size: Tiny) -> None:
        self.size = size
        generator = torch.Generator().manual_seed(3)

        def matrix(rows: int, columns: int) -> WeightSource:
            weight = torch.randn(rows, columns, generator=generator) / math.sqrt(columns)
            return blocks_of(weight) if columns % 32 == 0 else weight

        s, q, kv = size, size.heads * size.head_dim, size.kv_heads * size.head_dim
        self.parts = [
            {
                "qkv": [matrix(q, s.hidden), matrix(kv, s.hidden), matrix(kv, s.hidden)],
                "o": [matrix(s.hidden, q)],
                "gate_up": [matrix(s.intermediate, s.hidden), matrix(s.intermediate, s.hidden)],
                "down": [matrix(s.hidden, s.intermediate)],
            }
            for _ in s.windows
        ]
        self.head = matrix(s.vocabulary, s.hidden)
        self.embedding = torch.randn(s.vocabulary, s.hidden, generator=generator).bfloat16().float()

        def vector(n: int) -> Tensor:
            return 1 + 0.1 * torch.randn(n, generator=generator)

        self.norms = [[vector(n) for n in (s.hidden, s.hidden, s.head_dim, s.head_dim)] for _ in s.windows]
        self.final_norm = vector(s.hidden)
        self.biases = [torch.randn(q + 2 * kv, generator=generator) for _ in s.windows]

    def weights(self, ops: Ops) -> DecoderWeights:
        size = self.size
        angles = torch.outer(torch.arange(1024.0), 10000.0 ** (-torch.arange(0, size.head_dim, 2) / size.head_dim))
        return DecoderWeights(
            embedding=self.embedding,
            layers=tuple(self._layer(i, ops) for i in range(len(size.windows))),
            final_norm=self.final_norm,
            head=ops.pack(self.head),
            cos=angles.cos(),
            sin=angles.sin(),
            attention=size.spec,
            eps=1e-5,
        )

    def _layer(self, i: int, ops: Ops) -> LayerWeights:
        size, parts = self.size, self.parts[i]
        attention_norm, mlp_norm, q_norm, k_norm = self.norms[i]
        return LayerWeights(
            attention_norm,
            ops.pack_many(parts["qkv"], self.biases[i] if size.bias else None),
            ops.pack_many(parts["o"]),
            mlp_norm,
            ops.pack_many(parts["gate_up"]),
            ops.pack_many(parts["down"]),
            q_norm if size.qk_norm else None,
            k_norm if size.qk_norm else None,
            replace(size.spec, window=size.windows[i]),
        )

    def pool(self, ops: Ops, page_size: int, pages: int = 200) -> KVPool:
        return ops.allocate_kv(
            KVShape(
                len(self.size.windows), pages, page_size, self.size.kv_heads, self.size.head_dim, ops.dtype, ops.device
            )
        )


def by_operation(ops: Ops, weights: DecoderWeights, batch: ForwardBatch, kv: KVPool) -> Tensor:
    """The layers in the words of ``LayerWeights``'s docstring."""
    x = ops.embed(batch.ids, weights.embedding)
    cos, sin = weights.cos[batch.positions], weights.sin[batch.positions]
    for index, layer in enumerate(weights.layers):
        spec = layer.attention or weights.attention
        heads = ops.linear(ops.rms_norm(x, layer.attention_norm, weights.eps), layer.qkv)
        heads = heads.view(len(x), -1, spec.head_dim)
        q, k, v = heads.split([spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = ops.rms_norm(q, layer.q_norm, weights.eps), ops.rms_norm(k, layer.k_norm, weights.eps)
        q, k = ops.rope(q, k, cos, sin)
        ops.write_kv(kv, index, k, v, batch)
        y = ops.attend(q, kv, index, batch, spec, ops.plan(batch, spec))
        x = x + ops.linear(y.flatten(1), layer.o)
        h = ops.linear(ops.rms_norm(x, layer.mlp_norm, weights.eps), layer.gate_up)
        x = x + ops.linear(ops.silu_mul(h), layer.down)
    return ops.rms_norm(x, weights.final_norm, weights.eps)[batch.logit_index]


class Session:
    """Sequences of random tokens over one poisoned pool; each owns a page table."""

    def __init__(self, model: Model, ops: NativeOps, page_size: int = 16) -> None:
        self.page_size = page_size
        self.kv = model.pool(ops, page_size)
        self.kv.data.fill_(math.nan)  # type: ignore[attr-defined]
        self.run = ops.fused_decoder(model.weights(ops))
        assert self.run is not None

    def step(self, rows: list[tuple[list[int], Tensor, int, int]], wanted: list[int] | None = None) -> Tensor:
        """Each row: its pages, all its tokens, and which of them [start, stop) to compute. Every position's hidden."""
        assert self.run is not None
        tables = [pages for pages, _, _, _ in rows]
        batch = batch_of(tables, [(start, stop) for _, _, start, stop in rows], self.page_size, CPU)
        ids = torch.cat([tokens[start:stop] for _, tokens, start, stop in rows])
        index = torch.arange(len(ids)) if wanted is None else torch.tensor(wanted, dtype=torch.int64)
        return self.run(replace(batch, ids=ids, logit_index=index), self.kv)


def tokens(n: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 50, (n,), generator=torch.Generator().manual_seed(seed))


def error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


# ------------------------------------------------------------------------------------------------- against the oracle


@needs_native
@pytest.mark.parametrize("name", MODELS)
def test_fused_decoder_agrees_with_the_oracle(ops, name):
    model = model_of(MODELS[name])
    oracle = ReferenceOps(CPU, torch.float32)
    weights = model.weights(oracle)
    kv = model.pool(oracle, 16)
    session = Session(model, ops)
    rounded = ops.weights == "int4" and not model.size.whole_blocks
    tables = [[3, 9, 4, 20, 21, 22, 7, 8, 30, 31], [5, 6, 40], [50]]
    texts = [tokens(150, 1), tokens(40, 2), tokens(9, 3)]
    for spans in ([(0, 139), (0, 33), (0, 0)], [(139, 140), (33, 40), (0, 9)], [(140, 141), (39, 40), (8, 9)]):
        rows = [(t, x, a, b) for t, x, (a, b) in zip(tables, texts, spans, strict=True) if b > a]
        batch = batch_of([r[0] for r in rows], [(a, b) for _, _, a, b in rows], 16, CPU)
        ids = torch.cat([x[a:b] for _, x, a, b in rows])
        batch = replace(batch, ids=ids, logit_index=torch.arange(len(ids)))
        expected = by_operation(oracle, weights, batch, kv)
        assert error(session.step(rows), expected) < (0.2 if rounded else 0.04)


@needs_native
def test_a_head_shared_with_the_embedding(ops):
    tolerance = 0.2 if ops.weights == "int4" else 0.03
    model = model_of(MODELS["llama"])
    weights = model.weights(ops)
    head = ops.pack(model.embedding)
    assert ops.table(model.embedding, head) is head
    assert error(ops.embed(torch.tensor([7, 49, 0]), head), model.embedding[[7, 49, 0]]) < tolerance
    session = Session(model, ops)
    plain = session.step([([1, 2], tokens(20), 0, 20)])
    session.run = ops.fused_decoder(replace(weights, embedding=head))
    assert error(session.step([([1, 2], tokens(20), 0, 20)]), plain) < tolerance


@needs_native
def test_shapes_without_a_fused_form_are_declined(ops):
    assert ops.fused_decoder(Model(Tiny(head_dim=24)).weights(ops)) is None
    assert ops.fused_decoder(Model(Tiny(intermediate=72)).weights(ops)) is None


# --------------------------------------------------------------------------------------------------------- same bits


@pytest.fixture
def smollm(ops) -> Session:
    return Session(model_of(MODELS["smollm"]), ops)


def whole(session: Session, text: Tensor, first_page: int = 100) -> Tensor:
    pages = list(range(first_page, first_page + 1 + len(text) // session.page_size))
    return session.step([(pages, text, 0, len(text))])


@needs_native
@pytest.mark.parametrize("cuts", [(1, 2, 3), (16, 17, 130), (5, 128, 129, 256), tuple(range(1, 40))], ids=str)
def test_chunks_do_not_change_a_bit(smollm, cuts):
    text = tokens(300)
    pages = list(range(30, 50))
    parts = [smollm.step([(pages, text, a, b)]) for a, b in pairwise((0, *cuts, len(text)))]
    assert torch.equal(torch.cat(parts), whole(smollm, text))


@needs_native
def test_rows_beside_it_do_not_change_a_bit(smollm):
    texts = [tokens(n, n) for n in (1, 2, 17, 33, 64, 129, 150, 200)]
    alone = [whole(smollm, text) for text in texts]
    tables = [[k * 14 + i for i in range(14)] for k in range(len(texts))]
    rows = [(table, text, 0, len(text)) for table, text in zip(tables, texts, strict=True)]
    assert torch.equal(smollm.step(rows), torch.cat(alone))
    for count in (1, 2, 3, 4, 5, 8):  # decode steps of every kind of batch size
        last = [(table, text, len(text) - 1, len(text)) for table, text in zip(tables, texts, strict=True)][-count:]
        assert torch.equal(smollm.step(last), torch.cat([y[-1:] for y in alone[-count:]]))


@needs_native
def test_shared_pages_give_the_bits_of_private_ones(smollm):
    """Rows whose prefix is the same pages are attended to together; rows with copies of it are not."""
    prefix = tokens(261)
    texts = [torch.cat([prefix, tokens(30, seed)]) for seed in range(1, 8)]
    alone = torch.cat([whole(smollm, text)[-1:] for text in texts])
    shared = list(range(16))
    smollm.step([(shared, prefix, 0, 256)])
    tables = [[*shared, 20 + 3 * i, 21 + 3 * i, 22 + 3 * i] for i in range(len(texts))]
    smollm.step([(t, x, 256, 290) for t, x in zip(tables, texts, strict=True)])
    assert torch.equal(smollm.step([(t, x, 290, 291) for t, x in zip(tables, texts, strict=True)]), alone)


@needs_native
@pytest.mark.parametrize("page_size", [1, 4, 32, 256])
def test_page_size_does_not_change_a_bit(ops, page_size):
    text = tokens(150)
    model = model_of(MODELS["llama"])
    expected = whole(Session(model, ops), text, 0)
    session = Session(model, ops, page_size)
    pages = list(range(150, -1, -1))[: 150 // page_size + 1]
    first = session.step([(pages, text, 0, 149)])
    assert torch.equal(torch.cat([first, session.step([(pages, text, 149, 150)])]), expected)


@needs_native
@pytest.mark.parametrize("weights", ["dense", "int8", "int4"])
def test_threads_do_not_change_a_bit(weights: WeightFormat):
    model, text = model_of(MODELS["llama"]), tokens(300)
    results = []
    for threads in (1, 2, 3):
        session = Session(model, NativeOps(CPU, torch.bfloat16, weights, threads))
        results.append(torch.cat([whole(session, text), session.step([(list(range(100, 120)), text, 299, 300)])]))
    assert all(torch.equal(result, results[0]) for result in results)


@needs_native
def test_only_wanted_positions_come_back(smollm):
    text = tokens(40)
    everything = whole(smollm, text)
    for wanted in ([], [39], [0, 7, 39]):
        assert torch.equal(smollm.step([([1, 2, 3], text, 0, 40)], wanted), everything[wanted])


@needs_native
def test_products_of_a_row_do_not_depend_on_other_rows(ops):
    x, packed = torch.randn(70, 200), ops.pack(torch.randn(90, 200))
    together = ops.linear(x, packed)
    for size in (1, 2, 3, 4, 15, 16, 17, 33):
        assert torch.equal(ops.linear(x[:size], packed), together[:size])


# --------------------------------------------------------------------------------------------------------- bad numbers


@needs_native
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_visible_in_its_row(ops, value):
    x, packed = torch.randn(6, 96), ops.pack(torch.randn(40, 96))
    good = ops.linear(x, packed)
    x[2, 31] = value
    bad = ops.linear(x, packed)
    assert not torch.isfinite(bad[2]).any()
    rest = [0, 1, 3, 4, 5]
    assert torch.equal(bad[rest], good[rest])


# ------------------------------------------------------------------------------------------------------------ sampling


@pytest.fixture
def sampler() -> NativeOps:
    return NativeOps(CPU, torch.bfloat16, "dense", 2)


def packed(allowed: Tensor) -> np.ndarray:
    padded = F.pad(allowed, (0, -allowed.shape[1] % 32))
    return np.packbits(padded.numpy(), axis=1, bitorder="little").view(np.int32)


@needs_native
@pytest.mark.parametrize("width", [1, 15, 16, 33, 1000])
def test_the_likeliest_under_a_mask(sampler, width):
    logits = torch.randn(9, width).round(decimals=1)  # with equal values
    allowed = torch.rand(9, width) < 0.3
    ids, peaks = sampler.choose(logits, packed(allowed), [None] * 9)
    for row in range(9):
        best = logits[row].masked_fill(~allowed[row], -math.inf)
        assert peaks[row] == best.max()
        if allowed[row].any():
            assert ids[row] == (best == best.max()).nonzero()[0]
    assert sampler.choose(logits, None, [None] * 9)[1] == logits.amax(1).tolist()


@needs_native
def test_what_is_not_a_number_shows(sampler):
    logits = torch.zeros(2, 50)
    logits[1, 20] = math.nan
    peaks = sampler.choose(logits, None, [None, Draw(1.0, -1, 1.0, 0.0, 0.5)])[1]
    assert peaks[0] == 0
    assert math.isnan(peaks[1])
    only_others = torch.ones(2, 50, dtype=torch.bool)
    only_others[:, 20] = False
    assert sampler.choose(logits, packed(only_others), [None] * 2)[1][1] == 0


FILTERS = {
    "none": (-1, 1.0, 0.0),
    "top-k": (40, 1.0, 0.0),
    "top-k beyond the vocabulary": (5000, 0.9, 0.0),
    "top-k of two": (2, 1.0, 0.0),
    "top-p": (-1, 0.9, 0.0),
    "top-p of nearly all": (-1, 0.999999, 0.0),
    "top-p of the first": (-1, 1e-9, 0.0),
    "min-p": (-1, 1.0, 0.05),
    "min-p of nothing": (-1, 1.0, 1e-9),
    "all": (100, 0.95, 0.02),
    "all, beyond the shortlist": (1500, 0.8, 0.05),
}


@needs_native
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("temperature", [0.02, 1.0, 30.0])
def test_draws_are_those_of_plain_torch(sampler, filters, temperature):
    """Where they differ, the number fell on a boundary of two tokens: the plain form draws the other just beside it."""
    rows, width = 64, 3001
    logits = 3 * torch.randn(rows, width)
    logits[:, ::7] = -math.inf
    mask = packed(torch.rand(rows, width) < 0.7)
    numbers = torch.rand(rows, dtype=torch.float64).tolist()
    ids = sampler.choose(logits.clone(), mask, [Draw(temperature, *filters, n) for n in numbers])[0]
    around = [
        draws.choose(
            logits.clone(), mask, [Draw(temperature, *filters, min(max(n + e, 0), 1 - 1e-12)) for n in numbers]
        )[0]
        for e in (0, -1e-5, 1e-5)
    ]
    assert all(token in near for token, *near in zip(ids, *around, strict=True))
    assert sum(token == same for token, same in zip(ids, around[0], strict=True)) >= rows - 3
    alone = [
        sampler.choose(logits[i : i + 1], mask[i : i + 1], [Draw(temperature, *filters, n)])[0][0]
        for i, n in enumerate(numbers)
    ]
    assert alone == ids


# ---------------------------------------------------------------------------------------------------- weights and pool


@needs_native
def test_weights_lie_in_memory_once():
    weight = torch.randn(256, 512)
    bits = {"dense": 16, "int8": 8, "int4": 5}
    for format, expected in bits.items():
        packed = NativeOps(CPU, torch.bfloat16, format, 1).pack(weight)  # type: ignore[arg-type]
        assert packed.nbytes() <= weight.numel() * expected / 8 * 1.02


@needs_native
def test_eight_bit_blocks_stay_eight_bits():
    codes = torch.randint(-127, 128, (32, 4, 32), dtype=torch.int8)
    packed = NativeOps(CPU, torch.bfloat16, "int4", 1).pack(BlockQuantized("Q8_0", codes, torch.rand(32, 4)))
    assert isinstance(packed, NativeLinear)
    assert packed.nbytes() >= codes.numel()


@needs_native
def test_packing_leaves_the_source_alone(ops):
    weight = torch.randn(32, 128)
    before = weight.clone()
    ops.pack(weight)
    assert torch.equal(weight, before)


@needs_native
def test_idle_threads_sleep():
    ops = NativeOps(CPU, torch.bfloat16, "int8", 3)
    ops.linear(torch.randn(4, 64), ops.pack(torch.randn(32, 64)))
    time.sleep(0.05)  # until the workers have given up waiting
    used = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - used < 0.15


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types_are_refused(dtype):
    with pytest.raises(ConfigError, match="bfloat16"):
        NativeOps(CPU, dtype, "int8", 1)


# --------------------------------------------------------------------------------------------------------------- build

TRIVIAL = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def tiny_build(monkeypatch, tmp_path):
    """The build of a one-line library into an empty home."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "native.cpp").write_text(TRIVIAL)
    monkeypatch.setattr(build, "_SOURCES", sources)
    monkeypatch.setenv("SGLITE_HOME", str(tmp_path / "home"))
    return sources / "native.cpp"


@needs_native
@needs_native
@pytest.mark.parametrize("cpu", ["cascadelake", "icelake-server", "sapphirerapids"])  # VNNI; no tiles; tiles
def test_the_sources_are_good_for_other_cpus(cpu):
    flags = [flag for flag in build.FLAGS if not flag.startswith("-march")]
    source = Path(build.__file__).parent / "native.cpp"
    subprocess.run(["g++", *flags, f"-march={cpu}", "-fsyntax-only", str(source)], check=True, timeout=100)


def test_a_build_is_kept_until_a_source_changes(tiny_build):
    first = build.library()
    stamp = first.stat().st_mtime_ns
    assert build.library() == first
    assert first.stat().st_mtime_ns == stamp
    tiny_build.write_text(TRIVIAL + "// changed\n")
    second = build.library()
    assert second != first
    assert sorted(first.parent.iterdir()) == sorted([first, second])  # nothing half-written is left


@needs_native
def test_a_failing_compiler_is_one_line(tiny_build, tmp_path):
    tiny_build.write_text("this is no C++\n")
    with pytest.raises(build.BuildError, match=r"failed: .*error") as caught:
        build.library()
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "home" / "native").iterdir()) == []


@needs_native
def test_no_compiler_and_no_place_to_write(tiny_build, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    with pytest.raises(build.BuildError, match="cannot be run"):
        build.library()
    monkeypatch.delenv("CXX")
    (tmp_path / "file").touch()
    monkeypatch.setenv("SGLITE_HOME", str(tmp_path / "file"))
    with pytest.raises(build.BuildError, match="cannot be written"):
        build.library()
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler"):
        build.library()


def test_a_cpu_without_the_instructions_is_named(monkeypatch):
    monkeypatch.setattr(build, "cpu_features", lambda: frozenset({"avx2"}))
    with pytest.raises(build.BuildError, match=r"this CPU lacks .*avx512_vnni"):
        build.library()
