"""Answered before anything is read or a task is made: ``/health``, and refusals where there is no room, or no engine.

A burst of requests beyond what fits then costs as little as can be: those inside hardly notice it, and neither does an
engine that is being loaded on the same cores.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from sglite.errors import SgliteError
from sglite.runtime.server.context import Service, Watched
from sglite.runtime.server.failures import Failure, Refusal, describe, log
from sglite.runtime.server.gate import host_name
from sglite.runtime.server.logs import request_id_of
from sglite.runtime.server.turnstile import GENERATION

_HEALTHY = b'{"status":"ok"}'


@dataclass(frozen=True, slots=True)
class Early:
    """An answer as it goes to the socket. ``close``: what else the connection would bring is not listened to."""

    data: bytes
    close: bool


class Front:
    """Looks at a request's head. One per app."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._hosts = frozenset(service.config.allowed_hosts)
        self._watched = service.engine if isinstance(service.engine, Watched) else None
        self._healthy = service.metrics.http.labels("/health", "200")

    def answer(self, scope: Scope) -> Early | None:
        """None: the app is to answer."""
        path, method = scope["path"], scope["method"]
        if (path == "/health" and method == "GET") and self._is_plain(scope["headers"]):
            self._healthy.inc()
            return Early(_written(200, _HEALTHY, _request_id(scope["headers"]), {}), close=False)
        if path in GENERATION and method == "POST" and self._is_plain(scope["headers"]):
            return self._full(scope)
        return None

    def _is_plain(self, headers: list[tuple[bytes, bytes]]) -> bool:
        """Nothing for which the app would refuse it."""
        names = [value.decode("latin-1") for name, value in headers if name == b"host"]
        if self._hosts and (len(names) != 1 or host_name(names[0]) not in self._hosts):
            return False
        return sum(len(name) + len(value) for name, value in headers) <= self._service.config.max_headers

    def _full(self, scope: Scope) -> Early | None:
        try:
            self._service.seats.check(more=self._service.starts.waiting)
            if self._watched is not None:
                self._watched.check_loaded()
        except (SgliteError, Refusal) as error:
            return self.refusal(describe(error), scope)
        return None

    def refusal(self, failure: Failure, scope: Scope, *, close: bool = False) -> Early:
        """The one error body; the connection stays for who sent little, and says how much that is."""
        headers, path = scope["headers"], scope["path"]
        length = header(headers, b"content-length")
        small = length.isdecimal() and int(length[:20]) <= self._service.config.max_body
        closes = close or not small or header(headers, b"expect") != ""  # then the body may never come
        extra = {**failure.headers, **({"connection": "close"} if closes else {})}
        self._service.metrics.http.labels(path if path in GENERATION else "other", str(failure.status)).inc()
        given = _request_id(headers)
        log.info("%s %s", scope["method"], path, extra={"request_id": given, "route": path, "status": failure.status})
        return Early(_written(failure.status, json.dumps(failure.body).encode(), given, extra), closes)


def header(headers: list[tuple[bytes, bytes]], name: bytes) -> str:
    """The first of that name; "" where there is none."""
    return next((value.decode("latin-1") for key, value in headers if key == name), "")


def _request_id(headers: list[tuple[bytes, bytes]]) -> str:
    return request_id_of(header(headers, b"x-request-id"))


def _written(status: int, body: bytes, request_id: str, extra: dict[str, str]) -> bytes:
    headers = {"content-type": "application/json", "content-length": str(len(body)), "x-request-id": request_id}
    lines = "".join(f"{name}: {value}\r\n" for name, value in {**headers, **extra}.items())
    return STATUS_LINE[status] + lines.encode() + b"\r\n" + body
