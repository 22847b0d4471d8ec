"""Every operation of every Ops against the same formula in float64."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from implementations import CPU, IMPLEMENTATIONS, ROUNDING, Implementation
from shapes import ATTENTION, BLOCK_LINEAR, GATED, LINEAR, NORM, ROPE, AttentionShape, batch_of, kv_shape, page_tables
from torch import Tensor

from sglite.errors import ConfigError
from sglite.kernels import cpu, get_ops
from sglite.kernels.ops import AttentionSpec, KVShape, Ops
from sglite.kernels.reference import PagedKV
from sglite.kernels.weights import BlockFormat, BlockQuantized, WeightSource, dense

CASES = [(name, dtype) for name, made in IMPLEMENTATIONS.items() for dtype in made.dtypes]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{str(case[1]).removeprefix('torch.')}")
def case(request: pytest.FixtureRequest) -> tuple[Implementation, torch.dtype]:
    name, dtype = request.param
    return IMPLEMENTATIONS[name], dtype


@pytest.fixture
def ops(case) -> Ops:
    made, dtype = case
    return made.make(dtype)


@pytest.fixture
def rounding(case) -> float:
    return ROUNDING[case[1]]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """The work is tiny, and torch's threads wait for each other badly where other processes use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(7)
    with torch.inference_mode():
        yield


def random(ops: Ops, *shape: int) -> Tensor:
    return torch.randn(shape).to(ops.device, ops.dtype)


def assert_close(actual: Tensor, expected: Tensor, error: float) -> None:
    """The error's norm against the expected's, and no single wild value."""
    assert actual.shape == expected.shape
    difference = actual.double().cpu() - expected
    assert bool(torch.isfinite(difference).all())
    scale = expected.norm().item() + 1e-6
    assert difference.norm().item() <= error * scale
    assert difference.abs().max().item() <= 10 * error * (expected.abs().max().item() + 1e-6)


# --------------------------------------------------------------------------------------------------------- attention


def expected_attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """One row: the last n of L positions ask; position by position, head by head."""
    q, k, v = q.double().cpu(), k.double().cpu(), v.double().cpu()
    out = torch.empty_like(q)
    for i in range(q.shape[0]):
        position = k.shape[0] - q.shape[0] + i
        first = 0 if spec.window is None else max(0, position - spec.window + 1)
        for head in range(spec.heads):
            kv_head = head * spec.kv_heads // spec.heads
            scores = k[first : position + 1, kv_head] @ q[i, head] * spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            out[i, head] = scores.softmax(0) @ v[first : position + 1, kv_head]
    return out


class Poisoned:
    """A pool of NaN in which only the rows' own positions are written, through the seam."""

    layer = 1

    def __init__(self, ops: Ops, shape: AttentionShape) -> None:
        self.ops, self.shape = ops, shape
        pool = kv_shape(shape, ops.dtype, ops.device)
        self.kv = ops.allocate_kv(pool)
        self.tables = page_tables(shape, pool)
        self._poison(pool)
        lengths = [sum(row) for row in shape.rows]
        self.keys, self.values = ([self._random(n) for n in lengths] for _ in range(2))

    def _poison(self, pool: KVShape) -> None:
        if isinstance(self.kv, PagedKV):  # the interpreter would write it slot by slot
            self.kv.k.fill_(math.nan)
            self.kv.v.fill_(math.nan)
            return
        everything = batch_of([list(range(pool.pages))], [(0, pool.pages * pool.page_size)], pool.page_size, CPU)
        nan = torch.full((len(everything.ids), pool.kv_heads, pool.head_dim), math.nan).to(pool.dtype)
        for layer in range(pool.layers):
            self.ops.write_kv(self.kv, layer, nan, nan, everything)

    def _random(self, tokens: int) -> Tensor:
        return random(self.ops, tokens, self.shape.kv_heads, self.shape.head_dim)

    def write(self, spans: list[tuple[int, int]]):
        batch = batch_of(self.tables, spans, self.shape.page_size, self.ops.device)
        k, v = (
            torch.cat([row[a:b] for row, (a, b) in zip(rows, spans, strict=True)]) for rows in (self.keys, self.values)
        )
        self.ops.write_kv(self.kv, self.layer, k, v, batch)
        return batch

    def run(self) -> tuple[Tensor, Tensor]:
        """Attention of the new positions, and what it should be."""
        shape, spec = self.shape, self.shape.spec
        if any(prefix for prefix, _ in shape.rows):
            self.write([(0, prefix) for prefix, _ in shape.rows])
        batch = self.write([(prefix, prefix + new) for prefix, new in shape.rows])
        q = random(self.ops, len(batch.ids), shape.heads, shape.head_dim)
        actual = self.ops.attend(q, self.kv, self.layer, batch, spec, self.ops.plan(batch, spec))
        queries = q.split([new for _, new in shape.rows])
        rows = zip(queries, self.keys, self.values, strict=True)
        return actual, torch.cat([expected_attention(*row, spec) for row in rows])


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_over_scattered_pages_reads_nothing_else(ops, rounding, name):
    actual, expected = Poisoned(ops, ATTENTION[name]).run()
    assert actual.dtype == ops.dtype
    assert_close(actual, expected, rounding)


def test_attention_takes_views_of_a_wider_product(ops, rounding):
    """The model hands q, k and v as slices of one product."""
    shape = AttentionShape(((0, 6),))
    spec = shape.spec
    pool = Poisoned(ops, shape)
    batch = pool.write([(0, 6)])
    qkv = random(ops, 6, spec.heads + 2 * spec.kv_heads, spec.head_dim)
    q, k, v = qkv[:, :4], qkv[:, 4:6], qkv[:, 6:]
    ops.write_kv(pool.kv, 1, k, v, batch)
    actual = ops.attend(q, pool.kv, 1, batch, spec, ops.plan(batch, spec))
    assert_close(actual, expected_attention(q, k, v, spec), rounding)


def test_kv_pool_knows_its_size(ops):
    pool = kv_shape(AttentionShape(((0, 8),)), ops.dtype, ops.device)
    kv = ops.allocate_kv(pool)
    numbers = 2 * pool.layers * pool.pages * pool.page_size * pool.kv_heads * pool.head_dim
    assert kv.shape == pool
    assert kv.nbytes() >= numbers * ops.dtype.itemsize


# ---------------------------------------------------------------------------------------------------------- products


def quantized(format: BlockFormat, rows: int, columns: int) -> BlockQuantized:
    blocks = columns // 32
    scale = 0.01 + 0.02 * torch.rand(rows, blocks)
    if format == "Q8_0":
        return BlockQuantized(format, torch.randint(-127, 128, (rows, blocks, 32), dtype=torch.int8), scale / 16)
    codes = torch.randint(0, 256, (rows, blocks, 16), dtype=torch.uint8)
    return BlockQuantized(format, codes, scale, -8 * scale if format == "Q4_1" else None)


def product(x: Tensor, weight: WeightSource, bias: Tensor | None = None) -> Tensor:
    y = x.double().cpu() @ dense(weight, torch.float64).T
    return y if bias is None else y + bias.double().cpu()


@pytest.mark.parametrize("shape", LINEAR, ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
def test_linear(case, ops, rounding, shape, biased):
    rows, n, k = shape
    x, weight = random(ops, rows, k), torch.randn(n, k)
    bias = torch.randn(n) if biased else None
    packed = ops.pack(weight, bias)
    assert (packed.out_features, packed.in_features) == (n, k)
    actual = ops.linear(x, packed)
    assert actual.dtype == ops.dtype
    assert_close(actual, product(x, weight, bias), rounding + case[0].weight_error)


@pytest.mark.parametrize("format", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("shape", BLOCK_LINEAR, ids=str)
def test_linear_of_gguf_blocks(case, ops, rounding, shape, format):
    rows, n, k = shape
    x, weight = random(ops, rows, k), quantized(format, n, k)
    assert_close(ops.linear(x, ops.pack(weight)), product(x, weight), rounding + case[0].weight_error)


def test_stacked_weights_are_one_product_in_order(case, ops, rounding):
    x = random(ops, 5, 64)
    weights: list[WeightSource] = [torch.randn(48, 64), torch.randn(16, 64), torch.randn(16, 64)]
    bias = torch.randn(80)
    expected = torch.cat([product(x, weight) for weight in weights], dim=1) + bias.double()
    assert_close(ops.linear(x, ops.pack_many(weights, bias)), expected, rounding + case[0].weight_error)


def test_linear_of_no_rows(ops):
    assert ops.linear(random(ops, 0, 32), ops.pack(torch.randn(7, 32))).shape == (0, 7)


def test_int8_product_of_a_row_does_not_depend_on_other_rows():
    ops = get_ops("cpu", CPU, torch.float32, "int8")
    x, packed = torch.randn(33, 96), ops.pack(torch.randn(40, 96))
    together = ops.linear(x, packed)
    alone = torch.cat([ops.linear(row.unsqueeze(0), packed) for row in x])
    assert torch.equal(together, alone)


def test_int8_product_of_zeros_is_zero():
    ops = get_ops("cpu", CPU, torch.float32, "int8")
    assert not ops.linear(torch.zeros(2, 32), ops.pack(torch.zeros(4, 32))).any()


# ------------------------------------------------------------------------------------------------- pointwise operations


def expected_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double().cpu()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double().cpu()


@pytest.mark.parametrize("shape", NORM, ids=str)
def test_rms_norm(ops, rounding, shape):
    x, weight = random(ops, *shape), random(ops, shape[1])
    assert_close(ops.rms_norm(x, weight, 1e-2), expected_norm(x, weight, 1e-2), rounding)


def test_rms_norm_over_heads(ops, rounding):
    qkv, weight = random(ops, 5, 8, 16), random(ops, 16)
    assert_close(ops.rms_norm(qkv[:, :4], weight, 1e-6), expected_norm(qkv[:, :4], weight, 1e-6), rounding)


@pytest.mark.parametrize("shape", NORM, ids=str)
def test_add_rms_norm(ops, rounding, shape):
    x, residual, weight = random(ops, *shape), random(ops, *shape), random(ops, shape[1])
    total = x.double().cpu() + residual.double().cpu()
    normed, new_residual = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert_close(new_residual, total, rounding)
    assert_close(normed, expected_norm(total, weight, 1e-5), rounding)


@pytest.mark.parametrize("shape", ROPE, ids=str)
def test_rope_turns_pairs_of_components(ops, rounding, shape):
    tokens, heads, kv_heads, size = shape
    qkv = random(ops, tokens, heads + kv_heads, size)
    angles = 10 * torch.rand(tokens, size // 2, dtype=torch.float64)
    turn = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    first, second = qkv.double().cpu().chunk(2, dim=-1)
    turned = torch.complex(first, second) * turn
    expected = torch.cat([turned.real, turned.imag], dim=-1)
    cos, sin = (f(angles).float().to(ops.device) for f in (torch.cos, torch.sin))
    q, k = ops.rope(qkv[:, :heads], qkv[:, heads:], cos, sin)
    assert q.dtype == k.dtype == ops.dtype
    assert_close(q, expected[:, :heads], rounding)
    assert_close(k, expected[:, heads:], rounding)


@pytest.mark.parametrize("shape", GATED, ids=str)
def test_silu_mul(ops, rounding, shape):
    tokens, width = shape
    gate_up = random(ops, tokens, 2 * width)
    gate, up = gate_up.double().cpu().chunk(2, dim=-1)
    assert_close(ops.silu_mul(gate_up), gate / (1 + torch.exp(-gate)) * up, rounding)


def test_embed(ops):
    table = random(ops, 11, 8)
    ids = torch.tensor([3, 0, 10, 3], device=ops.device)
    assert torch.equal(ops.embed(ids, table), table[ids])


# ------------------------------------------------------------------------------------------------------------ choosing


@pytest.mark.parametrize(
    ("kernels", "device", "weights", "said"),
    [
        ("cpu", "cpu", "int4", "weights=int8 or weights=dense"),
        ("reference", "cpu", "int8", "weights=dense"),
        ("cpu", "meta", "dense", "device=meta"),
    ],
)
def test_what_an_ops_cannot_do_is_refused_by_name(kernels, device, weights, said):
    with pytest.raises(ConfigError, match=said):
        get_ops(kernels, torch.device(device), torch.float32, weights)


@pytest.mark.parametrize(("weights", "operator"), [("dense", "PrepackedLinear"), ("int8", "Int8Linear")])
def test_without_torchs_private_products_plain_ones_serve_and_it_is_said_once(monkeypatch, caplog, weights, operator):
    def absent(*_: object) -> None:
        raise AttributeError("no such operator")

    monkeypatch.setattr(getattr(cpu, operator), "__init__", absent)
    with caplog.at_level(logging.WARNING):
        ops = get_ops("cpu", CPU, torch.float32, weights)
    x, weight, bias = torch.randn(3, 32), torch.randn(8, 32), torch.randn(8)
    assert_close(ops.linear(x, ops.pack(weight, bias)), product(x, weight, bias), 1e-5)
    assert [record.name for record in caplog.records] == ["sglite.kernels.cpu"]
