"""A decode step's batch is built by a shorter way: the same tensors as by the general one."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from sglite.runtime.batch import PageTables, build_batch, decode_batch, general_batch
from sglite.runtime.plan import Row

CPU = torch.device("cpu")


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
    short, general = (make(rows, tables, page_size, CPU) for make in (decode_batch, general_batch))
    for field in fields(general):
        ours, theirs = getattr(short, field.name), getattr(general, field.name)
        if isinstance(theirs, torch.Tensor):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs), field.name
        else:
            assert ours == theirs, field.name


def test_rows_of_other_lengths_take_the_general_way() -> None:
    tables, rows = tables_and_rows([8, 9], 4)
    mixed = [rows[0], rows[1]._replace(start=6, ids=(1, 2, 3))]
    assert build_batch(mixed, tables, 4, CPU).positions.tolist() == [7, 6, 7, 8]
    unwanted = [rows[0]._replace(logits=0), rows[1]]
    assert build_batch(unwanted, tables, 4, CPU).logit_index.tolist() == [1]
