"""What goes wrong before a request's head is complete."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.runner import running


@pytest.fixture
def address(backend: Any) -> Iterator[tuple[str, int]]:
    with running(backend, ServerConfig(port=0, read_timeout=0.3)) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        yield host, int(port)
        assert httpx.get(f"{url}/health").status_code == 200


def answers(address: tuple[str, int], data: bytes) -> bytes:
    """Everything that comes back until the server closes."""
    with socket.create_connection(address, timeout=10) as connection:
        connection.sendall(data)
        found = b""
        while part := connection.recv(65536):
            found += part
        return found


def body_of(answer: bytes) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"x-request-id: " in head
    return json.loads(body)["error"]


def test_what_is_no_http_gets_the_one_error_body(address: tuple[str, int]) -> None:
    answer = answers(address, b"\x16\x03\x01garbage\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert body_of(answer)["code"] == "bad_request"


def test_a_head_without_end_is_cut_off(address: tuple[str, int]) -> None:
    answer = answers(address, b"GET /health HTTP/1.1\r\nx: " + b"a" * 100_000)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert body_of(answer)["code"] == "headers_too_large"


def test_a_head_that_does_not_come_is_not_waited_for(address: tuple[str, int]) -> None:
    answer = answers(address, b"GET /health HTTP/1.1\r\nx: ")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert body_of(answer)["code"] == "request_timeout"


def test_a_silent_connection_is_closed_silently(address: tuple[str, int]) -> None:
    assert answers(address, b"") == b""


def test_a_request_behind_a_request_is_answered(address: tuple[str, int]) -> None:
    one = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    assert answers(address, one + one + last).count(b"HTTP/1.1 200 ") == 3


def test_rubbish_behind_a_request_ends_the_connection_after_its_answer(address: tuple[str, int]) -> None:
    answer = answers(address, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n\x00\x01\x02rubbish\r\n\r\n")
    assert answer.count(b"HTTP/1.1 ") <= 2
    assert answer.startswith(b"HTTP/1.1 ")


POST = b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"


def test_a_request_that_is_refused_early_leaves_its_connection(backend: Any) -> None:
    """Nothing of its body is taken for a request, and what comes behind it is answered."""
    backend.gate = asyncio.Event()  # the first one stays inside
    body = b'{"text": "GET / HTTP/1.1", "sampling_params": {"max_new_tokens": 2}}'
    post = POST + b"x-request-id: mine\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    last = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    with running(backend, ServerConfig(port=0, max_concurrency=1)) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=10) as holder:
            holder.sendall(post)
            while not backend.running:
                assert httpx.get(f"{url}/health").status_code == 200
            found = answers((host, int(port)), post + post + last)
    assert re.findall(rb"HTTP/1.1 (\d+)", found) == [b"429", b"429", b"200"]
    assert found.count(b"x-request-id: mine\r\n") == 2 and b"retry-after: 1\r\n" in found
    assert found.count(b'"code": "overloaded"') == 2


@pytest.mark.parametrize("length", [b"content-length: 5000\r\n", b"transfer-encoding: chunked\r\n"])
def test_a_body_too_large_to_skip_ends_the_connection(backend: Any, length: bytes) -> None:
    backend.gate = asyncio.Event()
    body = b'{"text": "a", "sampling_params": {"max_new_tokens": 2}}'
    with running(backend, ServerConfig(port=0, max_concurrency=1, max_body=100)) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=10) as holder:
            holder.sendall(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
            while not backend.running:
                assert httpx.get(f"{url}/health").status_code == 200
            found = answers((host, int(port)), POST + length + b"\r\n")
    assert found.startswith(b"HTTP/1.1 429 ") and b"connection: close" in found


def test_many_requests_behind_a_slow_one(backend: Any) -> None:
    backend.gate = asyncio.Event()
    body = b'{"text": "a", "sampling_params": {"max_new_tokens": 2}}'
    health = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
    with running(backend, ServerConfig(port=0)) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
            connection.sendall((health + b"\r\n") * 3000 + health + b"connection: close\r\n\r\n")
            while not backend.running:
                assert httpx.get(f"{url}/health").status_code == 200
            backend.open()
            found = b""
            while part := connection.recv(1 << 20):
                found += part
    assert found.count(b"HTTP/1.1 200 OK") == 3002
    assert found.find(b'"output_ids"') < found.find(b'{"status":"ok"}')


def test_the_rest_of_a_refused_body_is_not_waited_for(backend: Any) -> None:
    backend.gate = asyncio.Event()
    body = b'{"text": "a", "sampling_params": {"max_new_tokens": 2}}'
    with running(backend, ServerConfig(port=0, max_concurrency=1, read_timeout=0.3)) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=20) as holder:
            holder.sendall(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
            while not backend.running:
                assert httpx.get(f"{url}/health").status_code == 200
            found = answers((host, int(port)), POST + b"content-length: 500\r\n\r\n{")
            assert found.startswith(b"HTTP/1.1 429 ")
            waits = POST + b"expect: 100-continue\r\ncontent-length: 500\r\n\r\n"
            assert b"connection: close" in answers((host, int(port)), waits)


def test_connections_beyond_the_limit_are_told_so(backend: Any) -> None:
    with running(backend, ServerConfig(port=0, max_connections=3)) as url, ExitStack() as stack:
        host, _, port = url.removeprefix("http://").partition(":")
        for _ in range(3):
            stack.enter_context(socket.create_connection((host, int(port))))
        found = answers((host, int(port)), b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        assert found.startswith(b"HTTP/1.1 503 ") and b"connection: close" in found and b"retry-after: 5" in found
        assert body_of(found)["code"] == "unavailable"
        assert answers((host, int(port)), b"") == b"", "one that asks nothing is closed soon"
