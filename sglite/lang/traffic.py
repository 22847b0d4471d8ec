"""A process's own requests at one backend, so that a full queue makes its programs wait instead of fail."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from sglite.errors import OverloadedError
from sglite.lang.memo import PerBackend
from sglite.lang.waiting import Signal
from sglite.protocol import Backend

T = TypeVar("T")


class Traffic:
    """A request refused because the queue is full is sent again when one of ours has ended.

    When none of ours is under way the queue is full of others' requests, and the refusal is the caller's to know.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = 0
        self._waiting: deque[_Place] = deque()

    async def send(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """The result of ``attempt``, a whole request that may be repeated while it is refused with OverloadedError."""
        while True:
            self._begin()
            refused = False
            try:
                return await attempt()
            except OverloadedError:
                refused = self._under_way > 1
                if not refused:
                    raise
            finally:
                self._end(makes_room=not refused)
            await self._wait()

    def _begin(self) -> None:
        with self._lock:
            self._under_way += 1

    def _end(self, *, makes_room: bool) -> None:
        with self._lock:
            self._under_way -= 1
        if makes_room:
            self._free_one()

    def _free_one(self) -> None:
        if self._waiting:
            with suppress(IndexError):  # another thread was quicker
                self._waiting.popleft().free()

    async def _wait(self) -> None:
        place = _Place()
        self._waiting.append(place)
        if not self._under_way:  # on another loop the last one has ended meanwhile
            self._free_one()
        try:
            await place.signal.until(place.is_free)
        except BaseException:
            if place.is_free():
                self._free_one()  # what was meant for us is the next one's
            with suppress(ValueError):
                self._waiting.remove(place)
            raise


class _Place:
    __slots__ = ("_free", "signal")

    def __init__(self) -> None:
        self.signal = Signal()
        self._free = False

    def is_free(self) -> bool:
        return self._free

    def free(self) -> None:
        self._free = True
        self.signal.notify()


_traffic: PerBackend[Traffic] = PerBackend()


def traffic_of(backend: Backend) -> Traffic:
    return _traffic.get(backend) or _traffic.put(backend, Traffic())
