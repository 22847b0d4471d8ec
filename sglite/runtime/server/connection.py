"""One connection: uvicorn's own, with bounds on a request's head in size and time, and our error body for bad HTTP."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from functools import partial
from typing import Any, cast

from starlette.types import Scope
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from sglite.errors import UnavailableError
from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.context import Service
from sglite.runtime.server.failures import Failure, describe, refuse
from sglite.runtime.server.front import Early, Front
from sglite.runtime.server.streams import WRITE_AT_ONCE

_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
_CROWDED = 1.0
"""Seconds that a connection beyond the limit gets to ask, and to hear that there is no room."""


class Connection(HttpToolsProtocol):
    """Before a request's head is complete no middleware knows of it: what goes wrong there is answered here."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        service: Service = self.config.app.state.service  # type: ignore[union-attr]
        self._bounds: ServerConfig = service.config
        self._front: Front = self.config.app.state.front  # type: ignore[union-attr]
        self._starts = service.starts
        self._crowded = False
        """There are too many connections: this one is told so."""
        self._head: int | None = 0
        """Bytes of the head that is under way; None in a body."""
        self._patience: asyncio.TimerHandle | None = None
        self._deaf = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._crowded = len(self.connections) > self._bounds.max_connections
        self._be_patient()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        if self._head is not None:
            data = _without_upgrade(data) if self._head == 0 else data
            self._head += len(data)
        super().data_received(data)
        if self._head is not None and self._head > 2 * self._bounds.max_headers and not self.transport.is_closing():
            message = f"the request's headers exceed {self._bounds.max_headers} bytes"
            self._refuse(refuse(431, message, "headers_too_large").failure)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._be_patient()

    def on_headers_complete(self) -> None:
        self._head = None
        self._stop_waiting()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._head = 0
        if self.cycle.response_complete:  # before its request was
            self._stop_waiting()
            self._keep_alive()

    def send_400_response(self, msg: str) -> None:
        self._refuse(refuse(400, "this is not HTTP/1.1", "bad_request").failure)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if (early := self._early(cast(Scope, cycle.scope))) is None:
            self._starts.soon(lambda: self._begin(cycle, app))
            return
        cycle.response_started = cycle.response_complete = True
        self.transport.write(early.data)
        if early.close or not cycle.keep_alive:
            self._deaf = True
            self.transport.close()
        self._be_patient()  # with the rest of the body, which nobody reads
        if self.pipeline:  # not at once: thousands may wait in it, each in a frame of its own
            self._starts.soon(self.on_response_complete)
        else:
            self.on_response_complete()

    def _early(self, scope: Scope) -> Early | None:
        if self._crowded:
            failure = describe(UnavailableError("too many connections are open; try again later"))
            return self._front.refusal(failure, scope, close=True)
        return self._front.answer(scope)

    def _begin(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if not cycle.disconnected:  # or its client has left already
            cast(Scope, cycle.scope)["extensions"] = {WRITE_AT_ONCE: partial(_write_at_once, cycle)}
            super()._start_asgi_task(cycle, app)

    def _keep_alive(self) -> None:
        if self.timeout_keep_alive_task is None:
            wait = self.timeout_keep_alive
            self.timeout_keep_alive_task = self.loop.call_later(wait, self.timeout_keep_alive_handler)

    def _be_patient(self) -> None:
        if self._patience is None:
            patience = min(_CROWDED, self._bounds.read_timeout) if self._crowded else self._bounds.read_timeout
            self._patience = self.loop.call_later(patience, self._too_slow)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _too_slow(self) -> None:
        if self._head:
            self._refuse(refuse(408, "the request's headers did not arrive in time", "request_timeout").failure)
        else:
            self.transport.close()

    def _refuse(self, failure: Failure) -> None:
        """The connection ends; an answer that is under way ends before it, and what else comes is not listened to."""
        self._deaf = True
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started or not cycle.more_body:
                cycle.keep_alive = False
                return
            cycle.disconnected = True  # whoever reads the body need not wait for the rest
            cycle.message_event.set()
        body = json.dumps(failure.body).encode()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "x-request-id": uuid.uuid4().hex,
            **failure.headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(STATUS_LINE[failure.status] + head.encode() + b"\r\n" + body)
        self.transport.close()


def _without_upgrade(data: bytes) -> bytes:
    """Some clients offer HTTP/2 with every request and go on without it; the parser would drop the request's body."""
    head, end, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"\r\nx-offered:", head) + end + rest if _UPGRADE.search(head) else data


def _write_at_once(cycle: RequestResponseCycle, data: bytes) -> bool:
    """What ``cycle.send`` does with a part of a body, where it would not wait. An empty part would end the body."""
    if not data or cycle.flow.write_paused or cycle.disconnected or not cycle.chunked_encoding:
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
    return True
