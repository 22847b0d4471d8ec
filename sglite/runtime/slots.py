"""Who runs, and in which slot."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from operator import attrgetter

from sglite.runtime.plan import Plan
from sglite.runtime.sequence import Sequence, Status


class Slots:
    """Slots are numbers below ``total``; the lowest free one is given next."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._taken: list[Sequence | None] = [None] * total
        self._free = list(range(total))
        self._running: dict[Sequence, None] = {}

    @property
    def running(self) -> Collection[Sequence]:
        """In the order in which they started."""
        return self._running.keys()

    @property
    def free(self) -> int:
        return len(self._free)

    def __getitem__(self, slot: int) -> Sequence | None:
        return self._taken[slot]

    def planned(self, plan: Plan) -> list[Sequence]:
        """The sequences of a plan's rows that are still there."""
        return [sequence for row in plan.rows if (sequence := self._taken[row.slot]) is not None]

    def last_in_line(self) -> Sequence:
        return max(self._running, key=attrgetter("rank"))

    def last_to_preempt(self) -> Sequence | None:
        """The last in line of those that may be preempted."""
        return max([one for one in self._running if not one.late], key=attrgetter("rank"), default=None)

    def enter(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        sequence.slot = heapq.heappop(self._free)
        self._taken[sequence.slot] = sequence
        self._running[sequence] = None

    def leave(self, sequence: Sequence) -> None:
        self._taken[sequence.slot] = None
        heapq.heappush(self._free, sequence.slot)
        sequence.slot = -1
        del self._running[sequence]

    def check(self) -> None:
        taken = {sequence: sequence.slot for sequence in self._taken if sequence is not None}
        assert taken.keys() == self._running.keys()
        assert sorted([*taken.values(), *self._free]) == list(range(self.total))
        for sequence in self._running:
            assert sequence.status is Status.RUNNING
            assert sequence.computed <= len(sequence.tokens) <= sequence.limit
