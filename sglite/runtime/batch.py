"""From a plan of integers to the tensors of one forward pass.

:class:`PageTables` keeps each slot's page table as one row of a fixed array, so a decode step only touches the rows
that grew. The rest is done with whole-array operations: its cost does not depend on history length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sglite.kernels.ops import ForwardBatch
from sglite.runtime.plan import Row

Ints = npt.NDArray[np.int64]

HOST = torch.device("cpu")


class PageTables:
    """Page ids by slot: int32 [slots, pages of the longest sequence], with the number in use beside them."""

    def __init__(self, slots: int, pages_per_slot: int) -> None:
        self.table = np.zeros((slots, pages_per_slot), dtype=np.int32)
        self.lists: list[list[int]] = [[] for _ in range(slots)]
        """The same, to look at a few without an array's cost."""
        self.version = 0
        """How often it has changed."""

    def apply(self, rows: Sequence[Row]) -> None:
        """Record the pages the plan adds. Must run exactly once per plan, in plan order."""
        for row in rows:
            if row.reset or row.new_pages:
                self._change(row)

    def _change(self, row: Row) -> None:
        self.version += 1
        pages = self.lists[row.slot]
        if row.reset:
            pages.clear()
            self.table[row.slot] = 0
        start = len(pages)
        pages += row.new_pages
        self.table[row.slot, start : len(pages)] = row.new_pages


def build_batch(rows: Sequence[Row], tables: PageTables, page_size: int, device: torch.device = HOST) -> ForwardBatch:
    """The forward pass of ``rows`` (not empty); their pages must have been applied to ``tables``."""
    one = one_each(rows)
    batch = DecodeBatches(tables, page_size, 1).of(rows) if one else general_batch(rows, tables, page_size)
    return batch if device == HOST else _moved(batch, device)


def _moved(batch: ForwardBatch, device: torch.device) -> ForwardBatch:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    moved: dict[str, Any] = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
    return replace(batch, **moved)


def one_each(rows: Sequence[Row]) -> bool:
    """One token a row, and its logits, as in most steps."""
    return all(row.logits == 1 and len(row.ids) == 1 for row in rows)


class DecodeBatches:
    """Batches of one token a row. They use the same tensors again: each is valid until ``of`` is called again.
    ``columns``: the width of a table of pages is a multiple of it.

    Their making runs between two passes over the weights, which leave nothing in the caches: every operation of torch
    or NumPy costs some ten microseconds then, Python on small lists little.
    """

    def __init__(self, tables: PageTables, page_size: int, columns: int = 8) -> None:
        self._tables = tables
        self._page_size = page_size
        self._columns = columns
        self._frames: dict[int, _Frame] = {}

    def of(self, rows: Sequence[Row]) -> ForwardBatch:
        """The same as ``general_batch``, whose table of pages may be narrower."""
        starts = [row.start for row in rows]
        frame = self._frame(len(rows), max(starts) // self._page_size + 1)
        frame.look_up(self._tables, [row.slot for row in rows])
        frame.numbers[:] = ([row.ids[0] for row in rows], starts, self._writes(rows))
        lengths = [start + 1 for start in starts]
        frame.lengths[:] = lengths
        return ForwardBatch(
            ids=frame.ids,
            positions=frame.positions,
            indptr=frame.indptr,
            kv_lengths=frame.kv_lengths,
            page_table=frame.page_table,
            page_size=self._page_size,
            write_slots=frame.write_slots,
            logit_index=frame.logit_index,
            indptr_host=frame.indptr_host,
            kv_lengths_host=tuple(lengths),
        )

    def _writes(self, rows: Sequence[Row]) -> list[int]:
        lists, size = self._tables.lists, self._page_size
        return [lists[row.slot][row.start // size] * size + row.start % size for row in rows]

    def _frame(self, rows: int, pages: int) -> _Frame:
        frame = self._frames.get(rows)
        if frame is None or not pages <= frame.width < pages + 2 * self._columns:
            width = -(-pages // self._columns) * self._columns
            frame = self._frames[rows] = _Frame(rows, min(width, self._tables.table.shape[1]))
        return frame


class _Frame:
    """The tensors for so many rows, and the arrays to fill them by."""

    def __init__(self, rows: int, width: int) -> None:
        self.width = width
        self.numbers = np.zeros((3, rows), dtype=np.int64)
        self.ids, self.positions, self.write_slots = torch.from_numpy(self.numbers)
        self.lengths = np.zeros(rows, dtype=np.int32)
        self.kv_lengths = torch.from_numpy(self.lengths)
        self.table = np.zeros((rows, width), dtype=np.int32)
        self.page_table = torch.from_numpy(self.table)
        self.indptr = torch.arange(rows + 1, dtype=torch.int32)
        self.logit_index = torch.arange(rows)
        self.indptr_host = tuple(range(rows + 1))
        self._seen: tuple[int, list[int]] = (-1, [])

    def look_up(self, tables: PageTables, slots: list[int]) -> None:
        """The pages of these slots, if they are not there already."""
        if self._seen != (tables.version, slots):
            self.table[:] = tables.table[slots, : self.width]
            self._seen = (tables.version, slots)


def general_batch(rows: Sequence[Row], tables: PageTables, page_size: int) -> ForwardBatch:
    """Rows of any lengths."""
    slots = np.array([row.slot for row in rows])
    starts = np.array([row.start for row in rows])
    lengths = np.array([len(row.ids) for row in rows])
    wanted = np.array([row.logits for row in rows])
    indptr = np.concatenate(([0], np.cumsum(lengths)))
    kv_lengths = starts + lengths
    page_table = tables.table[slots, : -(-int(kv_lengths.max()) // page_size)]
    row_of_token = np.repeat(np.arange(len(rows)), lengths)
    positions = np.arange(indptr[-1]) + (starts - indptr[:-1])[row_of_token]
    pages = page_table[row_of_token, positions // page_size].astype(np.int64)

    def tensor(values: npt.NDArray[np.generic], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(values).to(dtype)

    return ForwardBatch(
        ids=torch.tensor([i for row in rows for i in row.ids], dtype=torch.int64),
        positions=tensor(positions, torch.int64),
        indptr=tensor(indptr, torch.int32),
        kv_lengths=tensor(kv_lengths, torch.int32),
        page_table=tensor(page_table, torch.int32),
        page_size=page_size,
        write_slots=tensor(pages * page_size + positions % page_size, torch.int64),
        logit_index=tensor(_last_of_each(indptr[1:], wanted), torch.int64),
        indptr_host=tuple(indptr.tolist()),
        kv_lengths_host=tuple(kv_lengths.tolist()),
    )


def _last_of_each(stops: Ints, counts: Ints) -> Ints:
    """The ``counts[i]`` indices before ``stops[i]``, for all i in order."""
    total = np.cumsum(counts)
    first = np.repeat(stops - total, counts)
    return first + np.arange(int(total[-1]))
