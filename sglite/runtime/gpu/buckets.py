"""Which captured graph serves a decode step: batches are padded to few sizes, and each size is captured once.

Two sizes matter: rows, and the width of the page table, from which the kernels take how far the longest row may reach.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

NARROWEST = 16
"""Pages; narrower tables cost a decode step nothing."""

T = TypeVar("T")


class Bucket(NamedTuple):
    """``rows`` sequences with one token each, page tables of ``width`` pages; ``shares``: some begin alike."""

    rows: int
    width: int
    shares: bool = False


def bucket_of(rows: int, pages: int, *, most_rows: int, most_pages: int, shares: bool = False) -> Bucket:
    """The smallest bucket that holds ``rows`` sequences of up to ``pages`` pages.

    Padded rows cost a share of the step, so row sizes grow by at most an eighth beyond 64; widths grow by doubling, as
    an unused part of a table costs next to nothing.
    """
    assert 0 < rows <= most_rows and 0 < pages <= most_pages
    width = min(max(NARROWEST, _power_of_two(pages)), most_pages)
    return Bucket(min(_row_size(rows), most_rows), width, shares)


def _row_size(rows: int) -> int:
    if rows <= 8:
        return _power_of_two(rows)
    step = max(8, _power_of_two(rows) // 16)
    return -(-rows // step) * step


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


class Recent(Generic[T]):
    """At most ``limit`` things by bucket, made when first asked for; the one not used for longest goes first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._things: dict[Bucket, T] = {}

    def __len__(self) -> int:
        return len(self._things)

    def get(self, bucket: Bucket, make: Callable[[Bucket], T]) -> T:
        thing = self._things.pop(bucket) if bucket in self._things else make(bucket)
        while len(self._things) >= self._limit:
            del self._things[next(iter(self._things))]
        self._things[bucket] = thing
        return thing

    def clear(self) -> None:
        self._things.clear()
