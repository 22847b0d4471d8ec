"""More clients than the engine can serve: how much is still answered, and how soon the others hear that it is not."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soak_server import HERE, Connection, Server, serving, settled


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
