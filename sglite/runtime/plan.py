"""What one step computes, as plain integers: everything a rank must be told to do the same work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Row(NamedTuple):
    """Compute positions ``[start, start + len(ids))`` of the sequence in ``slot``.

    A negative id stands for a token that only the device knows yet: see ``pending``.
    ``new_pages`` are appended to the slot's page table before the step (``reset`` clears it first). ``copied`` is the
    page whose contents the page of position ``start`` begins with (-1: none): all pages are read before any is written.
    The logits of the last ``logits`` positions are wanted: 0 for a chunk that does not reach its end, 1 to sample,
    more to score.
    """

    slot: int
    start: int
    ids: tuple[int, ...]
    new_pages: tuple[int, ...] = ()
    reset: bool = False
    logits: int = 0
    adapter: int = 0
    copied: int = -1

    @property
    def stop(self) -> int:
        return self.start + len(self.ids)


def pending(slot: int) -> int:
    """The id that stands for the token last sampled in a slot. Its own inverse."""
    return -1 - slot


@dataclass(frozen=True, slots=True)
class Plan:
    """Rows in execution order. A plan without rows means there is nothing to compute."""

    step: int
    rows: tuple[Row, ...]

    @property
    def tokens(self) -> int:
        return sum([len(row.ids) for row in self.rows])
