"""The queue: sorted by rank, with a second order that says who has waited too long."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import takewhile
from operator import attrgetter

from sglite.runtime.sequence import Sequence

WINDOW = 64
"""How many waiting sequences a plan looks at."""

_rank = attrgetter("rank")
_turn = attrgetter("due", "arrival")


class WaitingQueue:
    """Ranks are unique, and do not change while a sequence waits."""

    def __init__(self) -> None:
        self._by_rank: list[Sequence] = []
        self._by_turn: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._by_rank)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_rank)

    def __contains__(self, sequence: Sequence) -> bool:
        at = bisect_left(self._by_rank, sequence.rank, key=_rank)
        return at < len(self._by_rank) and self._by_rank[at] is sequence

    def add(self, sequence: Sequence) -> None:
        insort(self._by_rank, sequence, key=_rank)
        insort(self._by_turn, sequence, key=_turn)

    def remove(self, sequence: Sequence) -> None:
        del self._by_rank[bisect_left(self._by_rank, sequence.rank, key=_rank)]
        del self._by_turn[bisect_left(self._by_turn, _turn(sequence), key=_turn)]

    def overdue(self, admissions: int) -> list[Sequence]:
        """Those that should have started by that many admissions, by how long ago."""
        return list(takewhile(lambda sequence: sequence.due <= admissions, self._by_turn[:WINDOW]))

    def front(self) -> list[Sequence]:
        return self._by_rank[:WINDOW]

    def check(self) -> None:
        assert self._by_rank == sorted(self._by_rank, key=_rank)
        assert self._by_turn == sorted(self._by_rank, key=_turn)
