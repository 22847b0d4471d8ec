"""A server on a socket of its own, its clients, and the checks after each case."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.runner import running
from sglite.runtime.testing import scripted_engine

CANARY = {"text": "canary", "sampling_params": {"max_new_tokens": 16, "temperature": 0}}
POOLS = ("asyncio_", "uvloop_", "ThreadPoolExecutor", "AnyIO", "grammar")
"""Names of threads that wait for more work by design: asyncio's and uvloop's, AnyIO's, the grammar cache's."""
SETTLE = 5.0
"""Seconds after a case until everything must be back; polled, so that a good case costs nothing."""


@dataclass(frozen=True)
class Footprint:
    """What this process holds. Threads of pools are kept for later by design and do not count."""

    files: int
    threads: int
    children: int

    @classmethod
    def now(cls) -> Footprint:
        threads = [t for t in threading.enumerate() if not t.name.startswith(POOLS)]
        return cls(len(list(Path("/proc/self/fd").iterdir())), len(threads), len(children()))


def children(pid: int | None = None) -> list[int]:
    """Process ids of the children of a process, or of ours."""
    tasks = Path(f"/proc/{pid or 'self'}/task")
    try:
        return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]
    except FileNotFoundError:
        return []


def until(condition: Callable[[], bool], what: str, seconds: float = SETTLE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.005)


@dataclass
class Bench:
    """``engine`` runs in this process, so that its books can be read; clients come over the socket."""

    url: str
    engine: Any
    canary: str = ""
    baseline: Footprint = field(default_factory=Footprint.now)

    @classmethod
    @contextmanager
    def started(cls, config: ServerConfig | None = None, *, canary: bool = True, **options: Any) -> Iterator[Bench]:
        """``canary=False`` where nobody without a key may ask."""
        engine = scripted_engine(**{"max_running": 8, "max_queue": 64, **options})
        quick = ServerConfig(port=0, read_timeout=1.0, write_timeout=1.0)
        with engine, running(engine, config or quick) as url:
            bench = cls(url, engine)
            bench.canary = bench.ask() if canary else ""
            bench.settle()
            bench.baseline = Footprint.now()
            yield bench

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname is not None and parts.port is not None
        return parts.hostname, parts.port

    # ---- clients -----------------------------------------------------------------------------------------------

    def post(self, path: str = "/generate", **options: Any) -> httpx.Response:
        with httpx.Client(base_url=self.url, timeout=60) as client:
            return client.post(path, **options)

    def ask(self, body: Any = CANARY) -> str:
        answer = self.post(json=body)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["text"]
        return text

    @asynccontextmanager
    async def clients(self) -> AsyncIterator[httpx.AsyncClient]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self.url, timeout=60, limits=limits) as client:
            yield client

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=30)

    def raw(self, request: bytes) -> bytes:
        """Send bytes, read what comes until the server closes."""
        with self.connect() as connection:
            connection.sendall(request)
            return read_all(connection)

    # ---- what must be true after every case --------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = asyncio.run(self.engine.stats())
        return found

    def idle(self) -> bool:
        stats = self.stats()
        return stats["running"] == stats["waiting"] == 0

    def settle(self) -> None:
        until(self.idle, "running = queued = 0")
        self.engine._core.scheduler.check()
        stats = self.stats()
        assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"], "a page is held by nobody"

    def check_after(self) -> None:
        began = time.monotonic()
        assert self.ask() == self.canary
        assert time.monotonic() - began < 2.0, "the canary was slow"
        self.settle()
        with suppress(AssertionError):
            until(lambda: not self._leaks(), "files, threads and children are back")
        assert not self._leaks(), self._leaks()
        assert httpx.get(self.url + "/health").status_code == 200

    def _leaks(self) -> list[str]:
        now, before = asdict(Footprint.now()), asdict(self.baseline)
        names = [t.name for t in threading.enumerate()]
        return [f"{name}: {now[name]}, was {before[name]}; {names}" for name in now if now[name] > before[name]]


def listeners(pid: int | str = "self") -> list[tuple[str, int]]:
    """Addresses that a process listens on, by its open files and the kernel's table."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            inodes.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                host, port = fields[1].split(":")
                found.append((socket.inet_ntoa(bytes.fromhex(host)[::-1]) if table == "tcp" else host, int(port, 16)))
    return found


def read_all(connection: socket.socket) -> bytes:
    data = bytearray()
    try:
        while part := connection.recv(65536):
            data += part
    except ConnectionResetError:
        data += b"<reset>"
    return bytes(data)
