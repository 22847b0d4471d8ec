"""What goes wrong before a request's head is complete."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
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
