"""An sglite server as a Backend: the same requests and chunks, over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import httpx

from sglite.codec import decode, encode
from sglite.lang.backends.client import Client
from sglite.protocol import Chunk, GenerateRequest, ModelInfo


class RuntimeEndpoint:
    """A server started with ``sglite serve``.

    ``timeout`` is the longest silence in seconds before a request counts as failed. Raises UnavailableError where no
    server answers, otherwise what the server raised: its refusals arrive with their types.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        timeout: float = 600.0,
        retries: int = 2,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = Client(base_url, headers, timeout=timeout, retries=retries, transport=transport)
        self._info: ModelInfo | None = None

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """See ``protocol.Backend.generate``. Closing the iterator closes the connection, which aborts the request."""
        async with aclosing(self._client.events("/v1/sglite/generate", encode(request))) as events:
            async for event in events:
                yield decode(Chunk, event)

    async def info(self) -> ModelInfo:
        if self._info is None:
            self._info = decode(ModelInfo, await self._client.get("/v1/sglite/info"))
        return self._info

    async def server_info(self) -> dict[str, Any]:
        info: dict[str, Any] = await self._client.get("/server_info")
        return info

    async def flush_cache(self) -> None:
        await self._client.post("/flush_cache")

    async def end_program(self, program: str, branch: str = "", *, namespace: str = "") -> None:
        """See ``protocol.KeepsPrograms``. Once this endpoint is closed nothing is sent."""
        body = {"program": program, "branch": branch, "namespace": namespace}
        await self._client.tell("/v1/sglite/end_program", body)

    async def aclose(self) -> None:
        await self._client.aclose()
