"""How long programs stay away between two calls: learned, and asked of those that are away."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from itertools import accumulate

REMEMBERED = 128
"""The latest gaps, from which the next ones are guessed."""


class Gaps:
    """``usual``: the mean, for as long as none is known a guess of the caller's."""

    def __init__(self, usual: float) -> None:
        self.usual = usual
        self._latest: deque[float] = deque()
        self._sorted: list[float] = []
        self._sums = [0.0]
        """Of all gaps from an index of ``_sorted`` on."""

    def observe(self, gap: float) -> None:
        if len(self._latest) == REMEMBERED:
            del self._sorted[bisect_right(self._sorted, self._latest.popleft()) - 1]
        self._latest.append(gap)
        insort(self._sorted, gap)
        self._sums = [*accumulate(reversed(self._sorted), initial=0.0)][::-1]
        self.usual = self._sums[0] / len(self._sorted)

    def remaining(self, away: float) -> float:
        """How much longer somebody stays away who was away for so long: the mean residual life of the gaps seen.

        Infinity for longer than any; 0 while nothing is known.
        """
        later = bisect_right(self._sorted, away)
        n = len(self._sorted) - later
        if n:
            return self._sums[later] / n - away
        return float("inf") if self._sorted else 0.0
