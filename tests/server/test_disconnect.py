"""A client that leaves: whatever its request was doing, the backend's iterator is closed at once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message

from sglite.runtime.server.app import create_app
from sglite.runtime.server.config import ServerConfig

BODIES = {
    "/generate": {"text": "a"},
    "/v1/completions": {"prompt": ["a", "b"]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "n": 2},
}


class Client:
    """An ASGI client in slow motion: the test decides when it reads and when it leaves."""

    def __init__(self, app: Any, path: str, body: Any) -> None:
        self.sent: asyncio.Queue[Message] = asyncio.Queue()
        self.reading = asyncio.Event()
        self.reading.set()
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"host", b"test")],
        }
        self.task = asyncio.create_task(app(scope, self._incoming.get, self._send))

    async def _send(self, message: Message) -> None:
        await self.reading.wait()
        self.sent.put_nowait(message)

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_leaving_aborts(backend: Any, path: str, stream: bool) -> None:
    async def story() -> None:
        backend.gate = asyncio.Event()
        client = Client(create_app(backend), path, {**BODIES[path], "stream": stream})
        expected = 2 if path == "/v1/completions" else 1
        await until(lambda: backend.running == expected)
        client.leave()
        await client.task
        assert (backend.running, backend.aborted) == (0, expected)

    asyncio.run(story())


def test_leaving_in_mid_stream_aborts(backend: Any) -> None:
    async def story() -> None:
        backend.gate = asyncio.Event()
        client = Client(create_app(backend), "/generate", {"text": "a", "stream": True})
        assert (await client.sent.get())["type"] == "http.response.start"
        assert b'"text":"H"' in (await client.sent.get())["body"]
        client.leave()
        await client.task
        assert (backend.running, backend.aborted) == (0, 1)
        assert client.sent.empty()

    asyncio.run(story())


def test_a_reader_that_stands_still_is_aborted(backend: Any) -> None:
    async def story() -> None:
        client = Client(
            create_app(backend, ServerConfig(write_timeout=0.05)), "/generate", {"text": "a", "stream": True}
        )
        await client.sent.get()
        client.reading.clear()
        await client.task
        assert (backend.running, backend.aborted) == (0, 1)

    asyncio.run(story())


def test_a_request_id_is_free_again_after_an_abort(backend: Any) -> None:
    async def story() -> None:
        backend.gate = asyncio.Event()
        app = create_app(backend)
        first = Client(app, "/generate", {"text": "a", "rid": "x"})
        await until(lambda: backend.running == 1)
        second = Client(app, "/generate", {"text": "a", "rid": "x"})
        await second.task
        assert (await second.sent.get())["status"] == 400
        first.leave()
        await first.task
        backend.gate.set()
        third = Client(app, "/generate", {"text": "a", "rid": "x"})
        await third.task
        assert (await third.sent.get())["status"] == 200

    asyncio.run(story())


def test_a_body_that_does_not_come_is_a_408(backend: Any) -> None:
    async def story() -> None:
        app = create_app(backend, ServerConfig(read_timeout=0.05))
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "method": "POST",
            "path": "/generate",
            "query_string": b"",
            "headers": [],
        }
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        await app(scope, asyncio.Queue().get, send)
        assert sent[0]["status"] == 408

    asyncio.run(story())
