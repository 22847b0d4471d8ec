"""How many may be inside at once, and how often one key may come: work that would only wait is refused at once."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from sglite.errors import UnavailableError
from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.context import Caller, Service
from sglite.runtime.server.failures import Failure, Refusal

GENERATION = frozenset(
    {
        "/generate",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/sglite/generate",
        "/v1/embeddings",
        "/health_generate",
    }
)


class Turnstile:
    """ASGI middleware for the routes that make the model work: 503 while draining, 429 beyond the limits."""

    def __init__(
        self, app: ASGIApp, config: ServerConfig, service: Service, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._app = app
        self._config = config
        self._service = service
        self._inside: Counter[str] = Counter()
        self._rates = Rates(config.rate_limit, clock) if config.rate_limit else None
        self._crowd = Crowd(clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in GENERATION:
            await self._app(scope, receive, send)
            return
        name = scope["state"].get("caller", Caller()).namespace
        self._check(name)
        self._inside[name] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._inside[name] -= 1
            if not self._inside[name]:
                del self._inside[name]

    def _check(self, name: str) -> None:
        if self._service.draining:
            raise UnavailableError("the server is shutting down")
        config = self._config
        if self._inside.total() >= config.max_concurrency:
            raise _busy(f"{config.max_concurrency} requests are under way; try again later", self._crowd.wait())
        if config.key_concurrency and self._inside[name] >= config.key_concurrency:
            raise _busy(f"{config.key_concurrency} requests of this key are under way; try again later", 1)
        if self._rates is not None and (wait := self._rates.take(name)):
            raise _busy(f"more than {config.rate_limit} requests a minute; try again later", math.ceil(wait))


class Crowd:
    """When those who are refused should come again: so many a second as can be refused beside the work."""

    _PER_SECOND = 200
    _LONGEST = 60

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = 0.0
        """When the last one sent away is to come."""

    def wait(self) -> int:
        """Whole seconds, at least one."""
        now = self._clock()
        self._last = min(now + self._LONGEST, max(now + 1, self._last) + 1 / self._PER_SECOND)
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
