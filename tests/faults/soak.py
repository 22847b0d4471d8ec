"""Load for as long as one likes, against a server of its own on loopback, and what came of it.

    python tests/faults/soak.py requests --requests 1000000 --minutes 60          the scripted model
    python tests/faults/soak.py requests --model smollm2-135m --minutes 60 --kill-every 600 --open 1000
    python tests/faults/soak.py overload --seconds 30
    python tests/faults/soak.py drains --count 100
    python tests/faults/soak.py aborts --model smollm2-135m --tokens 500

``requests``: 25% of the requests are aborted at a random event, 5% are invalid, 1% are read slowly; half stream.
Everything is counted: an answer nobody expected, a stream that ended without ``[DONE]`` and without an error event,
what the server's processes hold before and after, and how their memory grows. Exits with 1 where something was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench import children

HERE = Path(__file__).parent
LOG = HERE.parent.parent / "build" / "soak.log"
"""What the servers say."""
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


# -------------------------------------------------------------------------------------------------- the server


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname and parts.port
        return parts.hostname, parts.port

    @property
    def worker(self) -> int | None:
        found = children(self.process.pid)
        return found[0] if found else None


@contextmanager
def serving(model: str | None) -> Iterator[Server]:
    command = [sys.executable, str(HERE / "scripted_serve.py")]
    if model is not None:
        command = [sys.executable, "-m", "sglite", "serve", "--model", model, "--port", "0", "--max-queue", "256"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "serving at" in line:
                break
        else:
            raise SystemExit("the server did not start")
        LOG.parent.mkdir(exist_ok=True)
        log = LOG.open("a")
        pump = subprocess.Popen(["cat"], stdin=process.stderr, stdout=log)
        log.close()
        yield Server(process, line.rpartition(" ")[2].strip())
    finally:
        process.terminate()
        process.wait(30)
        process.stderr.close()
        pump.wait(5)


@dataclass(frozen=True)
class Holding:
    """What one process holds."""

    mib: float
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Holding:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return cls(int(status["VmRSS"].split()[0]) / 1024, len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"]))  # noqa: PTH208


# -------------------------------------------------------------------------------------------------- the client


class Lost(Exception):  # noqa: N818
    """The connection ended within an answer."""


class Connection:
    """Just enough of HTTP/1.1 to be much quicker than the server."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def request(self, method: str, path: str, body: Any = None) -> int:
        """The status; the body is then read with ``whole`` or ``parts``."""
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(*self._address)
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        self._writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        head_bytes = await self._until(b"\r\n\r\n")
        lines = head_bytes.decode("latin-1").lower().split("\r\n")
        self._headers = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
        return int(lines[0].split()[1])

    @property
    def retry_after(self) -> str:
        return self._headers.get("retry-after", "1")

    async def whole(self) -> bytes:
        if "content-length" in self._headers:
            assert self._reader is not None
            body = await self._reader.readexactly(int(self._headers["content-length"]))
        else:
            body = b"".join([part async for part in self.parts()])
        if self._headers.get("connection") == "close":
            self.close()
        return body

    async def parts(self) -> Any:
        assert self._reader is not None
        while size := int(await self._until(b"\r\n"), 16):
            yield (await self._reader.readexactly(size + 2))[:-2]
        await self._until(b"\r\n")

    async def _until(self, mark: bytes) -> bytes:
        assert self._reader is not None
        try:
            return await self._reader.readuntil(mark)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            self.close()
            raise Lost from error

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


# -------------------------------------------------------------------------------------------------- requests


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


def slopes(samples: list[tuple[float, float]]) -> dict[str, float]:
    """MiB an hour after a warm-up of a third, of a half, of two thirds of the time: growth that ends shrinks."""
    cuts = {"1/3": 1 / 3, "1/2": 1 / 2, "2/3": 2 / 3}
    return {f"after {name}": round(slope(samples[int(len(samples) * cut) :]), 2) for name, cut in cuts.items()}


def slope(samples: list[tuple[float, float]]) -> float:
    """MiB an hour, by least squares."""
    n = len(samples)
    if n < 3:
        return 0.0
    mean_t, mean_m = sum(t for t, _ in samples) / n, sum(m for _, m in samples) / n
    spread = sum((t - mean_t) ** 2 for t, _ in samples)
    return 3600 * sum((t - mean_t) * (m - mean_m) for t, m in samples) / spread


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else 0.0


async def gauges(server: Server) -> dict[str, float]:
    connection = Connection(server.address)
    await connection.request("GET", "/metrics")
    text = (await connection.whole()).decode()
    connection.close()
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#") and "{" not in line)
    return {name.removeprefix("sglite_"): float(value) for name, value in pairs}


async def settled(server: Server) -> dict[str, float]:
    """The gauges once nobody is left; the heartbeat that tells them comes twice a second."""
    for _ in range(100):
        found = await gauges(server)
        if found.get("running") == found.get("waiting") == found.get("requests_in_flight") == 0:
            break
        await asyncio.sleep(0.1)
    await asyncio.sleep(1.2)
    return await gauges(server)


def requests_command(options: argparse.Namespace) -> int:
    with serving(options.model) as server:
        before = Holding.of(server.process.pid)
        soak = Soak(server, options)
        asyncio.run(soak.run())
        seconds = time.monotonic() - soak.began
        found = asyncio.run(settled(server))
        after = Holding.of(server.process.pid)
    tally = soak.tally
    leaked = found["pages_total"] - found["pages_free"] - found["pages_cached"]
    report = {
        "requests": sum(n for name, n in tally.counts.items() if name != "unexpected health"),
        "seconds": round(seconds, 1),
        "outcomes": dict(sorted(tally.counts.items())),
        "running and waiting at the end": found["running"] + found["waiting"],
        "pages nobody holds": leaked,
        "server files before, after": (before.files, after.files),
        "server threads before, after": (before.threads, after.threads),
        "server MiB/h": slopes([(t, s.mib) for t, s, _ in tally.samples]),
        "worker MiB/h": slopes([(t, w.mib) for t, _, w in tally.samples]) if not tally.restarts else None,
        "server, worker MiB by minute": [(round(s.mib), round(w.mib)) for _, s, w in tally.samples[::60]],
        "health p50, p99 ms": [round(1e3 * percentile(tally.health, q), 1) for q in (0.5, 0.99)],
        "rejection p99 ms": round(1e3 * percentile(tally.rejections, 0.99), 1) if tally.rejections else None,
        "worker kills, slowest return s": (len(tally.restarts), round(max(tally.restarts, default=0.0), 1)),
    }
    print(json.dumps(report, indent=1))
    return int(any(tally.bad.values()) or leaked != 0 or after.files > before.files + 2)


# -------------------------------------------------------------------------------------------------- overload


@dataclass(frozen=True)
class Spent:
    """Seconds of CPU so far, of the HTTP process and of its worker, and how late the former's loop was, by bucket."""

    http: float
    worker: float
    lag: dict[float, float]

    @classmethod
    def of(cls, server: Server) -> Spent:
        assert server.worker is not None
        return cls(cpu(server.process.pid), cpu(server.worker), asyncio.run(lags(server)))

    def since(self, before: Spent, seconds: float) -> str:
        counts = {edge: n - before.lag[edge] for edge, n in self.lag.items()}
        late = next(edge for edge in sorted(counts) if counts[edge] >= 0.99 * max(counts.values()))
        http, worker = (
            (now - then) / seconds for now, then in ((self.http, before.http), (self.worker, before.worker))
        )
        return f"HTTP {http:.2f} and worker {worker:.2f} cores, server's loop late p99 <= {1e3 * late:g} ms"


def cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def lags(server: Server) -> dict[float, float]:
    connection = Connection(server.address)
    await connection.request("GET", "/metrics")
    lines = (await connection.whole()).decode().splitlines()
    connection.close()
    mark = 'sglite_event_loop_lag_seconds_bucket{le="'
    pairs = (line.removeprefix(mark).split('"} ') for line in lines if line.startswith(mark))
    return {float(edge): float(count) for edge, count in pairs}


def loaded(server: Server, clients: int, options: argparse.Namespace) -> dict[str, Any]:
    """What ``load.py``, a process of its own, saw with that many clients."""
    host, port = server.address
    command = [sys.executable, str(HERE / "load.py"), f"{host}:{port}", "--clients", str(clients)]
    command += ["--seconds", str(options.seconds), "--tokens", str(options.tokens)]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def overload_command(options: argparse.Namespace) -> int:
    rows = []
    with serving(options.model) as server:
        loaded(server, options.active, argparse.Namespace(seconds=3, tokens=options.tokens))  # warm
        for times in options.times:
            before, began = Spent.of(server), time.monotonic()
            found = loaded(server, options.active * times, options)
            rows.append((times, found["goodput"]))
            print(f"{times:3}x: {found['goodput']:7.1f} answers/s, {found['statuses']}, lost {found['lost']}")
            print(f"      ms p50, p99, max: {found['p50_p99_max_ms']}, /health {found['health']['p50_p99_max_ms']}")
            shares = Spent.of(server).since(before, time.monotonic() - began)
            print(
                f"      {shares}; client {found['own_cores']} cores, late p99 {found['own_lag_p99_ms']} ms", flush=True
            )
            asyncio.run(settled(server))
    peak = max(goodput for _, goodput in rows)
    print(", ".join(f"{times}x: {100 * goodput / peak:.0f}% of the peak" for times, goodput in rows))
    return int(any(goodput < 0.95 * peak for _, goodput in rows))


# -------------------------------------------------------------------------------------------------- drains


async def drain(server: Server, streams: int, tokens: int) -> Counter[str]:
    """SIGTERM in the middle of some streams; how each of them ended."""

    async def one() -> str:
        connection = Connection(server.address)
        params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = {"text": "drain", "sampling_params": params, "stream": True}
        try:
            assert await connection.request("POST", "/generate", body) == 200
            started.release()
            last = b""
            async for part in connection.parts():
                last = part
        except (Lost, asyncio.IncompleteReadError):
            return "lost"
        finally:
            connection.close()
        return "completed" if b"[DONE]" in last else "error event" if b'"error"' in last else "lost"

    started = asyncio.Semaphore(0)
    tasks = [asyncio.create_task(one()) for _ in range(streams)]
    for _ in tasks:
        await started.acquire()
    server.process.send_signal(signal.SIGTERM)
    return Counter(await asyncio.gather(*tasks))


def drains_command(options: argparse.Namespace) -> int:
    total, codes, end = Counter[str](), Counter[int](), time.monotonic() + options.minutes * 60
    for _ in range(options.count):
        if time.monotonic() > end:
            break
        with serving(options.model) as server:
            worker = server.worker
            total += asyncio.run(drain(server, options.active, options.tokens))
            codes[server.process.wait(30)] += 1
            total["orphans"] += worker is not None and Path(f"/proc/{worker}").exists()
    print(f"{codes.total()} drains, exit codes {dict(codes)}, streams {dict(+total)}")
    return int(total["lost"] + total["orphans"] > 0 or set(codes) != {0})


# -------------------------------------------------------------------------------------------------- aborts


async def steps_until_free(address: tuple[str, int], core: Any, tokens: int) -> int:
    """One stream's client leaves; how many steps are planned until none of its pages is held."""
    held = lambda stats: stats.pages_total - stats.pages_free - stats.pages_cached  # noqa: E731
    connection = Connection(address)
    params = {"max_new_tokens": tokens, "temperature": 1, "ignore_eos": True}
    body = {"text": f"{random.random()} " * 20, "sampling_params": params, "stream": True}
    assert await connection.request("POST", "/generate", body) == 200
    parts = connection.parts()
    for _ in range(random.randrange(1, 6)):
        await anext(parts)
    before = core.scheduler.stats.steps
    assert held(core.scheduler.stats), "it has ended by itself"
    connection.close()
    while held(core.scheduler.stats):
        await asyncio.sleep(0.0005)
    return int(core.scheduler.stats.steps - before)


def aborts_command(options: argparse.Namespace) -> int:
    """The engine in this process, so that its steps and pages can be read; the client comes over a socket."""
    from sglite import Engine
    from sglite.runtime.server.runner import running
    from sglite.runtime.testing import scripted_engine

    engine = Engine(options.model) if options.model else scripted_engine()
    with engine, running(engine) as url:
        parts = urlsplit(url)
        address = (str(parts.hostname), int(parts.port or 0))
        steps = Counter(
            asyncio.run(steps_until_free(address, engine._core, options.tokens)) for _ in range(options.count)
        )
    print(f"steps until the pages of an aborted stream are free: {dict(sorted(steps.items()))}")
    return int(max(steps) > 1)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    requests = commands.add_parser("requests")
    requests.add_argument("--requests", type=int, default=1_000_000)
    requests.add_argument("--kill-every", type=float, default=0.0, metavar="SECONDS", help="SIGKILL the worker")
    requests.add_argument("--open", type=int, default=0, help="idle connections beside the active ones")
    overload = commands.add_parser("overload")
    overload.add_argument("--seconds", type=float, default=30.0, help="for each of the next")
    overload.add_argument("--times", type=int, nargs="+", default=[1, 2, 10, 100], help="multiples of --active clients")
    drains = commands.add_parser("drains")
    drains.add_argument("--count", type=int, default=100)
    aborts = commands.add_parser("aborts")
    aborts.add_argument("--count", type=int, default=100)
    for command, run in (
        (requests, requests_command),
        (overload, overload_command),
        (drains, drains_command),
        (aborts, aborts_command),
    ):
        command.add_argument("--model", help="a real model through `sglite serve`; else the scripted one")
        command.add_argument("--tokens", type=int, default=32, help="most new tokens of an answer")
        command.add_argument("--minutes", type=float, default=60.0)
        command.add_argument("--active", type=int, default=64, help="clients at work")
        command.set_defaults(run=run)
    return top


if __name__ == "__main__":
    options = parser().parse_args()
    sys.exit(options.run(options))
