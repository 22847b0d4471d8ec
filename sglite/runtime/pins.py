"""Prefixes that are kept until a given step."""

from __future__ import annotations

import heapq
from itertools import count

from sglite.runtime.radix import Lease


class Pins:
    """Every method that returns leases leaves it to the caller to release them."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Lease]] = []
        self._order = count()
        self.positions = 0
        """Pinned now, overlaps counted twice."""

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, lease: Lease, until: int) -> None:
        heapq.heappush(self._heap, (until, next(self._order), lease))
        self.positions += lease.length

    def expire(self, step: int) -> list[Lease]:
        """Those whose last step was before this one."""
        expired = []
        while self._heap and self._heap[0][0] < step:
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
