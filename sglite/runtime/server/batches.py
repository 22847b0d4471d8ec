"""Batches: files of requests, run at low priority, that survive the server's end. The states are OpenAI's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from sglite.errors import InvalidRequestError, SgliteError
from sglite.runtime.server.batchlines import BatchLine, failed_line, read_line, run_line, sort_key
from sglite.runtime.server.context import Caller, Context, Service, new_id
from sglite.runtime.server.failures import describe
from sglite.runtime.server.store import Line, Shown, Store

PRIORITY = -1_000_000
"""Below every interactive request."""
MAX_LINES = 50_000
MAX_LINE = 1 << 20
MAX_ERRORS = 100
_LATER = (429, 503)
_PAUSE = 1.0
"""Seconds before a request that found the engine full is tried again."""
_STAMPS = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def new_batch(endpoint: str, input_file_id: str, window: str, metadata: Any) -> Shown:
    now = int(time.time())
    return {
        "id": new_id("batch"),
        "object": "batch",
        "endpoint": endpoint,
        "errors": None,
        "input_file_id": input_file_id,
        "completion_window": window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": now + int(window.removesuffix("h")) * 3600,
        **{f"{name}_at": None for name in _STAMPS},
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": metadata,
    }


class BatchRunner:
    """Runs one batch after the other, each with several requests at once. ``start`` goes on where the last server
    ended; ``stop`` leaves what is not done for the next one."""

    def __init__(self, service: Service, store: Store) -> None:
        self._service = service
        self.store = store
        self._queue: asyncio.Queue[tuple[str, Shown]] = asyncio.Queue()
        self._cancelled: set[str] = set()
        self._workers: dict[str, list[asyncio.Task[None]]] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        for entry in await asyncio.to_thread(self.store.unfinished):
            self._queue.put_nowait(entry)
        self._task = asyncio.create_task(self._run(), name="sglite-batches")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def submit(self, owner: str, batch: Shown) -> None:
        await asyncio.to_thread(self.store.add_batch, owner, batch)
        self._queue.put_nowait((owner, batch))

    async def cancel(self, owner: str, batch_id: str) -> Shown:
        """Raises InvalidRequestError for a batch that has ended."""
        batch = await asyncio.to_thread(self.store.batch, owner, batch_id)
        if batch["status"] not in ("validating", "in_progress", "finalizing", "cancelling"):
            raise InvalidRequestError(f"the batch is {batch['status']}; there is nothing to cancel", param="batch_id")
        self._cancelled.add(batch_id)
        for worker in self._workers.get(batch_id, ()):
            worker.cancel()
        if batch["status"] != "cancelling":
            batch = await self._to(batch, "cancelling")
        return batch

    # ---- one batch

    async def _run(self) -> None:
        while True:
            owner, batch = await self._queue.get()
            try:
                await self._batch(owner, batch)
            except Exception as error:
                await self._fail(batch, [_problem("server_error", describe(error).message)])
            finally:
                self._workers.pop(batch["id"], None)
                self._cancelled.discard(batch["id"])

    async def _batch(self, owner: str, batch: Shown) -> None:
        if batch["status"] == "validating":
            content = await asyncio.to_thread(self.store.content, owner, batch["input_file_id"])
            lines, problems = await asyncio.to_thread(_validated, content, batch["endpoint"])
            if problems:
                await self._fail(batch, problems)
                return
            await asyncio.to_thread(self.store.set_lines, batch["id"], lines)
            if batch["id"] not in self._cancelled:
                batch = await self._to(batch, "in_progress")
        if batch["status"] == "in_progress":
            await self._lines(owner, batch)
        await self._finish(owner, batch)

    async def _lines(self, owner: str, batch: Shown) -> None:
        """Run what has no result yet, until all have one, the batch is cancelled, or its time is up."""
        content = await asyncio.to_thread(self.store.content, owner, batch["input_file_id"])
        pending = iter(await asyncio.to_thread(self.store.pending, batch["id"]))
        context = Context(self._service, Caller(owner), priority=PRIORITY)
        count = self._service.config.batch_concurrency
        workers = [asyncio.create_task(self._work(batch["id"], content, pending, context)) for _ in range(count)]
        self._workers[batch["id"]] = workers
        try:
            if batch["id"] not in self._cancelled:
                await asyncio.wait(workers, timeout=max(0.0, batch["expires_at"] - time.time()))
        finally:
            for worker in workers:
                worker.cancel()
            results = await asyncio.gather(*workers, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _work(self, batch_id: str, content: Path, pending: Iterable[Line], context: Context) -> None:
        for line in pending:
            request = await asyncio.to_thread(_read, content, line)
            while (outcome := await run_line(request, context)).status in _LATER:
                await asyncio.sleep(_PAUSE)
            ok = outcome.status == 200
            await asyncio.to_thread(self.store.finish_line, batch_id, line.number, ok, outcome.output)

    async def _finish(self, owner: str, batch: Shown) -> None:
        cancelled = batch["id"] in self._cancelled or batch["status"] == "cancelling"
        left = await asyncio.to_thread(self.store.pending, batch["id"])
        if left and not cancelled:
            await asyncio.to_thread(self._expire, owner, batch, left)
        if not cancelled and batch["status"] != "finalizing":
            batch = await self._to(batch, "finalizing")
        batch = {**batch, **await asyncio.to_thread(self._write_files, owner, batch)}
        await self._to(batch, "cancelled" if cancelled else "expired" if left else "completed")

    def _expire(self, owner: str, batch: Shown, left: Iterable[Line]) -> None:
        content = self.store.content(owner, batch["input_file_id"])
        for line in left:
            output = failed_line(_read(content, line).custom_id, "batch_expired", "the completion window ended first")
            self.store.finish_line(batch["id"], line.number, False, output)

    def _write_files(self, owner: str, batch: Shown) -> Shown:
        """The files of results and errors, under ids that follow from the batch's: written twice they are the same."""
        found: Shown = {}
        for name, ok in (("output", True), ("error", False)):
            outputs = self.store.outputs(batch["id"], ok=ok)
            if outputs:
                file_id = f"file-{name}-{batch['id'].removeprefix('batch-')}"
                self.store.write_file(file_id, owner, f"{batch['id']}_{name}.jsonl", "batch_output", outputs)
                found[f"{name}_file_id"] = file_id
        return found

    async def _fail(self, batch: Shown, problems: list[dict[str, Any]]) -> None:
        await self._to({**batch, "errors": {"object": "list", "data": problems[:MAX_ERRORS]}}, "failed")

    async def _to(self, batch: Shown, status: str) -> Shown:
        changed = {**batch, "status": status, f"{status}_at": int(time.time())}
        await asyncio.to_thread(self.store.save_batch, changed)
        return changed


def _validated(content: Path, endpoint: str) -> tuple[list[Line], list[dict[str, Any]]]:
    """The lines of a file, or what is wrong with them."""
    lines: list[Line] = []
    problems: list[dict[str, Any]] = []
    seen: set[str] = set()
    for number, offset, raw in _numbered(content):
        try:
            request = _acceptable(raw, endpoint, seen)
        except (SgliteError, RequestValidationError, HTTPException) as error:
            failure = describe(error)
            problems.append(_problem(failure.code or "invalid_request", failure.message, number, failure.param))
        else:
            lines.append(Line(number, offset, len(raw), sort_key(request)))
        if len(problems) >= MAX_ERRORS or len(lines) > MAX_LINES:
            break
    if len(lines) > MAX_LINES:
        problems.append(_problem("too_many_requests", f"a batch may have {MAX_LINES} requests"))
    if not lines and not problems:
        problems.append(_problem("empty_file", "the file holds no requests"))
    return lines, problems


def _problem(code: str, message: str, line: int | None = None, param: str | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "line": line, "param": param}


def _acceptable(raw: bytes, endpoint: str, seen: set[str]) -> BatchLine:
    """Raises InvalidRequestError and kin for a line that this batch cannot run."""
    if len(raw) > MAX_LINE:
        raise InvalidRequestError(f"a line may have {MAX_LINE} bytes")
    request = read_line(raw)
    if request.url != endpoint:
        raise InvalidRequestError(f"the batch is for {endpoint}", param="url")
    if request.custom_id in seen:
        raise InvalidRequestError(f"the custom_id {request.custom_id!r:.80} was used before", param="custom_id")
    seen.add(request.custom_id)
    return request


def _numbered(content: Path) -> Iterable[tuple[int, int, bytes]]:
    """(number from 1, offset, text) of each line that is not empty."""
    offset = 0
    with content.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                yield number, offset, raw.rstrip()
            offset += len(raw)


def _read(content: Path, line: Line) -> BatchLine:
    with content.open("rb") as file:
        file.seek(line.offset)
        return read_line(file.read(line.length))
