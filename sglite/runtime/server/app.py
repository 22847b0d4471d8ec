"""The REST server: an adapter over any Backend. It holds no model logic."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI

import sglite
from sglite.protocol import Backend
from sglite.runtime.server import (
    chat,
    completions,
    embeddings,
    failures,
    files,
    native,
    page,
    profile,
    sglang,
    status,
    text,
    wire,
)
from sglite.runtime.server.batches import BatchRunner
from sglite.runtime.server.body import BoundedBody
from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.context import Service
from sglite.runtime.server.door import Door
from sglite.runtime.server.front import Front
from sglite.runtime.server.gate import Gate
from sglite.runtime.server.pulse import measure_lag
from sglite.runtime.server.spans import Spans
from sglite.runtime.server.store import Store
from sglite.runtime.server.turnstile import Turnstile


def create_app(
    backend: Backend, config: ServerConfig | None = None, store: Store | None = None, spans: Spans | None = None
) -> FastAPI:
    """An ASGI app that serves ``backend``. The backend and the store stay the caller's to close.

    Files and batches need a ``store``, and a host that runs the app's lifespan, which also closes ``spans``.
    """
    config = config or ServerConfig()
    service = Service(backend, config, spans)
    service.batches = BatchRunner(service, store) if store is not None else None
    app = FastAPI(
        title="sglite",
        version=sglite.__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=partial(_lifespan, service),
    )
    app.state.service = service
    app.state.front = Front(service)
    failures.install(app)
    app.add_middleware(Turnstile, service=service)  # the innermost
    app.add_middleware(BoundedBody, config=config, uploads=files.UPLOADS)
    app.add_middleware(Gate, config=config)
    app.add_middleware(Door, config=config, metrics=service.metrics)
    for part in (native, completions, chat, embeddings, text, files, status, sglang, profile, wire, page):
        app.include_router(part.router, responses=failures.RESPONSES)
    return app


@asynccontextmanager
async def _lifespan(service: Service, app: FastAPI) -> AsyncIterator[None]:
    pulse = asyncio.create_task(measure_lag(service.metrics.lag), name="sglite-pulse")
    if service.batches is not None:
        await service.batches.start()
    try:
        yield
    finally:
        pulse.cancel()
        if service.batches is not None:
            await service.batches.stop()
        if service.spans is not None:
            await asyncio.to_thread(service.spans.close)
