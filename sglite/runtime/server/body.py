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

    ``uploads`` are paths that take multipart forms instead, up to ``config.max_upload`` bytes.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, uploads: frozenset[str] = frozenset()) -> None:
        self._app = app
        self._config = config
        self._uploads = uploads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] in _WITH_BODY:
            receive = await self._bounded(scope, receive)
        await self._app(scope, receive, send)

    async def _bounded(self, scope: Scope, receive: Receive) -> Receive:
        """What replays the body and then tells of a disconnect."""
        upload = scope["path"] in self._uploads
        body = await self._read(scope, receive, self._config.max_upload if upload else self._config.max_body)
        wanted = "multipart/form-data" if upload else "application/json"
        if body and not _has_type(Headers(scope=scope), wanted):
            raise refuse(415, f"the content type must be {wanted}", "unsupported_media_type")
        replayed = False

        async def replay() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        return replay

    async def _read(self, scope: Scope, receive: Receive, limit: int) -> bytes:
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > limit:
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
            raise refuse(408, "the request's body did not arrive in time", "request_timeout") from None


def _has_type(headers: Headers, wanted: str) -> bool:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == wanted or (
        wanted == "application/json" and kind.startswith("application/") and kind.endswith("+json")
    )


def _too_large(limit: int) -> Refusal:
    return refuse(413, f"the request's body exceeds {limit} bytes", "body_too_large")
