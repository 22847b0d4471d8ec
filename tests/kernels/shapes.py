"""The shapes every Ops is tested on, and the batches they mean. Benchmarks may use the same table."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch

from sglite.kernels.ops import AttentionSpec, ForwardBatch, KVShape


@dataclass(frozen=True)
class AttentionShape:
    """``rows``: for each row, how many positions are in the pool already and how many are new."""

    rows: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 4
    window: int | None = None
    softcap: float | None = None

    @property
    def spec(self) -> AttentionSpec:
        scale = 1 / math.sqrt(self.head_dim)
        return AttentionSpec(self.heads, self.kv_heads, self.head_dim, scale, self.window, self.softcap)


DECODE = ((0, 1), (1, 1), (3, 1), (4, 1), (17, 1), (40, 1))
MIXED = ((0, 9), (12, 1), (5, 7), (30, 1), (0, 1), (31, 33))

ATTENTION = {
    "one token": AttentionShape(((0, 1),)),
    "second token": AttentionShape(((1, 1),)),
    "whole prompt": AttentionShape(((0, 13),)),
    "prompt of a page": AttentionShape(((0, 4),)),
    "chunk from a page boundary": AttentionShape(((8, 5),)),
    "chunk across pages": AttentionShape(((6, 11),)),
    "decode": AttentionShape(DECODE),
    "decode, page size 1": AttentionShape(DECODE, page_size=1),
    "decode, page size 16": AttentionShape(DECODE, page_size=16),
    "mixed": AttentionShape(MIXED),
    "mixed, page size 1": AttentionShape(MIXED, page_size=1),
    "mixed, page size 16": AttentionShape(MIXED, page_size=16),
    "every head its own keys": AttentionShape(MIXED, heads=3, kv_heads=3),
    "three heads a key": AttentionShape(MIXED, heads=9, kv_heads=3, head_dim=64, page_size=16),
    "eight heads a key": AttentionShape(MIXED, heads=8, kv_heads=1, head_dim=32),
    "head size 10": AttentionShape(MIXED, head_dim=10),
    "head size 24": AttentionShape(MIXED, head_dim=24, page_size=16),
    "head size 80": AttentionShape(MIXED, head_dim=80),
    "head size 128": AttentionShape(MIXED, head_dim=128, page_size=16),
    "head size 320": AttentionShape(MIXED, head_dim=320),
    "window 1": AttentionShape(MIXED, window=1),
    "window 5": AttentionShape(MIXED, window=5),
    "window of a page": AttentionShape(MIXED, window=16, page_size=16),
    "window longer than the text": AttentionShape(MIXED, window=1000),
    "softcap": AttentionShape(MIXED, softcap=2.0),
    "long prompt": AttentionShape(((0, 600),), page_size=16),
    "long chunk after a prefix": AttentionShape(((301, 515), (700, 1)), heads=3, kv_heads=1, page_size=16),
    "long window": AttentionShape(((301, 515), (700, 1)), page_size=16, window=100),
    "many rows": AttentionShape(tuple((7 * n % 90, 1) for n in range(33)), page_size=16),
}

LINEAR = [(1, 1, 1), (1, 64, 32), (3, 33, 48), (5, 96, 64), (31, 64, 160), (64, 17, 96), (130, 256, 32)]
"""(T, N, K)"""
BLOCK_LINEAR = [(rows, n, k) for rows, n, k in LINEAR if k % 32 == 0]
"""Where K is whole blocks of 32."""
NORM = [(1, 8), (3, 33), (17, 64), (5, 576)]
"""(T, E)"""
ROPE = [(1, 1, 1, 2), (5, 3, 1, 16), (7, 8, 8, 64), (3, 9, 3, 64), (2, 4, 2, 128)]
"""(T, H, G, D)"""
GATED = [(1, 1), (3, 33), (17, 96)]
"""(T, F)"""


def kv_shape(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> KVShape:
    """A pool of two layers with pages to spare; page 0 is never a row's."""
    pages = 3 + 2 * sum(_pages(shape, row) for row in shape.rows)
    return KVShape(2, pages, shape.page_size, shape.kv_heads, shape.head_dim, dtype, device)


def _pages(shape: AttentionShape, row: tuple[int, int]) -> int:
    return -(-sum(row) // shape.page_size)


def page_tables(shape: AttentionShape, pool: KVShape) -> list[list[int]]:
    """Each row's pages, scattered over the pool by a fixed seed."""
    free = random.Random(5).sample(range(1, pool.pages), pool.pages - 1)
    return [[free.pop() for _ in range(_pages(shape, row))] for row in shape.rows]


def batch_of(
    tables: list[list[int]], spans: list[tuple[int, int]], page_size: int, device: torch.device
) -> ForwardBatch:
    """The batch that computes positions ``[start, stop)`` of each row; rows without any are left out."""
    rows = [(table, start, stop) for table, (start, stop) in zip(tables, spans, strict=True) if stop > start]
    positions = [p for _, start, stop in rows for p in range(start, stop)]
    slots = [table[p // page_size] * page_size + p % page_size for table, a, b in rows for p in range(a, b)]
    indptr = [0]
    for _, start, stop in rows:
        indptr.append(indptr[-1] + stop - start)
    lengths = [stop for _, _, stop in rows]
    used = [table[: -(-stop // page_size)] for table, _, stop in rows]
    width = max(len(pages) for pages in used)

    def tensor(values: list[int] | list[list[int]], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return ForwardBatch(
        ids=tensor([0] * len(positions)),
        positions=tensor(positions),
        indptr=tensor(indptr, torch.int32),
        kv_lengths=tensor(lengths, torch.int32),
        page_table=tensor([pages + [0] * (width - len(pages)) for pages in used], torch.int32),
        page_size=page_size,
        write_slots=tensor(slots),
        logit_index=tensor([n - 1 for n in indptr[1:]]),
        indptr_host=tuple(indptr),
        kv_lengths_host=tuple(lengths),
    )
