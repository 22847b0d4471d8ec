"""Ends: of a server that is told to stop, and of streams whose clients leave."""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from soak_server import Connection, Lost, Server, serving


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
