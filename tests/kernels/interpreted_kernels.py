"""What the shape table of test_ops.py does not reach, in Triton's interpreter. Run by test_triton.py."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from checked_memory import INTERPRETED
from shapes import ATTENTION, AttentionShape, batch_of, kv_shape, page_tables
from test_ops import Poisoned, assert_close, expected_attention, expected_norm
from torch import Tensor

from sglite.kernels import triton_elementwise as elementwise
from sglite.kernels.cascade import SharedPrefix, find_shared, pack_shared, shared_views
from sglite.kernels.reference import rotate_halves
from sglite.kernels.triton_ops import TritonOps
from sglite.kernels.triton_plan import AttentionPlan

assert INTERPRETED, "needs TRITON_INTERPRET=1"
CPU = torch.device("cpu")
EDGES = ((255, 1), (256, 1), (319, 1), (0, 1), (700, 1))


@pytest.fixture(params=[(torch.float32, 1e-5), (torch.float16, 3e-3)], ids=["float32", "float16"])
def case(request) -> tuple[TritonOps, float]:
    torch.manual_seed(3)
    dtype, error = request.param
    return TritonOps(CPU, dtype), error


# --------------------------------------------------------------------------------------------------------- attention

SPLIT = {
    "lengths around a piece": AttentionShape(EDGES, heads=4, kv_heads=1, head_dim=16, page_size=16),
    "softcap": AttentionShape(((500, 1),), heads=2, kv_heads=1, head_dim=16, page_size=1, softcap=2.0),
    "window": AttentionShape(((380, 1), (700, 1)), heads=2, kv_heads=1, page_size=16, window=350),
    "some tokens a row": AttentionShape(((520, 3), (40, 1)), heads=4, kv_heads=1, head_dim=32, page_size=16),
    "a prompt's last tokens": AttentionShape(((520, 20),), heads=2, kv_heads=1, page_size=16),
    "head size 96": AttentionShape(((400, 1),), heads=3, kv_heads=1, head_dim=96, page_size=16),
    "head size 256": AttentionShape(((400, 1), (3, 20)), heads=2, kv_heads=1, head_dim=256, page_size=16),
}


def most_pieces(plan: AttentionPlan) -> int:
    return max(int(part.pieces.count.max()) for part in plan.passes)


@pytest.mark.parametrize("name", SPLIT)
def test_long_rows_are_split_and_merged(case, name):
    ops, error = case
    pool = Poisoned(ops, SPLIT[name])
    actual, expected = pool.run()
    assert_close(actual, expected, error)
    spans = [(a, a + b) for a, b in SPLIT[name].rows]
    batch = batch_of(pool.tables, spans, SPLIT[name].page_size, CPU)
    assert most_pieces(ops.plan(batch, SPLIT[name].spec)) > 1


def test_the_same_batch_gives_equal_bits(case):
    ops, _ = case
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(Poisoned(ops, SPLIT["head size 96"]).run()[0])
    assert torch.equal(*results)


def test_a_padded_row_attends_to_nothing_and_is_not_written(case):
    """How a captured bucket is filled up: length 0, slot -1."""
    ops, error = case
    shape = AttentionShape(((5, 1), (9, 1)))
    pool = Poisoned(ops, shape)
    actual = pool.run()[0]
    batch = batch_of(pool.tables, [(5, 6), (9, 10)], shape.page_size, CPU)
    padded = replace(batch, kv_lengths=torch.tensor([6, 0], dtype=torch.int32), write_slots=batch.write_slots * 1)
    padded.write_slots[1] = -1
    before = pool.kv.k.clone(), pool.kv.v.clone()
    k, v = torch.randn(2, 2, shape.kv_heads, shape.head_dim).to(ops.dtype)
    q = torch.randn(2, shape.heads, shape.head_dim).to(ops.dtype)
    ops.write_kv(pool.kv, 1, k, v, padded)
    pool.keys[0][5], pool.values[0][5] = k[0], v[0]
    out = ops.attend(q, pool.kv, 1, padded, shape.spec, ops.plan(padded, shape.spec))
    assert_close(out[:1], expected_attention(q[:1], pool.keys[0], pool.values[0], shape.spec), error)
    assert (out[1] == 0).all()
    assert actual.isfinite().all()
    for now, then in zip((pool.kv.k, pool.kv.v), before, strict=True):
        changed = ~((now == then) | (now.isnan() & then.isnan())).all(-1)
        assert changed.sum() <= shape.kv_heads


class Cascade(Poisoned):
    """Rows 0, 2 and 3 begin with the pages of row 0."""

    SHARED = 3, 0, 2

    def __init__(self, ops: TritonOps, shape: AttentionShape, length: int) -> None:
        super().__init__(ops, shape)
        self.group = SharedPrefix(tuple(sorted(self.SHARED)), length)
        for row in self.group.rows[1:]:
            self.tables[row][: length // shape.page_size] = self.tables[0][: length // shape.page_size]
            for held in (self.keys, self.values):
                held[row][:length] = held[0][:length]


@pytest.mark.parametrize(("length", "ratio"), [(16, 1), (16, 4), (560, 4)])
def test_a_shared_prefix_is_read_once_and_merged(case, length, ratio):
    ops, error = case
    rows = ((length, 1), (33, 1), (length + 47, 1), (length + 300, 1), (0, 1))
    shape = AttentionShape(rows, heads=ratio, kv_heads=1, head_dim=16, page_size=16)
    pool = Cascade(ops, shape, length)
    spec = shape.spec
    pool.write([(0, before) for before, _ in rows])
    batch = pool.write([(before, before + 1) for before, _ in rows])
    table, lengths = batch.page_table.numpy(), batch.kv_lengths.numpy()
    assert find_shared(table, lengths, 16, least=16) == [pool.group]
    tokens = ops.prefix_tokens(spec)
    packed = torch.from_numpy(pack_shared([pool.group], len(rows), tokens))
    batch = replace(batch, shared=shared_views(packed, len(rows), tokens))
    q = torch.randn(len(rows), shape.heads, shape.head_dim).to(ops.dtype)
    plan = ops.plan(batch, spec)
    assert plan.prefix is not None
    actual = ops.attend(q, pool.kv, 1, batch, spec, plan)
    each = zip(q.split(1), pool.keys, pool.values, strict=True)
    assert_close(actual, torch.cat([expected_attention(*row, spec) for row in each]), error)


def test_no_shared_prefix_in_a_batch_that_could_have_one(case):
    ops, error = case
    shape = replace(ATTENTION["decode, page size 16"], heads=2)
    pool = Poisoned(ops, shape)
    pool.run()
    batch = batch_of(pool.tables, [(a, a + b) for a, b in shape.rows], 16, CPU)
    tokens = ops.prefix_tokens(shape.spec)
    shared = shared_views(torch.from_numpy(pack_shared([], batch.rows, tokens)), batch.rows, tokens)
    q = torch.randn(batch.rows, shape.heads, shape.head_dim).to(ops.dtype)
    plain, cascade = (
        ops.attend(q, pool.kv, 1, b, shape.spec, ops.plan(b, shape.spec))
        for b in (batch, replace(batch, shared=shared))
    )
    assert_close(cascade, plain.double(), error)


# ------------------------------------------------------------------------------------------------------ qkv to pages


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shape", [(4, 2, 16), (9, 3, 64), (1, 1, 10), (8, 2, 128)], ids=str)
def test_qkv_to_pages(case, shape, normed):
    ops, error = case
    heads, kv_heads, size = shape
    pool = kv_shape(AttentionShape(((7, 3),), heads, kv_heads, size), ops.dtype, CPU)
    tables = page_tables(AttentionShape(((7, 3),)), pool)
    batch = batch_of(tables, [(7, 10)], pool.page_size, CPU)
    slots = batch.write_slots.clone()
    slots[1] = -1
    keys, values = torch.full((2, pool.pages * pool.page_size, kv_heads, size), math.nan).to(ops.dtype)
    qkv = torch.randn(3, heads + 2 * kv_heads, size).to(ops.dtype)
    norms = (torch.rand(size).to(ops.dtype), torch.rand(size).to(ops.dtype)) if normed else None
    angles = 10 * torch.rand(20, size // 2)
    cos, sin = angles.cos(), angles.sin()
    q = elementwise.qkv_to_pages(qkv.flatten(1), heads, batch.positions, slots, (cos, sin), norms, 1e-5, keys, values)

    def turned(x: Tensor, which: int) -> Tensor:
        wide = x.double() if norms is None else expected_norm(x, norms[which], 1e-5)
        return rotate_halves(wide, cos[batch.positions], sin[batch.positions]).double()

    assert_close(q, turned(qkv[:, :heads], 0), error)
    for token in (0, 2):
        assert_close(keys[slots[token]], turned(qkv[:, heads : heads + kv_heads], 1)[token], error)
        assert torch.equal(values[slots[token]], qkv[token, heads + kv_heads :])
    untouched = torch.ones(len(keys), dtype=torch.bool)
    untouched[slots[[0, 2]]] = False
    assert keys[untouched].isnan().all()
    assert values[untouched].isnan().all()
