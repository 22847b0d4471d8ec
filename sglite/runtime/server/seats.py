"""How many requests may be inside at once, and how often one key may come."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable

from sglite.errors import UnavailableError
from sglite.protocol import ModelInfo
from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.failures import Failure, Refusal

_UNKNOWN = 4096
"""Seats where neither the options nor the engine says how many there are."""


class Seats:
    """Who is inside, and what somebody hears for whom there is no room."""

    def __init__(self, config: ServerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.draining = False
        self._config = config
        self._count = config.max_concurrency or _UNKNOWN
        self._inside: Counter[str] = Counter()
        self._total = 0
        self._rates = Rates(config.rate_limit, clock) if config.rate_limit else None
        self._crowd = Crowd(clock)

    def suit(self, model: ModelInfo) -> None:
        """As many seats as the engine computes and queues, unless the options say otherwise."""
        room = sum(model.details.get(name, 0) for name in ("max_running", "max_queue"))
        self._count = self._config.max_concurrency or room or _UNKNOWN

    def check(self, more: int = 0) -> None:
        """Raises what everybody hears who comes now, after ``more`` who are on their way in."""
        if self.draining:
            raise UnavailableError("the server is shutting down")
        if self._total + more >= self._count:
            raise _busy(f"{self._count} requests are under way; try again later", self._crowd.wait())

    def take(self, name: str) -> None:
        """Raises UnavailableError or Refusal (429)."""
        self.check()
        config = self._config
        if config.key_concurrency and self._inside[name] >= config.key_concurrency:
            raise _busy(f"{config.key_concurrency} requests of this key are under way; try again later", 1)
        if self._rates is not None and (wait := self._rates.take(name)):
            raise _busy(f"more than {config.rate_limit} requests a minute; try again later", math.ceil(wait))
        self._inside[name] += 1
        self._total += 1

    def leave(self, name: str) -> None:
        self._total -= 1
        self._inside[name] -= 1
        if not self._inside[name]:
            del self._inside[name]


class Crowd:
    """When those who are refused should come again: so many a second as can be refused beside the work."""

    _PER_SECOND = 100
    _LONGEST = 60

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = 0.0
        """When the last one sent away is to come."""

    def wait(self) -> int:
        """Whole seconds, at least one."""
        now = self._clock()
        if self._last > now + self._LONGEST:  # nobody knows when their turn comes, but it is not all at once
            return random.randint(self._LONGEST // 2, self._LONGEST)
        self._last = max(now + 1, self._last) + 1 / self._PER_SECOND
        return int(self._last - now)


class Rates:
    """A bucket of tokens a name: ``per_minute`` of them at most, filled evenly. Full buckets take no memory."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self._size = float(per_minute)
        self._per_second = per_minute / 60
        self._clock = clock
        self._spent: dict[str, tuple[float, float]] = {}

    def take(self, name: str) -> float:
        """0.0 when there was a token, else the seconds until there is one."""
        now = self._clock()
        spent, since = self._spent.get(name, (0.0, now))
        spent = max(0.0, spent - (now - since) * self._per_second)
        wait = max(0.0, spent + 1 - self._size) / self._per_second
        self._spent[name] = (spent + (0 if wait else 1), now)
        if len(self._spent) > 10_000:
            self._forget(now)
        return wait

    def _forget(self, now: float) -> None:
        self._spent = {n: s for n, s in self._spent.items() if s[0] > (now - s[1]) * self._per_second}


def _busy(message: str, seconds: int) -> Refusal:
    headers = {"retry-after": str(max(1, seconds))}
    return Refusal(Failure(429, message, "rate_limit_error", code="overloaded", headers=headers))
