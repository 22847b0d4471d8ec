"""What the routes share: the backend, the options, the model's description, and the requests in flight."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, Request

from sglite.errors import InvalidRequestError, NotFoundError
from sglite.protocol import Backend, ModelInfo
from sglite.runtime.server.config import ServerConfig


class Context:
    """One per app. ``model()`` asks the backend once."""

    def __init__(self, backend: Backend, config: ServerConfig) -> None:
        self.backend = backend
        self.config = config
        self.started = time.time()
        self._model: ModelInfo | None = None
        self._in_flight: set[tuple[str, str]] = set()

    async def model(self) -> ModelInfo:
        if self._model is None:
            self._model = await self.backend.info()
        return self._model

    async def served_name(self) -> str:
        return self.config.served_name or (await self.model()).name

    async def check_model(self, name: str | None) -> str:
        """The served model's name, if that is what the client asked for. Raises NotFoundError."""
        served = await self.served_name()
        if name is not None and name != served:
            raise NotFoundError(f"the model {name!r:.80} does not exist; this server has {served!r}", param="model")
        return served

    @asynccontextmanager
    async def in_flight(self, namespace: str, ids: Iterable[str]) -> AsyncIterator[None]:
        """Hold request ids that a client chose, so that none is used twice at once."""
        held: set[tuple[str, str]] = set()
        try:
            for rid in ids:
                if (namespace, rid) in self._in_flight:
                    raise InvalidRequestError(f"the request id {rid!r:.80} is already in use", param="rid")
                self._in_flight.add((namespace, rid))
                held.add((namespace, rid))
            yield
        finally:
            self._in_flight -= held


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def get_context(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


Ctx = Annotated[Context, Depends(get_context)]
