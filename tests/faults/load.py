"""Many clients in a closed loop, cheap enough that what is measured is the server.

    python tests/faults/load.py 127.0.0.1:30000 --clients 640 --seconds 30

A process of its own, on uvloop, with requests that are bytes before they begin and answers that are looked at no more
than needed. A client asks, waits for the whole answer, and asks again; refused with 429 it comes back when
``retry-after`` says. Beside them one asks for /health ten times a second. Prints one line of JSON; ``own_lag`` is how
late this process's own loop was: what its figures contain of itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

import uvloop

_PULSE = 0.01
_SETTLE = 1.0
"""Seconds from when all clients are there until answers count."""


def http(method: str, path: str, body: Any = None) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


@dataclass
class Seen:
    """Seconds by status, of what was answered before ``end``; goodput counts from ``begin`` on, when all are there."""

    begin: float
    end: float
    good: int = 0
    times: dict[int, list[float]] = field(default_factory=dict)
    lost: Counter[str] = field(default_factory=Counter)

    def add(self, status: int, seconds: float) -> None:
        if (now := time.monotonic()) < self.end:
            self.times.setdefault(status, []).append(seconds)
            self.good += status == 200 and now >= self.begin

    def figures(self) -> dict[str, Any]:
        return {
            "goodput": round(self.good / (self.end - self.begin), 1),
            "statuses": {str(status): len(times) for status, times in sorted(self.times.items())},
            "p50_p99_max_ms": {
                str(s): [round(1e3 * at(t, q), 2) for q in (0.5, 0.99, 1)] for s, t in self.times.items()
            },
            "lost": dict(self.lost),
        }


def at(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else 0.0


class Client(asyncio.Protocol):
    """One connection at a time; ``pause`` seconds between an answer and the next request."""

    def __init__(self, address: tuple[str, int], request: bytes, seen: Seen, pause: float = 0.0) -> None:
        self._address, self._request, self._seen, self._pause = address, request, seen, pause
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._data = b""
        self._asked = 0.0
        self._waits = False
        """An answer is due."""

    async def ask(self) -> None:
        """Open the connection where there is none, and send the request."""
        self._asked, self._data, self._waits = time.perf_counter(), b"", True
        try:
            if self._transport is None:
                await self._loop.create_connection(lambda: self, *self._address)
            assert self._transport is not None
            self._transport.write(self._request)
        except OSError as error:
            self._fail(type(error).__name__)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._waits:
            self._fail("reset" if error else "closed")

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, mark, body = self._data.partition(b"\r\n\r\n")
        if mark and len(body) >= int(value(head, b"content-length")):
            self._answered(int(head[9:12]), head)

    def _answered(self, status: int, head: bytes) -> None:
        self._waits = False
        self._seen.add(status, time.perf_counter() - self._asked)
        wait = self._pause if status != 429 else float(value(head, b"retry-after") or 1)
        if (wait > 3.0 or b"\r\nconnection: close" in head) and self._transport is not None:
            self._transport.close()  # the server keeps no connection open that nobody uses for longer
            self._transport = None
        self._again(wait)

    def _fail(self, why: str) -> None:
        self._waits = False
        self._seen.lost[why] += time.monotonic() < self._seen.end
        self._again(1.0)

    def _again(self, wait: float) -> None:
        if time.monotonic() + wait < self._seen.end:
            self._loop.call_later(wait, lambda: self._loop.create_task(self.ask()))

    def close(self) -> None:
        self._waits = False
        if self._transport is not None:
            self._transport.close()


def value(head: bytes, name: bytes) -> bytes:
    return head.partition(b"\r\n" + name + b": ")[2].partition(b"\r\n")[0]


async def pulse(lags: list[float], end: float) -> None:
    while time.monotonic() < end:
        due = time.monotonic() + _PULSE
        await asyncio.sleep(_PULSE)
        lags.append(time.monotonic() - due)


async def load(options: argparse.Namespace) -> dict[str, Any]:
    host, _, port = options.address.partition(":")
    now, address = time.monotonic(), (host, int(port))
    arriving = options.clients / options.arrive
    begin, end = now + arriving + _SETTLE, now + arriving + _SETTLE + options.seconds
    params = {"max_new_tokens": options.tokens, "temperature": 0, "ignore_eos": True}
    request = http("POST", "/generate", {"text": "x y z", "sampling_params": params})
    seen, health, lags = Seen(begin, end), Seen(begin, end), list[float]()
    clients = [Client(address, request, seen) for _ in range(options.clients)]
    watch = Client(address, http("GET", "/health"), health, pause=0.1)
    loop, rng = asyncio.get_running_loop(), random.Random(0)
    for client in (watch, *clients):
        loop.call_later(rng.random() * arriving, lambda client=client: loop.create_task(client.ask()))
    await pulse(lags, end)
    used = time.process_time()
    for client in (watch, *clients):
        client.close()
    return {
        **seen.figures(),
        "health": health.figures(),
        "own_lag_p99_ms": round(1e3 * at(lags, 0.99), 2),
        "own_cores": round(used / (end - now), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--arrive", type=float, default=640.0, help="how many clients come in a second at first")
    print(json.dumps(uvloop.run(load(parser.parse_args()))))


if __name__ == "__main__":
    main()
