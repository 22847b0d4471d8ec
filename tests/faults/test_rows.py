"""Rows of the list of faults that need a real socket, a real engine behind it, or neighbours that must not notice.

Every case ends with the bench's checks: the canary answers as before, nobody runs or waits, every page is accounted
for, and files, threads and children are back. The rows that need none of this are elsewhere: docs/reliability.md has
the list with a test beside each row.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import pytest
from bench import Bench, Footprint, read_all, until

from sglite.runtime.server.config import ServerConfig

LONG = {"text": "neighbour", "sampling_params": {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True}}
JSON = "content-type: application/json\r\n"


def http_post(body: bytes, headers: str = JSON, path: str = "/generate") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{headers}content-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def stream_of(body: dict[str, Any]) -> bytes:
    return http_post(json.dumps({**body, "stream": True}).encode())


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/") else 0


# -------------------------------------------------------------------------------------------------- rows 6, 7, 9


@pytest.mark.parametrize("body", [{"n": 10**9}, {"best_of": 10**6}, {"logprobs": 10**6}, {"n": 0}])
def test_row_6_absurd_numbers_are_refused_at_once(bench: Bench, body: dict[str, Any]) -> None:
    with httpx.Client(base_url=bench.url) as client:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            assert client.post("/v1/completions", json={"prompt": "a", **body}).status_code == 400
            times.append(time.perf_counter() - began)
    assert min(times) < 0.02


def test_row_7_a_neighbours_tokens_are_unchanged_by_a_refused_bias(bench: Bench) -> None:
    async def story() -> str:
        async with bench.clients() as client:
            neighbour = asyncio.create_task(client.post("/generate", json=LONG))
            for bias in ({"259": 5}, {"-1": 5}, {"abc": 5}):
                bad = {"prompt": "a", "logit_bias": bias}
                assert (await client.post("/v1/completions", json=bad)).status_code == 400
            good = {"prompt": "a", "logit_bias": {"97": 100}, "max_tokens": 5, "temperature": 0}
            assert (await client.post("/v1/completions", json=good)).json()["choices"][0]["text"] == "aaaaa"
            return (await neighbour).json()["text"]

    alone = bench.ask(LONG)
    assert asyncio.run(story()) == alone


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", '{"text": "\\ud800"}'),
        ("/generate", '{"text": "a", "sampling_params": {"stop": ["\\udfff"]}}'),
        ("/generate", '{"text": "a", "sampling_params": {"json_schema": "{\\"title\\": \\"\\ud800\\"}"}}'),
        ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "a\\ud800b"}]}'),
        (
            "/v1/chat/completions",
            '{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": '
            '{"name": "\\ud800"}}]}',
        ),
    ],
)
def test_row_9_lone_surrogates_anywhere(bench: Bench, path: str, body: str) -> None:
    answer = bench.post(path, content=body.encode(), headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text


# -------------------------------------------------------------------------------------------------- row 16, 20


def test_row_16_hostile_regexes_do_not_slow_a_neighbour(bench: Bench) -> None:
    async def story() -> tuple[float, list[int]]:
        async with bench.clients() as client:
            regexes = ["(a+)+b", "(a|a)*b", "(" * 200 + "a" + ")*" * 200, ".{0,60000}", "(?<=a)b", r"(a)\1"]
            bad = [
                asyncio.create_task(
                    client.post("/generate", json={"text": "x", "sampling_params": {"regex": r, "max_new_tokens": 4}})
                )
                for r in regexes
            ]
            began = time.perf_counter()
            assert (await client.post("/generate", json=LONG)).status_code == 200
            took = time.perf_counter() - began
            return took, [(await one).status_code for one in bad]

    began = time.perf_counter()
    bench.ask(LONG)
    alone = time.perf_counter() - began
    took, codes = asyncio.run(story())
    assert set(codes) <= {200, 400}
    assert took < 3 * alone + 2.0, "compiling happens elsewhere"


def test_row_20_one_long_word_is_refused(bench: Bench) -> None:
    """That it keeps no other request waiting is shown where the engine has a process of its own: test_serve.py."""
    assert bench.post(json={"text": "x" * (8 << 20)}).status_code == 413
    answer = bench.post(json={"text": "x" * 900_000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


# -------------------------------------------------------------------------------------------------- rows 21, 22


def test_row_21_keys_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    config = ServerConfig(port=0, api_keys=("sesame-open-wide",))
    with caplog.at_level(logging.DEBUG), Bench_without_canary(config) as url:
        for key in ("sesame-open-wide", "a-wrong-secret"):
            httpx.get(url + "/v1/models", headers={"authorization": f"Bearer {key}"})
    assert "sesame" not in caplog.text and "wrong-secret" not in caplog.text


def Bench_without_canary(config: ServerConfig) -> Any:
    from sglite.lang.backends.mock import MockBackend
    from sglite.runtime.server.runner import running

    return running(MockBackend("x"), config)


@pytest.mark.parametrize(
    ("request_bytes", "accepted"),
    [
        (b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n" + b"x-a: " + b"a" * 70_000 + b"\r\n\r\n", {431, 400}),
        (b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n" + b"x: y\r\n" * 20_000 + b"\r\n", {431, 400}),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 10, {400, 0}),
        (b"GET / HTTP/9.9\r\n\r\n", {400, 505, 0}),
        (b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: -5\r\n\r\n", {400}),
        (b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1e3\r\n\r\n", {400}),
        (b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 99999999\r\n\r\n{}", {413}),
        (b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", {400}),
        (b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\n" + JSON.encode() + b"content-length: 500\r\n\r\n{", {408}),
        (b"GET /health HTTP/1.1\r\nhost: evil.example\r\n\r\n", {421}),
        (b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nhost: evil.example\r\n\r\n", {421}),
        (b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\nhost: 127.0.0.1\r\n\r\n", {421}),
        (
            b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n",
            {400},
        ),
    ],
    ids=[
        "header",
        "headers",
        "tls",
        "version",
        "negative",
        "float",
        "declared",
        "chunk",
        "lying",
        "host",
        "hosts",
        "twice",
        "both",
    ],
)
def test_row_22_broken_requests(bench: Bench, request_bytes: bytes, accepted: set[int]) -> None:
    answer = bench.raw(request_bytes)
    assert status(answer) in accepted, answer[:300]
    assert b"Traceback" not in answer and b".py" not in answer


def test_row_22_an_endless_chunked_body(bench: Bench) -> None:
    with bench.connect() as connection:
        connection.sendall(
            f"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\n{JSON}transfer-encoding: chunked\r\n\r\n".encode()
        )
        sent = 0
        with suppress(BrokenPipeError, ConnectionResetError):
            while sent < 64 << 20:
                connection.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
                sent += 65536
        assert sent < 32 << 20, "the server went on reading"
        assert status(read_all(connection)) in (413, 0)  # 0: the reset overtook the answer


def test_row_22_slowloris(bench: Bench) -> None:
    """Many half-open requests: others are served meanwhile, and the slow ones are told to go."""
    with ExitStack() as stack:
        slow = [stack.enter_context(bench.connect()) for _ in range(300)]
        for i, connection in enumerate(slow):
            connection.sendall(http_post(b"{}")[: 20 + i % 100])
        began = time.perf_counter()
        assert bench.ask() == bench.canary
        assert time.perf_counter() - began < 2.0


# -------------------------------------------------------------------------------------------------- row 23


def test_row_23_a_thousand_requests_and_a_queue_of_64(bench: Bench) -> None:
    """What is accepted ends, the rest is told to come again; nobody is reset."""
    body = {"text": "x", "sampling_params": {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True}}

    async def story() -> tuple[list[int], list[httpx.Response]]:
        async with bench.clients() as client:
            answers = await asyncio.gather(*[client.post("/generate", json=body) for _ in range(400)])
            return [a.status_code for a in answers], [a for a in answers if a.status_code == 429]

    with ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(bench.connect())  # idle ones beside them
        codes, refused = asyncio.run(story())
    assert set(codes) == {200, 429}
    assert codes.count(200) >= 64
    assert all(a.headers["retry-after"] and a.json()["error"]["code"] == "overloaded" for a in refused)


# -------------------------------------------------------------------------------------------------- rows 24 to 26


def hang_up(connection: socket.socket, *, rudely: bool) -> None:
    if rudely:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("rudely", [False, True], ids=["fin", "reset"])
def test_row_24_leaving_at_any_moment_with_eight_samples(bench: Bench, rudely: bool) -> None:
    body = {"text": "y" * 300, "sampling_params": {"max_new_tokens": 150, "n": 8, "ignore_eos": True}}
    for events in (0, 0, 1, 4, 40):
        connection = bench.connect()
        connection.sendall(stream_of(body))
        seen = b""
        while seen.count(b"data: ") < events:
            seen += connection.recv(4096)
        hang_up(connection, rudely=rudely)
    until(bench.idle, "aborted", 2.0)


def test_row_24_leaving_while_queued_and_while_compiling(bench: Bench) -> None:
    queued = {"text": "z", "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
    compiling = {"text": "z", "sampling_params": {"regex": "(a|b){1,400}(c|d){1,400}", "max_new_tokens": 20}}
    for body in [queued] * 40 + [compiling] * 5:
        connection = bench.connect()
        connection.sendall(stream_of(body))
        hang_up(connection, rudely=True)
    until(bench.idle, "aborted", 5.0)


def test_row_25_a_thousand_aborts_at_random_phases(bench: Bench) -> None:
    """Through the socket; ten thousand and more through ``make soak``. A neighbour finishes as if alone."""
    rng = random.Random(0)

    async def leave(client: httpx.AsyncClient, gate: asyncio.Semaphore) -> None:
        body = {
            "text": "q" * rng.randrange(1, 100),
            "sampling_params": {"max_new_tokens": 100, "n": rng.randrange(1, 3)},
        }
        async with gate:
            with suppress(asyncio.TimeoutError):
                async with (
                    asyncio.timeout(rng.random() * 0.05),
                    client.stream("POST", "/generate", json={**body, "stream": True}) as answer,
                ):
                    async for _ in answer.aiter_raw():
                        pass

    async def story() -> str:
        gate = asyncio.Semaphore(24)
        async with bench.clients() as client:
            leaving = [asyncio.create_task(leave(client, gate)) for _ in range(1_000)]
            neighbour = await client.post("/generate", json=LONG)
            await asyncio.gather(*leaving)
            return neighbour.json()["text"]

    alone = bench.ask(LONG)
    assert asyncio.run(story()) == alone


def test_row_26_readers_that_stand_still_are_let_go(bench: Bench) -> None:
    """They ask for megabytes and read nothing: after ``write_timeout`` they are aborted, and others do not notice."""
    body = {
        "text": "r",
        "return_logprob": True,
        "top_logprobs_num": 20,
        "sampling_params": {"max_new_tokens": 450, "ignore_eos": True, "n": 4},
    }
    with ExitStack() as stack:
        for _ in range(4):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(bench.address)
            stack.enter_context(connection)
            connection.sendall(stream_of(body))
        assert bench.ask() == bench.canary
        until(bench.idle, "aborted", 20.0)


# -------------------------------------------------------------------------------------------------- rows 27 to 29


def test_row_27_ids_of_one_character_belong_to_whoever_uses_them_first(bench: Bench) -> None:
    long = {**LONG["sampling_params"], "max_new_tokens": 450, "n": 8}
    with bench.connect() as connection:
        connection.sendall(stream_of({"text": "a", "rid": "a", "sampling_params": long}))
        seen = b""
        while b"data: " not in seen:
            seen += connection.recv(4096)
        assert bench.post(json={"text": "b", "rid": "a"}).status_code == 400
        assert bench.post("/abort_request", json={"rid": "b"}).status_code == 404
        assert bench.post("/abort_request", json={"rid": "a"}).json()["aborted"] == 1
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
        seen += read_all(connection)
    assert b'"code":"aborted"' in seen and b"[DONE]" not in seen and b'"status":"ok"' in seen


def test_row_28_flushing_all_the_time(bench: Bench) -> None:
    async def story() -> list[str]:
        async with bench.clients() as client:
            running = [asyncio.create_task(client.post("/generate", json=LONG)) for _ in range(6)]
            while not all(task.done() for task in running):
                assert (await client.post("/flush_cache")).status_code == 200
            return [(await task).json()["text"] for task in running]

    alone = bench.ask(LONG)
    assert asyncio.run(story()) == [alone] * 6


def test_row_29_sixty_four_requests_that_need_far_more_than_the_pool() -> None:
    with Bench.started(kv_tokens=1024, max_running=16) as bench:
        bodies = [{**LONG, "text": f"{i} " * 20} for i in range(64)]
        alone = [bench.ask(body) for body in bodies[:3]]

        async def story() -> list[httpx.Response]:
            async with bench.clients() as client:
                return await asyncio.gather(*[client.post("/generate", json=body) for body in bodies])

        answers = asyncio.run(story())
        assert {a.status_code for a in answers} == {200}
        assert [a.json()["text"] for a in answers[:3]] == alone
        assert bench.stats()["retractions"] > 0
        bench.check_after()


# -------------------------------------------------------------------------------------------------- row 37


def test_row_37_metrics_under_overload_with_many_ids(bench: Bench) -> None:
    async def story() -> tuple[list[float], str]:
        async with bench.clients() as client:
            load = [asyncio.create_task(client.post("/generate", json={**LONG, "rid": f"id-{i}"})) for i in range(120)]
            times, text = [], ""
            while not all(task.done() for task in load):
                began = time.perf_counter()
                text = (await client.get("/metrics")).text
                times.append(time.perf_counter() - began)
            await asyncio.gather(*load)
            return times, text

    times, text = asyncio.run(story())
    assert sorted(times)[len(times) // 2] < 0.5
    assert "id-1" not in text and len(text) < 100_000


# -------------------------------------------------------------------------------------------------- row 36


def test_row_36_the_wall_clock_steps_by_an_hour(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    for step in (3600.0, -3600.0):
        monkeypatch.setattr(time, "time", lambda step=step: real() + step)
        assert bench.ask() == bench.canary


@pytest.fixture(autouse=True)
def nothing_listens_elsewhere() -> Iterator[None]:
    """No case opens a second listening socket in this process."""
    yield
    assert Footprint.now().children == 0
