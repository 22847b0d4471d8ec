"""How many may be inside at once, and how often one key may come: work that would only wait is refused at once."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from sglite.runtime.server.context import Caller, Service

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

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._seats = service.seats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in GENERATION:
            await self._app(scope, receive, send)
            return
        name = scope["state"].get("caller", Caller()).namespace
        self._seats.take(name)
        try:
            await self._app(scope, receive, send)
        finally:
            self._seats.leave(name)
