"""From the backend's chunks to the socket: many requests as one stream, and answers that stop when the client goes.

An answer (a JSON body or a stream of events) does its work while it listens for a disconnect. When the client is
gone the work is cancelled, which closes the backend's iterators, which aborts the requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from sglite.errors import AbortedError, UnavailableError
from sglite.protocol import Backend, Chunk, GenerateRequest
from sglite.runtime.server.failures import describe, log

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""For the document of the API: a route whose answer may be a stream."""
_BUFFERED = 64
"""Items of several sources that may wait for a slow reader before the sources are held up."""


def event(data: Any) -> bytes:
    """One server-sent event. ASCII only: some clients split lines at characters that JSON leaves as they are."""
    return b"data: " + to_json(data, ensure_ascii=True) + b"\n\n"


# ----------------------------------------------------------------------------------------------------------- chunks


def generate_all(backend: Backend, requests: Sequence[GenerateRequest]) -> AsyncGenerator[tuple[int, Chunk]]:
    """The chunks of all requests as they come, each with its request's position. The first failure ends them all."""
    return merged([backend.generate(request) for request in requests])


def together(sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """The items of all sources as they come. A single one stays as it is: every token passes every layer."""
    return sources[0] if len(sources) == 1 else _without_positions(merged(sources))


async def _without_positions(numbered: AsyncGenerator[tuple[int, T]]) -> AsyncGenerator[T]:
    async with aclosing(numbered) as entries:
        async for _, item in entries:
            yield item


async def merged(sources: Sequence[AsyncIterator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """The items of all sources as they come, each with its source's position. The first failure closes them all."""
    if len(sources) == 1:
        async with closing(sources[0]) as items:
            async for item in items:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | None] = asyncio.Queue(_BUFFERED)
    pumps = [asyncio.create_task(_pump(i, source, queue)) for i, source in enumerate(sources)]
    watch = asyncio.create_task(_announce_end(pumps, queue))
    try:
        while (entry := await queue.get()) is not None:
            yield entry
        for pump in pumps:
            pump.result()
    finally:
        await _cancelled([watch, *pumps])


async def _pump(index: int, source: AsyncIterator[T], queue: asyncio.Queue[tuple[int, T] | None]) -> None:
    async with closing(source) as items:
        async for item in items:
            await queue.put((index, item))


async def _announce_end(pumps: list[asyncio.Task[None]], queue: asyncio.Queue[tuple[int, T] | None]) -> None:
    await asyncio.wait(pumps, return_when=asyncio.FIRST_EXCEPTION)
    await queue.put(None)


@asynccontextmanager
async def closing(items: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Close an iterator that can be closed: that is how a request is aborted."""
    try:
        yield items
    finally:
        close = getattr(items, "aclose", None)
        if close is not None:
            await close()


# ---------------------------------------------------------------------------------------------------------- answers


class Answer(Response):
    """A JSON body that is still to be computed."""

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.create_task(self._work)
        try:
            if await finished_before_disconnect(task, receive):
                await JSONResponse(_outcome(task))(scope, receive, send)
        except asyncio.CancelledError:  # the server ends, and gives no more time
            await describe(_ENDING).response()(scope, receive, send)
            raise


WriteAtOnce = Callable[[bytes], bool]
WRITE_AT_ONCE = "sglite.write_at_once"
"""An extension of the ASGI scope by our own connections: write a part of a body that has begun, past all layers. False:
it was not written, for the reader is slow or gone, and ``send`` has to."""


def _never(data: bytes) -> bool:
    return False


def _whole(send: Send) -> Send:
    """HTTP/1.0 has no parts: the answer leaves when it is complete, with its length."""
    start, body = dict[str, Any](), bytearray()

    async def gathering(message: Message) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
            return
        body.extend(message["body"])
        if not message.get("more_body"):
            headers = [pair for pair in start["headers"] if pair[0] != b"content-length"]
            await send({**start, "headers": [*headers, (b"content-length", b"%d" % len(body))]})
            await send({**message, "body": bytes(body)})

    return gathering


class EventStream(Response):
    """Server-sent events that are still to be computed.

    The status is sent with the first event, so what is refused before it has a status of its own; what fails later
    ends the stream with an error event and without ``[DONE]``. ``last`` gives the events before that, if there are any.
    """

    def __init__(self, events: AsyncGenerator[bytes], write_timeout: float, last: Callable[[], bytes] = bytes) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self._last = last
        self._write_timeout = write_timeout
        self._started = False
        self._writing: float | None = None
        """Since when the write under way waits for its reader."""
        self._too_slow = False
        self._since_turn = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        at_once: WriteAtOnce = scope.get("extensions", {}).get(WRITE_AT_ONCE, _never)
        if scope.get("http_version") == "1.0":
            send, at_once = _whole(send), _never
        task = asyncio.create_task(self._send_events(send, at_once))
        watch = asyncio.create_task(self._watch(task))
        try:
            if await finished_before_disconnect(task, receive) and not self._too_slow:
                _outcome(task)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:  # the server ends, and gives no more time
            await self._fail(_ENDING, scope, receive, send)
            raise
        except Exception as error:
            if not self._started:
                raise
            await self._fail(error, scope, receive, send)
        finally:
            watch.cancel()
        if self._too_slow:
            log.warning("%s: aborted, the client did not read for %g s", scope["path"], self._write_timeout)

    async def _watch(self, task: asyncio.Task[None]) -> None:
        """End the stream of a client that does not read. One look now and then is cheaper than a timeout a write."""
        clock = asyncio.get_running_loop().time
        while self._writing is None or clock() - self._writing < self._write_timeout:
            await asyncio.sleep(self._write_timeout / 4)
        self._too_slow = True
        task.cancel()

    async def _send_events(self, send: Send, at_once: WriteAtOnce) -> None:
        async with aclosing(self._events) as events:
            async for data in events:
                if not self._started:
                    await self._start(send)
                if not at_once(data):
                    await self._write(send, data)
                self._since_turn += len(data)
                if self._since_turn > _TURN_BYTES:  # what waits and fits the socket's buffer would never let go
                    self._since_turn = 0
                    await asyncio.sleep(0)
        if not self._started:
            await self._start(send)
        await self._write(send, self._last() + DONE)

    async def _start(self, send: Send) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    async def _fail(self, error: BaseException, scope: Scope, receive: Receive, send: Send) -> None:
        failure = describe(error)
        if not self._started:
            await failure.response()(scope, receive, send)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self._write_timeout):
                await self._write(send, event(failure.body))
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, data: bytes) -> None:
        self._writing = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._writing = None


_TURN_BYTES = 16_384
"""A stream lets the others have the event loop after that much."""

_ENDING = UnavailableError("the server is shutting down")


def _outcome(task: asyncio.Task[T]) -> T:
    """The task's result. Only an abort cancels a task that nobody left."""
    if task.cancelled():
        raise AbortedError("the request was aborted")
    return task.result()


async def finished_before_disconnect(task: asyncio.Task[Any], receive: Receive) -> bool:
    """Wait for ``task``; cancel it and return False when the client leaves first."""
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.done()
    finally:
        await _cancelled([gone, task])


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel what still runs, wait until it has cleaned up, and drop the failures nobody asked for."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
