"""From a plan of integers to the tensors of one forward pass.

:class:`PageTables` keeps each slot's page table as one row of a fixed array, so a decode step only touches the rows
that grew. :func:`build_batch` does the rest with whole-array operations: its cost does not depend on history length.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from sglite.kernels.ops import ForwardBatch
from sglite.runtime.plan import Row

Ints = npt.NDArray[np.int64]


class PageTables:
    """Page ids by slot: int32 [slots, pages of the longest sequence], with the number in use beside them."""

    def __init__(self, slots: int, pages_per_slot: int) -> None:
        self.table = np.zeros((slots, pages_per_slot), dtype=np.int32)
        self.used = np.zeros(slots, dtype=np.int64)

    def apply(self, rows: Sequence[Row]) -> None:
        """Record the pages the plan adds. Must run exactly once per plan, in plan order."""
        for row in rows:
            if row.reset:
                self.table[row.slot] = 0
                self.used[row.slot] = 0
            if row.new_pages:
                start = int(self.used[row.slot])
                stop = start + len(row.new_pages)
                self.table[row.slot, start:stop] = row.new_pages
                self.used[row.slot] = stop


def build_batch(rows: Sequence[Row], tables: PageTables, page_size: int, device: torch.device) -> ForwardBatch:
    """The forward pass of ``rows`` (not empty); their pages must have been applied to ``tables``."""
    if all(row.logits == 1 and len(row.ids) == 1 for row in rows):
        return decode_batch(rows, tables, page_size, device)
    return general_batch(rows, tables, page_size, device)


def decode_batch(rows: Sequence[Row], tables: PageTables, page_size: int, device: torch.device) -> ForwardBatch:
    """One token a row, as in most steps: the same tensors by a third of the operations.

    They run between two passes over the weights, which leave nothing of Python in the caches: each costs microseconds.
    """
    slots, starts, ids = np.array([[r.slot for r in rows], [r.start for r in rows], [r.ids[0] for r in rows]])
    pages, offsets = np.divmod(starts, page_size)
    page_table = tables.table[slots, : int(pages.max()) + 1]
    indptr, index, indptr_host = _one_each(len(rows), device)
    return ForwardBatch(
        ids=torch.from_numpy(ids).to(device),
        positions=torch.from_numpy(starts).to(device),
        indptr=indptr,
        kv_lengths=torch.from_numpy((starts + 1).astype(np.int32)).to(device),
        page_table=torch.from_numpy(page_table).to(device),
        page_size=page_size,
        write_slots=torch.from_numpy(tables.table[slots, pages] * np.int64(page_size) + offsets).to(device),
        logit_index=index,
        indptr_host=indptr_host,
        kv_lengths_host=tuple([row.start + 1 for row in rows]),
    )


@lru_cache(maxsize=1024)
def _one_each(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """``indptr`` and ``logit_index`` of rows with one token each, and ``indptr_host``."""
    indptr = torch.arange(rows + 1, dtype=torch.int32, device=device)
    return indptr, torch.arange(rows, device=device), tuple(range(rows + 1))


def general_batch(rows: Sequence[Row], tables: PageTables, page_size: int, device: torch.device) -> ForwardBatch:
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
        return torch.from_numpy(values).to(device=device, dtype=dtype)

    return ForwardBatch(
        ids=torch.tensor([i for row in rows for i in row.ids], dtype=torch.int64, device=device),
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
