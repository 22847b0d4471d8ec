"""A process's own requests at one backend, so that a full queue makes its programs wait instead of fail."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
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
        self._under_way = 0
        self._waiting: deque[_Place] = deque()

    async def send(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """The result of ``attempt``, a whole request that may be repeated while it is refused with OverloadedError."""
        while True:
            self._under_way += 1
            refused = False
            try:
                return await attempt()
            except OverloadedError:
                refused = self._under_way > 1
                if not refused:
                    raise
            finally:
                self._under_way -= 1
                if self._waiting and not refused:
                    self._waiting.popleft().free()
            await self._wait()

    async def _wait(self) -> None:
        place = _Place()
        self._waiting.append(place)
        try:
            await place.signal.until(place.is_free)
        except BaseException:
            if place.is_free() and self._waiting:
                self._waiting.popleft().free()  # what was meant for us is the next one's
            elif place in self._waiting:
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
