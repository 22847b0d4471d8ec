"""The outermost layer: an id for every request, bounds on headers, a log line, and the last safety net."""

from __future__ import annotations

import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.failures import describe, log, refuse
from sglite.runtime.server.logs import request_id, request_id_of, traced_headers
from sglite.runtime.server.metrics import Metrics


class Door:
    """ASGI middleware: one answer for everything that fails outside a route, ``x-request-id`` on every answer."""

    def __init__(self, app: ASGIApp, config: ServerConfig, metrics: Metrics) -> None:
        self._app = app
        self._config = config
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope = _plain(scope)
        answer = _Answer(send, request_id_of(headers.get("x-request-id", "")))
        request_id.set(answer.request_id)
        if "traceparent" in headers:
            traced_headers.set({name: headers[name] for name in ("traceparent", "tracestate") if name in headers})
        scope.setdefault("state", {})["request_id"] = answer.request_id
        try:
            self._check_headers(scope)
            await self._app(scope, receive, answer.send)
        except Exception as error:
            failure = describe(error)
            if answer.status is None:
                await failure.response()(scope, receive, answer.send)
        finally:
            route = getattr(scope.get("route"), "path", "other")  # the pattern, not what the client wrote
            self._metrics.http.labels(route, str(answer.status or 0)).inc()
            log.info(
                "%s %s",
                scope["method"],
                scope["path"],
                extra={"route": route, "status": answer.status, "ms": round(answer.ms, 1)},
            )

    def _check_headers(self, scope: Scope) -> None:
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        size += len(scope.get("raw_path") or b"") + len(scope["query_string"])
        if size > self._config.max_headers:
            message = f"the request's address and headers exceed {self._config.max_headers} bytes"
            raise refuse(431, message, "headers_too_large")


def _plain(scope: Scope) -> Scope:
    """HEAD asks what GET would answer, whose body the connection keeps to itself; a slash at the end says nothing."""
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    return {**scope, "method": method, "path": scope["path"].rstrip("/") or "/"}


class _Answer:
    """The response as it leaves: adds the id, remembers the status and the time."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._started = time.perf_counter()
        self.request_id = request_id
        self.status: int | None = None

    @property
    def ms(self) -> float:
        return (time.perf_counter() - self._started) * 1000

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self.request_id
        await self._send(message)
