"""A server of the soak's own, what it tells of itself, and a client that is much quicker than it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench import children

HERE = Path(__file__).parent
LOG = HERE.parent.parent / "build" / "soak.log"
"""What the servers say."""


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
