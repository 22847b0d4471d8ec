"""Prefixes that are kept until a given time."""

from __future__ import annotations

import heapq
from itertools import count

from sglite.runtime.tree import Lease


class Pins:
    """Every method that returns leases leaves it to the caller to release them."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Lease]] = []
        self._order = count()
        self.positions = 0
        """Pinned now, overlaps counted twice."""

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, lease: Lease, until: float) -> None:
        heapq.heappush(self._heap, (until, next(self._order), lease))
        self.positions += lease.length

    def expire(self, now: float) -> list[Lease]:
        """Those whose time was over before now."""
        expired = []
        while self._heap and self._heap[0][0] < now:
            expired += self.take()
        return expired

    def take(self) -> list[Lease]:
        """The one that would end first, if there is any."""
        if not self._heap:
            return []
        lease = heapq.heappop(self._heap)[2]
        self.positions -= lease.length
        return [lease]

    def clear(self) -> list[Lease]:
        return [lease for _ in range(len(self._heap)) for lease in self.take()]
