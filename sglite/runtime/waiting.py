"""The queue: sorted by place, with a second order that says who has waited too long."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from itertools import islice, takewhile
from operator import attrgetter

from sglite.runtime.policy import Rank
from sglite.runtime.sequence import Sequence

WINDOW = 64
"""How many waiting sequences a plan looks at."""

Place = tuple[Rank, bytes, int]
"""Rank, prefix and arrival: unique, and constant while a sequence waits."""

_place = attrgetter("place")
_turn = attrgetter("due", "arrival")


class WaitingQueue:
    """Newcomers get their turn by ``settle``, at the next plan: all that came since the last one at once."""

    def __init__(self) -> None:
        self._by_place: list[Sequence] = []
        self._by_turn: list[Sequence] = []
        self._fresh: dict[Sequence, None] = {}
        self._last = b""
        """The prefix of the last that left for a slot."""

    def __len__(self) -> int:
        return len(self._by_place)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_place)

    def __contains__(self, sequence: Sequence) -> bool:
        at = bisect_left(self._by_place, sequence.place, key=_place)
        return at < len(self._by_place) and self._by_place[at] is sequence

    def add(self, sequence: Sequence) -> None:
        insort(self._by_place, sequence, key=_place)
        if sequence.due is None:
            self._fresh[sequence] = None
        else:
            insort(self._by_turn, sequence, key=_turn)

    def settle(self, due: int) -> None:
        """Newcomers should start before that many admissions."""
        fresh, self._fresh = self._fresh, {}
        for sequence in fresh:
            sequence.due = due
            insort(self._by_turn, sequence, key=_turn)

    def remove(self, sequence: Sequence) -> None:
        del self._by_place[bisect_left(self._by_place, sequence.place, key=_place)]
        if sequence in self._fresh:
            del self._fresh[sequence]
        else:
            del self._by_turn[bisect_left(self._by_turn, _turn(sequence), key=_turn)]

    def admitted(self, sequence: Sequence) -> None:
        """Like ``remove``; the walk through the prefixes goes on from this one."""
        self.remove(sequence)
        self._last = sequence.place[1]

    def overdue(self, admissions: int) -> list[Sequence]:
        """Those that should have started by that many admissions, by how long ago."""
        return list(takewhile(lambda sequence: sequence.overdue(admissions), self._by_turn[:WINDOW]))

    def front(self) -> Iterator[Sequence]:
        """Rank by rank; within a rank first those that share most with the last that was admitted.

        The queue may change meanwhile: these are the first as it was.
        """
        parts, left, start = [], WINDOW, 0
        while left > 0 and start < len(self._by_place):
            rank = self._by_place[start].place[0]
            stop = bisect_right(self._by_place, rank, lo=start, key=lambda sequence: sequence.place[0])
            middle = bisect_left(self._by_place, (rank, self._last), lo=start, hi=stop, key=_place)
            below = self._by_place[max(start, middle - left) : middle]
            above = self._by_place[middle : min(stop, middle + left)]
            parts.append((below, above))
            left, start = left - len(below) - len(above), stop
        last = self._last
        return islice((sequence for below, above in parts for sequence in _nearest(below, above, last)), WINDOW)

    def check(self) -> None:
        assert self._by_place == sorted(self._by_place, key=_place)
        settled = [sequence for sequence in self._by_place if sequence not in self._fresh]
        assert self._by_turn == sorted(settled, key=_turn)


def _nearest(below: list[Sequence], above: list[Sequence], last: bytes) -> Iterator[Sequence]:
    """Both sides of a place in the order of prefixes, from there outwards: a depth-first walk through their tree."""
    down, up = len(below) - 1, 0
    while down >= 0 and up < len(above):
        if shared_bytes(above[up].place[1], last) >= shared_bytes(below[down].place[1], last):
            yield above[up]
            up += 1
        else:
            yield below[down]
            down -= 1
    yield from above[up:]
    yield from below[down::-1] if down >= 0 else ()


def shared_bytes(a: bytes, b: bytes) -> int:
    """Length of the common beginning."""
    equal, unequal = 0, min(len(a), len(b)) + 1
    while unequal - equal > 1:
        middle = (equal + unequal) // 2
        if a[equal:middle] == b[equal:middle]:
            equal = middle
        else:
            unequal = middle
    return equal
