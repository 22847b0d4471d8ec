"""The REST server: an adapter over any Backend. It holds no model logic."""

from __future__ import annotations

from fastapi import FastAPI

import sglite
from sglite.protocol import Backend
from sglite.runtime.server import chat, completions, failures, native, sglang, status, text, wire
from sglite.runtime.server.body import BoundedBody
from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.context import Service
from sglite.runtime.server.door import Door
from sglite.runtime.server.gate import Gate
from sglite.runtime.server.turnstile import Turnstile


def create_app(backend: Backend, config: ServerConfig | None = None) -> FastAPI:
    """An ASGI app that serves ``backend``. The backend stays the caller's to close."""
    config = config or ServerConfig()
    app = FastAPI(title="sglite", version=sglite.__version__, docs_url=None, redoc_url=None)
    service = app.state.service = Service(backend, config)
    failures.install(app)
    app.add_middleware(Turnstile, config=config, service=service)  # the innermost
    app.add_middleware(BoundedBody, config=config)
    app.add_middleware(Gate, config=config)
    app.add_middleware(Door, config=config, metrics=service.metrics)
    for part in (native, completions, chat, text, status, sglang, wire):
        app.include_router(part.router)
    return app
