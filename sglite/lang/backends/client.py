"""HTTP for the remote backends: one connection pool per event loop, events as they come, errors of our own types."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any
from weakref import WeakKeyDictionary

import httpx

from sglite.codec import decode_error
from sglite.errors import (
    ConfigError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    RequestError,
    SgliteError,
    UnavailableError,
)

_RETRIED = frozenset({429, 503})
_LONGEST_WAIT = 30.0
_MESSAGE_SECONDS = 2.0


class Client:
    """Requests to one service. ``timeout`` is the longest silence in seconds; ``retries`` are for refusals that a
    server asks to repeat (429 and 503), never for a request that may have begun."""

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str] | None = None,
        *,
        timeout: float = 600.0,
        retries: int = 2,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"a URL must begin with http:// or https://, not {base_url!r:.80}")
        self.base_url = base_url.rstrip("/")
        self._headers = dict(headers or {})
        self._timeout = httpx.Timeout(timeout, connect=10.0, pool=None)
        self._retries = retries
        self.closed = False
        self._messages: set[asyncio.Task[Any]] = set()
        self._transport = transport
        self._pools: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()

    async def get(self, path: str) -> Any:
        async with self._open("GET", path, None) as response:
            return json.loads(await response.aread())

    async def post(self, path: str, body: Any = None) -> Any:
        async with self._open("POST", path, body) as response:
            return json.loads(await response.aread())

    async def events(
        self, path: str, body: Any, *, is_last: Callable[[Any], bool] = lambda value: False
    ) -> AsyncGenerator[Any]:
        """The JSON of each server-sent event up to ``[DONE]`` or one that ``is_last``. Raises what the service
        reports, whenever it does; a stream that just stops is a RequestError."""
        async with self._open("POST", path, body) as response, aclosing(sse_data(response.aiter_bytes())) as stream:
            async for data in stream:
                if data == b"[DONE]":
                    return
                value = json.loads(data)
                if isinstance(value, dict) and value.get("error"):
                    raise service_error(500, value)
                yield value
                if is_last(value):
                    return
        raise RequestError(f"{self.base_url} ended its stream without saying why")

    async def aclose(self) -> None:
        self.closed = True
        here = asyncio.get_running_loop()
        for loop in list(self._pools):
            if loop is here:
                await self._close_pool()
            elif loop.is_running():
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._close_pool(), loop))
        self._pools.clear()

    async def _close_pool(self) -> None:
        """Of the running loop. A connection that a message is just opening would outlive the pool."""
        here = asyncio.get_running_loop()
        if under_way := [task for task in list(self._messages) if task.get_loop() is here]:
            await asyncio.wait(under_way, timeout=_MESSAGE_SECONDS)
        pool = self._pools.pop(here, None)
        if pool is not None:
            await pool.aclose()

    async def tell(self, path: str, body: Mapping[str, Any]) -> None:
        """A message that nothing depends on: not sent any more once this is closed."""
        task = asyncio.current_task()
        assert task is not None, "coroutines run in tasks"
        self._messages.add(task)
        try:
            if not self.closed:
                await self.post(path, body)
        finally:
            self._messages.discard(task)

    @property
    def _pool(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if loop not in self._pools:
            self._pools[loop] = httpx.AsyncClient(
                base_url=self.base_url,
                headers=self._headers,
                timeout=self._timeout,
                transport=self._transport,
                limits=httpx.Limits(max_connections=512, max_keepalive_connections=64),
            )
        return self._pools[loop]

    @asynccontextmanager
    async def _open(self, method: str, path: str, body: Any) -> AsyncIterator[httpx.Response]:
        """A response with status 200; its body is still to be read."""
        try:
            for attempt in range(self._retries + 1):
                async with self._pool.stream(method, path, json=body) as response:
                    if response.status_code == 200:
                        yield response
                        return
                    error = service_error(response.status_code, _json(await response.aread()))
                    if response.status_code not in _RETRIED or attempt == self._retries:
                        raise error
                await asyncio.sleep(_wait(response, attempt))
        except UnicodeEncodeError as error:
            bad = error.object[error.start]
            if not "\ud800" <= bad <= "\udfff":  # a header's
                raise
            raise InvalidRequestError(
                f"the request holds a lone surrogate ({bad!a}), which is no Unicode text", param="prompt"
            ) from error
        except httpx.ConnectError as error:
            raise UnavailableError(f"cannot reach {self.base_url}: {error}; is the server running?") from None
        except httpx.HTTPError as error:
            raise RequestError(f"the connection to {self.base_url} failed: {error or type(error).__name__}") from error


async def sse_data(body: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    """The data of each event. Lines end at line feeds only: JSON may hold other characters that look like line ends."""
    rest = b""
    async for part in body:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def service_error(status: int, body: Any) -> SgliteError:
    """The exception that a service's refusal stands for."""
    detail = body.get("error", body) if isinstance(body, dict) else body
    fields = detail if isinstance(detail, dict) else {"message": str(detail)}
    message = str(fields.get("message") or f"the service answered with status {status}")
    known = decode_error({**fields, "message": message})
    if type(known) is not RequestError:
        return known
    if status in (401, 403):
        return ConfigError(f"the service refused the API key: {message}")
    if status == 404:
        return NotFoundError(message, param=fields.get("param"))
    if status == 429:
        return OverloadedError(message)
    if status == 503:
        return UnavailableError(message)
    return InvalidRequestError(message, param=fields.get("param")) if 400 <= status < 500 else known


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")[:500]


def _wait(response: httpx.Response, attempt: int) -> float:
    """Seconds: what the service asks for, or half a second that doubles."""
    asked = response.headers.get("retry-after", "")
    return min(float(asked) if asked.replace(".", "", 1).isdigit() else 0.5 * 2**attempt, _LONGEST_WAIT)
