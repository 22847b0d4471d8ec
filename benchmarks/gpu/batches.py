"""Batches and KV pools of any shape, on the device, with everything around the used slots poisoned."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu.common import Context
from sglite.kernels.ops import AttentionSpec, ForwardBatch, KVShape


@dataclass(frozen=True)
class Shape:
    """``rows``: for each row, positions already in the pool and new ones."""

    rows: tuple[tuple[int, int], ...]
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128
    page_size: int = 16
    window: int | None = None
    softcap: float | None = None

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(self.heads, self.kv_heads, self.head_dim, self.head_dim**-0.5, self.window, self.softcap)


def batch_of(context: Context, shape: Shape, shared: int = 0) -> tuple[ForwardBatch, int]:
    """The batch over scattered pages, and the pages of a pool for it. The first ``shared`` positions of all rows
    (whole pages) lie in the same pages."""
    page, rows = shape.page_size, shape.rows
    counts = [-(-(old + new) // page) for old, new in rows]
    common = shared // page
    total = common + sum(count - common for count in counts) + 7
    free = (torch.randperm(total - 1) + 1).tolist()  # page 0 is nobody's
    first = [free.pop() for _ in range(common)]
    tables = [first + [free.pop() for _ in range(count - common)] for count in counts]
    width = max(counts)
    table = torch.tensor([pages + [0] * (width - len(pages)) for pages in tables], dtype=torch.int32)
    lengths = [new for _, new in rows]
    row_of = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths))
    positions = torch.cat([torch.arange(old, old + new) for old, new in rows])
    slots = table[row_of, positions // page].long() * page + positions % page
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(lengths).cumsum(0)])
    kv_lengths = [old + new for old, new in rows]
    on = context.device
    batch = ForwardBatch(
        ids=torch.zeros(len(positions), dtype=torch.int64, device=on),
        positions=positions.to(on),
        indptr=indptr.to(on, torch.int32),
        kv_lengths=torch.tensor(kv_lengths, dtype=torch.int32, device=on),
        page_table=table.to(on),
        page_size=page,
        write_slots=slots.to(on),
        logit_index=(indptr[1:] - 1).to(on),
        indptr_host=tuple(indptr.tolist()),
        kv_lengths_host=tuple(kv_lengths),
    )
    return batch, total


def used_slots(batch: ForwardBatch) -> torch.Tensor:
    """Slots of the pool that hold a position of some row."""
    table, page = batch.page_table.cpu().long(), batch.page_size
    parts = []
    for row, length in enumerate(batch.kv_lengths_host):
        positions = torch.arange(length)
        parts.append(table[row, positions // page] * page + positions % page)
    return torch.cat(parts).unique().to(batch.page_table.device)


def pool_for(context: Context, ops, shape: Shape, batch: ForwardBatch, pages: int, dtype) -> object:
    """A pool of one layer: random where rows have positions, NaN everywhere else."""
    kv = ops.allocate_kv(KVShape(1, pages, shape.page_size, shape.kv_heads, shape.head_dim, dtype, context.device))
    slots = used_slots(batch)
    for half in kv.layer(0):
        half.fill_(torch.nan)
        half[slots] = context.randn(len(slots), shape.kv_heads, shape.head_dim, dtype=dtype)
    return kv
