"""What the routes share: the service behind them, and who is calling."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Protocol, runtime_checkable

from fastapi import Depends, Request

from sglite.errors import InvalidRequestError, NotFoundError
from sglite.protocol import Backend, ModelInfo
from sglite.runtime.pace import Pace
from sglite.runtime.server.answers import AnswerMemo
from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.logs import traced_headers
from sglite.runtime.server.metrics import MeteredBackend, Metrics
from sglite.runtime.server.seats import Seats
from sglite.runtime.server.spans import Spans
from sglite.runtime.server.traces import CallRecord, Traces

if TYPE_CHECKING:
    from sglite.runtime.server.batches import BatchRunner

_STARTS = 1
"""Requests that begin in one turn of the event loop."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request: ``namespace`` separates one key's caches and request ids from another's."""

    namespace: str = ""
    is_admin: bool = False


@runtime_checkable
class Watched(Protocol):
    """A backend that can be there and yet not work: its process may be gone, or hang. Both raise UnavailableError."""

    def check_loaded(self) -> None:
        """Whoever asks now would be refused: nothing is there that could answer."""
        ...

    def check_ready(self) -> None:
        """And it answers."""
        ...


class Service:
    """One per app: the backend, the options, and the requests in flight."""

    def __init__(self, backend: Backend, config: ServerConfig, spans: Spans | None = None) -> None:
        self.metrics = Metrics()
        self.traces = Traces()
        self.spans = spans
        self.engine = backend
        """The backend as it was given, for what only some backends can."""
        self.backend: Backend = MeteredBackend(backend, self.metrics, [self._ended])
        self.config = config
        self.started = time.time()
        self.seats = Seats(config)
        self.starts = Pace(_STARTS)
        """Requests on their way in: each costs a millisecond before it waits for the model."""
        self.answers = AnswerMemo()
        self.batches: BatchRunner | None = None
        """The BatchRunner, where there are files and batches."""
        self.in_flight: dict[tuple[str, str], Flight] = {}
        self._model: ModelInfo | None = None

    @property
    def draining(self) -> bool:
        return self.seats.draining

    async def model(self) -> ModelInfo:
        if self._model is None:
            self._model = await self.backend.info()
            self.seats.suit(self._model)
        return self._model

    def _ended(self, record: CallRecord) -> None:
        self.traces.add(record)
        if self.spans is not None:
            self.spans.add(record, traced_headers.get())


@dataclass(eq=False, slots=True)
class Flight:
    """A request under way, by the id its client knows."""

    task: asyncio.Task[Any]
    aborted: bool = field(default=False)

    def abort(self) -> None:
        self.aborted = True
        self.task.cancel()


class Context:
    """One request's view of the service. ``priority`` is added to what the request asks for."""

    def __init__(self, service: Service, caller: Caller, *, priority: int = 0) -> None:
        self.service = service
        self.caller = caller
        self.priority = priority
        self.backend = service.backend
        self.config = service.config

    async def model(self) -> ModelInfo:
        return await self.service.model()

    async def served_name(self) -> str:
        return self.config.served_name or (await self.model()).name

    async def check_model(self, name: str | None) -> str:
        """The served model's name, if that is what the client asked for. Raises NotFoundError."""
        served = await self.served_name()
        if name is not None and name != served:
            raise NotFoundError(f"the model {name!r:.80} does not exist; this server has {served!r}", param="model")
        return served

    def namespace(self, salt: str | None = None) -> str:
        """Where a request's prefixes are cached: the caller's own part, narrowed by what the client says."""
        return f"{self.caller.namespace}/{salt}" if salt else self.caller.namespace

    @asynccontextmanager
    async def in_flight(self, ids: Iterable[str]) -> AsyncIterator[None]:
        """Hold request ids that a client chose, so that none is used twice at once, and each can be aborted."""
        task = asyncio.current_task()
        assert task is not None, "a request is served by a task"
        flight, held = Flight(task), list[tuple[str, str]]()
        try:
            for rid in ids:
                key = (self.caller.namespace, rid)
                if key in self.service.in_flight:
                    raise InvalidRequestError(f"the request id {rid!r:.80} is already in use", param="rid")
                self.service.in_flight[key] = flight
                held.append(key)
            yield
        finally:
            for key in held:
                del self.service.in_flight[key]

    def abort(self, rid: str) -> None:
        """End one of the caller's own requests. Raises NotFoundError, for others' requests too."""
        flight = self.service.in_flight.get((self.caller.namespace, rid))
        if flight is None:
            raise NotFoundError(f"no request {rid!r:.80} is under way", param="rid")
        flight.abort()

    def abort_all(self) -> int:
        """End all of the caller's own requests that have ids of their client's; how many there were."""
        flights = {f for (namespace, _), f in self.service.in_flight.items() if namespace == self.caller.namespace}
        for flight in flights:
            flight.abort()
        return len(flights)


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


async def get_context(request: Request) -> Context:  # async, or FastAPI would ask a thread for it
    return Context(request.app.state.service, request.scope["state"].get("caller", Caller()))


Ctx = Annotated[Context, Depends(get_context)]
