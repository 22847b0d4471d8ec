"""A decode step's batch is built by a shorter way: the same tensors as by the general one."""

from __future__ import annotations

import itertools
import random
from dataclasses import fields, replace

import pytest
import torch

from sglite.kernels.ops import ForwardBatch
from sglite.runtime.batch import DecodeBatches, PageTables, build_batch, general_batch
from sglite.runtime.plan import Row


def tables_and_rows(lengths: list[int], page_size: int) -> tuple[PageTables, list[Row]]:
    """Sequences in every other slot, with pages in no order, that compute their last position."""
    tables = PageTables(2 * len(lengths), 20)
    rows = []
    for i, length in enumerate(lengths):
        pages = tuple((7 * i + 3 * n) % 101 for n in range(-(-length // page_size)))
        tables.apply([Row(2 * i, 0, (1,), pages, reset=True)])
        rows.append(Row(2 * i, length - 1, (length % 5,), logits=1))
    return tables, rows


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("lengths", [[1], [5], [16, 17], [20, 1, 16, 3]])
def test_decode_batch_is_the_general_one(lengths: list[int], page_size: int) -> None:
    tables, rows = tables_and_rows(lengths, page_size)
    short, general = (make(rows, tables, page_size) for make in (build_batch, general_batch))
    same(short, general)


def same(short: ForwardBatch, general: ForwardBatch) -> None:
    for field in fields(general):
        ours, theirs = getattr(short, field.name), getattr(general, field.name)
        if isinstance(theirs, torch.Tensor):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs), field.name
        else:
            assert ours == theirs, field.name


@pytest.mark.parametrize("page_size", [1, 4])
def test_tensors_used_again_hold_what_the_step_needs(page_size: int) -> None:
    """Sequences grow, end, and give their slots to others while the same frames are filled again and again."""
    rng = random.Random(1)
    tables, pages = PageTables(4, 40), itertools.count()
    batches, lengths = DecodeBatches(tables, page_size), [0] * 4
    for _ in range(300):
        slots = rng.sample(range(4), rng.randint(1, 4))
        rows = []
        for slot in slots:
            new = rng.random() < 0.1 or not 0 < lengths[slot] < 40 * page_size
            start = 0 if new else lengths[slot]
            grown = (next(pages),) if start % page_size == 0 else ()
            rows.append(Row(slot, start, (rng.randrange(9),), grown, new, logits=1))
            lengths[slot] = start + 1
        tables.apply(rows)
        short, general = batches.of(rows), general_batch(rows, tables, page_size)
        width = general.page_table.shape[1]
        assert not short.page_table[:, width:].any()
        same(replace(short, page_table=short.page_table[:, :width]), general)


def test_rows_of_other_lengths_take_the_general_way() -> None:
    tables, rows = tables_and_rows([8, 9], 4)
    mixed = [rows[0], rows[1]._replace(start=6, ids=(1, 2, 3))]
    assert build_batch(mixed, tables, 4).positions.tolist() == [7, 6, 7, 8]
    unwanted = [rows[0]._replace(logits=0), rows[1]]
    assert build_batch(unwanted, tables, 4).logit_index.tolist() == [1]
