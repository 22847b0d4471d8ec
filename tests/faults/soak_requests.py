"""Requests of all kinds for as long as one likes: what came back, and what the server's processes hold meanwhile."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from load import at
from soak_server import Connection, Holding, Lost, Server, serving, settled

WORDS = ["the", "a", "of", "and", "to", "in", "is", "it", "you", "that", "he", "was", "for", "on", "are", "with"]
INVALID: list[dict[str, Any]] = [
    {"text": "a", "sampling_params": {"temperature": -1}},
    {"text": "a", "sampling_params": {"max_new_tokens": "5"}},
    {"text": "a", "banana": 1},
    {"text": "a", "sampling_params": {"json_schema": "{", "max_new_tokens": 4}},
    {"input_ids": [-1]},
    {"text": "a" * 100_000},
]
EXPECTED_WHILE_DOWN = {503}


@dataclass
class Tally:
    """What happened, by name; the bad names are those that must not be there."""

    counts: Counter[str] = field(default_factory=Counter)
    health: list[float] = field(default_factory=list)
    rejections: list[float] = field(default_factory=list)
    samples: list[tuple[float, Holding, Holding]] = field(default_factory=list)
    restarts: list[float] = field(default_factory=list)
    down: bool = False
    """A worker was killed and the server is not ready again yet."""

    @property
    def bad(self) -> dict[str, int]:
        return {name: n for name, n in self.counts.items() if name.startswith(("lost", "unexpected"))}


class Soak:
    def __init__(self, server: Server, options: argparse.Namespace) -> None:
        self.server, self.options, self.tally = server, options, Tally()
        self.deadline = time.monotonic() + options.minutes * 60
        self.left = options.requests
        self.began = time.monotonic()

    async def run(self) -> None:
        idle = [Connection(self.server.address) for _ in range(self.options.open)]
        for connection in idle:
            connection._reader, connection._writer = await asyncio.open_connection(*self.server.address)
        side = [asyncio.create_task(work()) for work in (self.watch_health, self.watch_memory, self.kill)]
        await asyncio.gather(*[self.client(seed) for seed in range(self.options.active)])
        for task in side:
            task.cancel()
        await asyncio.gather(*side, return_exceptions=True)
        for connection in idle:
            connection.close()

    def more(self) -> bool:
        self.left -= 1
        return self.left >= 0 and time.monotonic() < self.deadline

    async def client(self, seed: int) -> None:
        rng, connection = random.Random(seed), Connection(self.server.address)
        while self.more():
            kind, counts, was_down = rng.random(), self.tally.counts, self.tally.down
            try:
                if kind < 0.25:
                    left = await self.abort(connection, rng)
                    counts["aborted"] += left
                elif kind < 0.30:
                    await self.invalid(connection, rng)
                elif kind < 0.31:
                    await self.complete(connection, rng, slowly=True)
                else:
                    await self.complete(connection, rng)
            except (Lost, ConnectionError, asyncio.IncompleteReadError):
                counts["lost answers"] += 1
                connection.close()
            if self.tally.down or was_down:
                await asyncio.sleep(0.05)
        connection.close()

    def body(self, rng: random.Random, stream: bool) -> dict[str, Any]:
        prompt = " ".join(rng.choices(WORDS, k=rng.randrange(1, 40)))
        most = self.options.tokens
        params = {"max_new_tokens": rng.randrange(1, most), "temperature": rng.choice([0, 1]), "ignore_eos": True}
        return {"text": prompt, "sampling_params": params, "stream": stream}

    async def abort(self, connection: Connection, rng: random.Random) -> int:
        status = await connection.request("POST", "/generate", self.body(rng, stream=True))
        if status != 200:
            await self.refused(connection, status, 0.0)
            return 0
        wanted = rng.randrange(0, 6)
        async for _ in connection.parts():
            wanted -= 1
            if wanted < 0:
                break
        connection.close()
        return 1

    async def invalid(self, connection: Connection, rng: random.Random) -> None:
        status = await connection.request("POST", "/generate", rng.choice(INVALID))
        body = json.loads(await connection.whole())
        if status == 400 and body["error"]["message"]:
            self.tally.counts["refused as invalid"] += 1
        else:
            await self.refused(None, status, 0.0)

    async def complete(self, connection: Connection, rng: random.Random, *, slowly: bool = False) -> None:
        stream, began = slowly or rng.random() < 0.5, time.perf_counter()
        status = await connection.request("POST", "/generate", self.body(rng, stream))
        if status != 200:
            await self.refused(connection, status, time.perf_counter() - began)
        elif not stream:
            answer = json.loads(await connection.whole())
            self.tally.counts["completed" if answer["meta_info"]["finish_reason"] else "lost finish"] += 1
        else:
            await self.read(connection, slowly)

    async def read(self, connection: Connection, slowly: bool) -> None:
        last = b""
        async for part in connection.parts():
            last = part
            if slowly:
                await asyncio.sleep(0.01)
        final = last.rstrip().rpartition(b"data: ")[2]
        if final == b"[DONE]":
            self.tally.counts["completed, read slowly" if slowly else "completed"] += 1
        elif b'"error"' in final:
            code = json.loads(final)["error"]["code"]
            expected = code == "unavailable" and self.options.kill_every
            self.tally.counts[f"{'' if expected else 'unexpected '}error event {code}"] += 1
        else:
            self.tally.counts["lost terminal events"] += 1

    async def refused(self, connection: Connection | None, status: int, seconds: float) -> None:
        if connection is not None:
            await connection.whole()
        expected = status == 429 or (status == 503 and bool(self.options.kill_every))
        if status == 429:
            self.tally.rejections.append(seconds)
            await asyncio.sleep(0.02)
        self.tally.counts[f"{'' if expected else 'unexpected '}{status}"] += 1

    # ---- beside them -------------------------------------------------------------------------------------------

    async def watch_health(self) -> None:
        connection = Connection(self.server.address)
        while True:
            began = time.perf_counter()
            status = await connection.request("GET", "/health")
            await connection.whole()
            self.tally.health.append(time.perf_counter() - began)
            self.tally.counts["unexpected health"] += status != 200
            await asyncio.sleep(0.1)

    async def watch_memory(self) -> None:
        while True:
            with suppress(FileNotFoundError, ProcessLookupError, KeyError):
                if (worker := self.server.worker) is not None and not self.tally.down:
                    held = Holding.of(self.server.process.pid), Holding.of(worker)
                    self.tally.samples.append((time.monotonic() - self.began, *held))
            await asyncio.sleep(1.0)

    async def kill(self) -> None:
        while self.options.kill_every:
            await asyncio.sleep(self.options.kill_every)
            dead = self.server.worker
            assert dead is not None
            began, self.tally.down = time.monotonic(), True
            os.kill(dead, signal.SIGKILL)
            connection = Connection(self.server.address)
            while True:
                status = await connection.request("GET", "/ready")
                await connection.whole()
                if status == 200 and self.server.worker != dead:
                    break
                await asyncio.sleep(0.02)
            connection.close()
            self.tally.down = False
            self.tally.restarts.append(time.monotonic() - began)


Series = list[tuple[float, float]]
"""Seconds since the beginning, and MiB."""


def floors(samples: Series, seconds: float = 60.0) -> Series:
    """The least of each minute: what is held, without what is only on its way. Of each sixth of less than six."""
    every = min(seconds, samples[-1][0] / 6) if samples else seconds
    spans = groupby(samples, lambda sample: int(sample[0] / every))
    return [min(span, key=lambda sample: sample[1]) for _, span in spans]


def slopes(samples: Series) -> dict[str, float]:
    """MiB an hour after a warm-up of a third, of a half, of two thirds of the time: growth that ends shrinks."""
    cuts = {"1/3": 1 / 3, "1/2": 1 / 2, "2/3": 2 / 3}
    return {f"after {name}": round(slope(samples[int(len(samples) * cut) :]), 2) for name, cut in cuts.items()}


def slope(samples: Series) -> float:
    """MiB an hour, by least squares."""
    n = len(samples)
    if n < 3:
        return 0.0
    mean_t, mean_m = sum(t for t, _ in samples) / n, sum(m for _, m in samples) / n
    spread = sum((t - mean_t) ** 2 for t, _ in samples)
    return 3600 * sum((t - mean_t) * (m - mean_m) for t, m in samples) / spread


def requests_command(options: argparse.Namespace) -> int:
    with serving(options.model) as server:
        before = Holding.of(server.process.pid)
        soak = Soak(server, options)
        asyncio.run(soak.run())
        seconds = time.monotonic() - soak.began
        found = asyncio.run(settled(server))
        after = Holding.of(server.process.pid)
    tally = soak.tally
    http, worker = (floors([(t, held[side].mib) for t, *held in tally.samples]) for side in (0, 1))
    leaked = found["pages_total"] - found["pages_free"] - found["pages_cached"]
    report = {
        "requests": sum(n for name, n in tally.counts.items() if name != "unexpected health"),
        "seconds": round(seconds, 1),
        "outcomes": dict(sorted(tally.counts.items())),
        "running and waiting at the end": found["running"] + found["waiting"],
        "pages nobody holds": leaked,
        "server files before, after": (before.files, after.files),
        "server threads before, after": (before.threads, after.threads),
        "server MiB/h": slopes(http),
        "worker MiB/h": slopes(worker) if not tally.restarts else None,
        "server MiB, least of each minute": [round(mib, 1) for _, mib in http],
        "worker MiB, least of each minute": [round(mib, 1) for _, mib in worker],
        "health p50, p99 ms": [round(1e3 * at(tally.health, q), 1) for q in (0.5, 0.99)],
        "rejection p99 ms": round(1e3 * at(tally.rejections, 0.99), 1) if tally.rejections else None,
        "worker kills, slowest return s": (len(tally.restarts), round(max(tally.restarts, default=0.0), 1)),
    }
    print(json.dumps(report, indent=1))
    return int(any(tally.bad.values()) or leaked != 0 or after.files > before.files + 2)
