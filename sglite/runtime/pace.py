"""Bursts on an event loop: what many wait for at once is done a few a turn, so that nobody else waits for all of it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Pace:
    """Calls back in order, at most ``per_turn`` in one turn of the running loop, which looks at its sockets between."""

    def __init__(self, per_turn: int) -> None:
        self._per_turn = per_turn
        self._due: deque[Callable[[], object]] = deque()
        self._scheduled = False

    @property
    def waiting(self) -> int:
        return len(self._due)

    def soon(self, callback: Callable[[], object]) -> None:
        self._due.append(callback)
        self._schedule()

    def finish(self) -> None:
        """All that is due, now."""
        while self._due:
            self._due.popleft()()

    def _schedule(self) -> None:
        if self._due and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        for _ in range(min(self._per_turn, len(self._due))):
            self._due.popleft()()
        self._schedule()
