"""Reading a request's body within bounds, before anything else looks at it."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.failures import Refusal, refuse

_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


class BoundedBody:
    """ASGI middleware: the whole body is read here, bounded in size and time, and must be JSON.

    ``uploads`` are paths that take multipart forms instead: these are only counted, for the form goes to disk.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, uploads: frozenset[str] = frozenset()) -> None:
        self._app = app
        self._config = config
        self._uploads = uploads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] in _WITH_BODY:
            upload = scope["path"] in self._uploads
            receive = self._counted(scope, receive) if upload else await self._read(scope, receive)
        await self._app(scope, receive, send)

    async def _read(self, scope: Scope, receive: Receive) -> Receive:
        """What replays the body and then tells of a disconnect."""
        headers, limit = Headers(scope=scope), self._config.max_body
        _check_length(headers, limit)
        if (encoding := headers.get("content-encoding", "identity").strip().lower()) != "identity":
            message = f"a body in the content encoding {encoding!r:.40} is not read; send it as it is"
            raise refuse(415, message, "unsupported_media_type")
        body = await self._whole(receive, limit)
        if body and not _has_type(headers, "application/json"):
            raise refuse(415, "the content type must be application/json", "unsupported_media_type")
        replayed = False

        async def replay() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        return replay

    async def _whole(self, receive: Receive, limit: int) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(self._config.read_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise refuse(400, "the connection ended within the body", "bad_request")
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise _too_large(limit)
                    if not message.get("more_body"):
                        return bytes(body)
        except TimeoutError:
            raise _too_slow() from None

    async def _in_time(self, receive: Receive) -> Message:
        try:
            async with asyncio.timeout(self._config.read_timeout):
                return await receive()
        except TimeoutError:
            raise _too_slow() from None

    def _counted(self, scope: Scope, receive: Receive) -> Receive:
        headers, limit, seen = Headers(scope=scope), self._config.max_upload, 0
        _check_length(headers, limit)
        if not _has_type(headers, "multipart/form-data"):
            raise refuse(415, "the content type must be multipart/form-data", "unsupported_media_type")

        complete = False

        async def counted() -> Message:
            nonlocal seen, complete
            message = await (receive() if complete else self._in_time(receive))
            seen += len(message.get("body", b""))
            complete = not message.get("more_body")
            if seen > limit:
                raise _too_large(limit)
            return message

        return counted


def _check_length(headers: Headers, limit: int) -> None:
    length = headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > limit:
        raise _too_large(limit)


def _has_type(headers: Headers, wanted: str) -> bool:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == wanted or (
        wanted == "application/json" and kind.startswith("application/") and kind.endswith("+json")
    )


def _too_slow() -> Refusal:
    return refuse(408, "the request's body did not arrive in time", "request_timeout")


def _too_large(limit: int) -> Refusal:
    return refuse(413, f"the request's body exceeds {limit} bytes", "body_too_large")
