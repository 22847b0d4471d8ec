"""What every request passes before a route sees it: an id, bounds on headers and body, and a last safety net."""

from __future__ import annotations

import asyncio
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.failures import Failure, Refusal, describe, log

_ID = re.compile(r"[A-Za-z0-9_.\-]{1,64}\Z")
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


class Door:
    """ASGI middleware: one answer for everything that fails outside a route, ``x-request-id`` on every answer."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send, _request_id(Headers(scope=scope)))
        scope.setdefault("state", {})["request_id"] = answer.request_id
        try:
            self._check_headers(scope)
            await self._app(scope, await self._bounded(scope, receive), answer.send)
        except Exception as error:
            failure = describe(error)
            if answer.status is None:
                await failure.response()(scope, receive, answer.send)
        finally:
            log.info("%s %s %s %s %.1f ms", scope["method"], scope["path"], answer.status, answer.request_id, answer.ms)

    def _check_headers(self, scope: Scope) -> None:
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if size > self._config.max_headers:
            raise _refuse(431, f"the request's headers exceed {self._config.max_headers} bytes", "headers_too_large")

    async def _bounded(self, scope: Scope, receive: Receive) -> Receive:
        """Read the whole body within its bounds; what is returned replays it and then tells of a disconnect."""
        if scope["method"] not in _WITH_BODY:
            return receive
        body = await self._read(scope, receive)
        if body and not _is_json(Headers(scope=scope)):
            raise _refuse(415, "the content type must be application/json", "unsupported_media_type")
        replayed = False

        async def replay() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        return replay

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        limit = self._config.max_body
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length) > limit:
            raise _too_large(limit)
        body = bytearray()
        try:
            async with asyncio.timeout(self._config.read_timeout):
                while True:
                    message = await receive()
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise _too_large(limit)
                    if not message.get("more_body"):
                        return bytes(body)
        except TimeoutError:
            raise _refuse(408, "the request's body did not arrive in time", "request_timeout") from None


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


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _ID.match(given) else uuid.uuid4().hex


def _is_json(headers: Headers) -> bool:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _refuse(status: int, message: str, code: str) -> Refusal:
    return Refusal(Failure(status, message, code=code, headers={"connection": "close"}))


def _too_large(limit: int) -> Refusal:
    return _refuse(413, f"the request's body exceeds {limit} bytes", "body_too_large")
