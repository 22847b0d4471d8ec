"""What goes wrong before a request's head is complete."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.connection import _write_at_once
from sglite.runtime.server.runner import running

Address = tuple[str, int]
POST = b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
LAST = b"connection: close\r\n\r\n"
BODY = b'{"text": "GET / HTTP/1.1", "sampling_params": {"max_new_tokens": 2}}'


def whole(body: bytes) -> bytes:
    """The end of a head, and the body that belongs to it."""
    return b"content-length: %d\r\n\r\n" % len(body) + body


@contextmanager
def serving(backend: Any, **options: Any) -> Iterator[Address]:
    with running(backend, ServerConfig(port=0, **options)) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        yield host, int(port)
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.fixture
def address(backend: Any) -> Iterator[Address]:
    with serving(backend, read_timeout=0.3) as found:
        yield found


@contextmanager
def full(backend: Any, **options: Any) -> Iterator[Address]:
    """A server with one seat, which is taken."""
    backend.gate = asyncio.Event()
    with serving(backend, max_concurrency=1, **options) as address, socket.create_connection(address) as holder:
        holder.sendall(POST + whole(BODY))
        inside(backend, address)
        yield address


def inside(backend: Any, address: Address) -> None:
    while not backend.running:
        assert answers(address, HEALTH + LAST).startswith(b"HTTP/1.1 200 ")


def answers(address: Address, data: bytes) -> bytes:
    """Everything that comes back until the server closes."""
    with socket.create_connection(address, timeout=20) as connection:
        connection.sendall(data)
        return rest(connection)


def rest(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(1 << 20), b""))


def body_of(answer: bytes) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"x-request-id: " in head
    return json.loads(body)["error"]


def test_what_is_no_http_gets_the_one_error_body(address: Address) -> None:
    answer = answers(address, b"\x16\x03\x01garbage\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert body_of(answer)["code"] == "bad_request"


def test_a_head_without_end_is_cut_off(address: Address) -> None:
    answer = answers(address, b"GET /health HTTP/1.1\r\nx: " + b"a" * 100_000)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert body_of(answer)["code"] == "headers_too_large"


def test_a_head_that_does_not_come_is_not_waited_for(address: Address) -> None:
    answer = answers(address, b"GET /health HTTP/1.1\r\nx: ")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert body_of(answer)["code"] == "request_timeout"


def test_a_silent_connection_is_closed_silently(address: Address) -> None:
    assert answers(address, b"") == b""


def test_a_request_behind_a_request_is_answered(address: Address) -> None:
    found = answers(address, HEALTH + b"\r\n" + HEALTH + b"\r\n" + HEALTH + LAST)
    assert found.count(b"HTTP/1.1 200 ") == 3


def test_rubbish_behind_a_request_ends_the_connection_after_its_answer(address: Address) -> None:
    answer = answers(address, HEALTH + b"\r\n\x00\x01\x02rubbish\r\n\r\n")
    assert answer.count(b"HTTP/1.1 ") <= 2
    assert answer.startswith(b"HTTP/1.1 ")


def test_a_request_that_is_refused_early_leaves_its_connection(backend: Any) -> None:
    """Nothing of its body is taken for a request, and what comes behind it is answered."""
    post = POST + b"x-request-id: mine\r\n" + whole(BODY)
    with full(backend) as address:
        found = answers(address, post + post + HEALTH + LAST)
    assert re.findall(rb"HTTP/1.1 (\d+)", found) == [b"429", b"429", b"200"]
    assert found.count(b"x-request-id: mine\r\n") == 2 and b"retry-after: 1\r\n" in found
    assert found.count(b'"code": "overloaded"') == 2


@pytest.mark.parametrize("length", [b"content-length: 5000\r\n", b"transfer-encoding: chunked\r\n"])
def test_a_body_too_large_to_skip_ends_the_connection(backend: Any, length: bytes) -> None:
    with full(backend, max_body=100) as address:
        found = answers(address, POST + length + b"\r\n")
    assert found.startswith(b"HTTP/1.1 429 ") and b"connection: close" in found


def test_many_requests_behind_a_slow_one(backend: Any) -> None:
    backend.gate = asyncio.Event()
    with serving(backend) as address, socket.create_connection(address, timeout=20) as connection:
        connection.sendall(POST + whole(BODY) + (HEALTH + b"\r\n") * 3000 + HEALTH + LAST)
        inside(backend, address)
        backend.open()
        found = rest(connection)
    assert found.count(b"HTTP/1.1 200 OK") == 3002
    assert found.find(b'"output_ids"') < found.find(b'{"status":"ok"}')


def test_the_rest_of_a_refused_body_is_not_waited_for(backend: Any) -> None:
    with full(backend, read_timeout=0.3) as address:
        found = answers(address, POST + b"content-length: 500\r\n\r\n{")
        assert found.startswith(b"HTTP/1.1 429 ")
        waits = POST + b"expect: 100-continue\r\ncontent-length: 500\r\n\r\n"
        assert b"connection: close" in answers(address, waits)


@pytest.mark.parametrize("offered", [b"h2c", b"websocket"])
def test_an_offer_to_speak_otherwise_is_passed_over(address: Address, offered: bytes) -> None:
    """Java's client makes it with every request; the body counts all the same."""
    upgrade = b"connection: upgrade, close\r\nUpgrade: " + offered + b"\r\n"
    found = answers(address, POST + upgrade + whole(BODY))
    assert found.startswith(b"HTTP/1.1 200 ") and b'"output_ids"' in found


def test_an_older_client_gets_a_stream_without_parts(address: Address) -> None:
    body = BODY.replace(b"}}", b'}, "stream": true}')
    head, _, events = answers(address, POST.replace(b"1.1", b"1.0") + whole(body)).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and b"content-length: %d" % len(events) in head
    assert events.startswith(b"data: {") and events.endswith(b"data: [DONE]\n\n")


def test_an_older_client_is_refused_as_anybody(address: Address) -> None:
    body = b'{"text": "a", "stream": true, "banana": 1}'
    found = answers(address, POST.replace(b"1.1", b"1.0") + whole(body))
    assert found.startswith(b"HTTP/1.1 400 ") and body_of(found)["param"] == "banana"


def test_an_endless_address_is_an_endless_head(address: Address) -> None:
    found = answers(address, HEALTH.replace(b"/health", b"/" + b"a" * 20_000) + LAST)
    assert found.startswith(b"HTTP/1.1 431 ") and body_of(found)["code"] == "headers_too_large"


def test_connections_beyond_the_limit_are_told_so(backend: Any) -> None:
    with serving(backend, max_connections=3) as address, ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(socket.create_connection(address))
        found = answers(address, HEALTH + b"\r\n")
        assert found.startswith(b"HTTP/1.1 503 ") and b"connection: close" in found and b"retry-after: 5" in found
        assert body_of(found)["code"] == "unavailable"
        assert answers(address, b"") == b"", "one that asks nothing is closed soon"
        stack.close()
        while not answers(address, HEALTH + LAST).startswith(b"HTTP/1.1 200 "):
            pass


def test_an_empty_part_does_not_end_a_body() -> None:
    """In chunked encoding a part of no bytes is the end."""
    written: list[bytes] = []
    cycle: Any = SimpleNamespace(
        flow=SimpleNamespace(write_paused=False),
        disconnected=False,
        chunked_encoding=True,
        transport=SimpleNamespace(write=written.append),
    )
    assert _write_at_once(cycle, b"some") and not _write_at_once(cycle, b"")
    assert written == [b"4\r\nsome\r\n"]
