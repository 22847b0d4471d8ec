"""A batch without a server: a file of requests in, a file of answers out, as ``sglite batch`` runs it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from sglite.errors import ConfigError, SgliteError
from sglite.protocol import Backend
from sglite.runtime.server.batchlines import BatchLine, Outcome, read_line, run_line, sort_key
from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.context import Caller, Context, Service
from sglite.runtime.server.failures import describe


async def run_file(
    backend: Backend, requests: list[BatchLine], out: Path, *, concurrency: int, done: Callable[[Outcome], None]
) -> Counter[str]:
    """Append each request's outcome to ``out`` as it comes, similar prompts together. How many went well and badly.

    ``done`` is told of every outcome.
    """
    context = Context(Service(backend, ServerConfig()), Caller())
    counts: Counter[str] = Counter()
    with out.open("a", encoding="utf-8") as file:
        async for outcome in _outcomes(sorted(requests, key=sort_key), context, concurrency):
            file.write(outcome.output + "\n")
            file.flush()
            counts["completed" if outcome.status == 200 else "failed"] += 1
            done(outcome)
    return counts


def read_requests(path: Path, out: Path, *, resume: bool) -> list[BatchLine]:
    """The requests of a file that ``out`` has no outcome for. Raises ConfigError where a file is not as it must be."""
    if out.exists() and not resume:
        raise ConfigError(f"{out} exists; give --resume to go on where it ends, or another file")
    known = _custom_ids(out) if out.exists() else set()
    found: dict[str, BatchLine] = {}
    with _opened(path) as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                line = _read(raw.strip(), f"{path}, line {number}")
                if line.custom_id in found:
                    raise ConfigError(f"{path}, line {number}: the custom_id {line.custom_id!r:.80} was used before")
                found[line.custom_id] = line
    return [line for custom_id, line in found.items() if custom_id not in known]


async def _outcomes(requests: list[BatchLine], context: Context, concurrency: int) -> AsyncIterator[Outcome]:
    waiting = iter(requests)
    results: asyncio.Queue[Outcome] = asyncio.Queue()

    async def work() -> None:
        for line in waiting:
            await results.put(await run_line(line, context))

    workers = [asyncio.create_task(work()) for _ in range(min(concurrency, len(requests)))]
    try:
        for _ in requests:
            yield await results.get()
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def _read(raw: bytes, where: str) -> BatchLine:
    try:
        return read_line(raw)
    except (SgliteError, RequestValidationError, HTTPException) as error:
        raise ConfigError(f"{where}: {describe(error).message}") from None


def _custom_ids(out: Path) -> set[str]:
    """Of the outcomes in a file that an earlier run began. A line without an end was being written: it is cut off."""
    content = out.read_bytes()
    whole, _, rest = content.rpartition(b"\n")
    if rest:
        out.write_bytes(whole + b"\n" if whole else b"")
    try:
        return {str(json.loads(line)["custom_id"]) for line in whole.splitlines() if line.strip()}
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{out} is not the output of a batch; give another file") from None


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from None
