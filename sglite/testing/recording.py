"""Record a run on a real backend into a file, and replay it later without one.

The file holds one JSON value a line: first what the backend said of its model, then each request with the chunks or the
error that answered it. A request is recognised by everything but its id and program, so programs replay in any order.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglite.codec import decode, decode_error, encode, encode_error
from sglite.errors import NotFoundError, RequestError
from sglite.protocol import Backend, Chunk, GenerateRequest, ModelInfo, end_program


def record(backend: Backend, path: str | Path) -> Recorder:
    """A backend that answers like ``backend`` and writes every exchange to ``path``, replacing what was there."""
    return Recorder(backend, Path(path))


def replay(path: str | Path) -> Replayer:
    """A backend that gives the answers recorded at ``path``. Raises NotFoundError where there is no such file."""
    return Replayer(Path(path))


class Recorder:
    """Every exchange is written as it ends, so a run that is cut short leaves what it had."""

    def __init__(self, backend: Backend, path: Path) -> None:
        self._backend = backend
        self._path = path
        self._lock = threading.Lock()
        self._informed = False
        path.write_text("", encoding="utf-8")

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        await self.info()
        chunks: list[Chunk] = []
        error: Exception | None = None
        try:
            async for chunk in self._backend.generate(request):
                chunks.append(chunk)
                yield chunk
        except Exception as failure:
            error = failure
            raise
        finally:
            answer = {"request": _key(request), "chunks": [encode(chunk) for chunk in chunks]}
            self._write({**answer, "error": encode_error(error)} if error is not None else answer)

    async def info(self) -> ModelInfo:
        info = await self._backend.info()
        if not self._informed:
            self._informed = True
            self._write({"info": encode(replace(info, details={}))})
        return info

    async def flush_cache(self) -> None:
        await self._backend.flush_cache()

    async def end_program(self, program: str, branch: str = "", *, namespace: str = "") -> None:
        await end_program(self._backend, program, branch, namespace=namespace)

    async def aclose(self) -> None:
        await self._backend.aclose()

    def _write(self, value: Any) -> None:
        line = json.dumps(value, ensure_ascii=False)
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


class Replayer:
    """Equal requests are answered in the order in which they were recorded."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._info: ModelInfo | None = None
        self._answers: dict[str, deque[Any]] = defaultdict(deque)
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            raise NotFoundError(f"no recording at {path}", param="path") from None
        for line in filter(None, lines):
            entry = json.loads(line)
            if "info" in entry:
                self._info = decode(ModelInfo, entry["info"])
            else:
                self._answers[_text(entry["request"])].append(entry)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        waiting = self._answers[_text(_key(request))]
        if not waiting:
            raise RequestError(f"{self._path.name} has no (further) answer to this request", request_id=request.id)
        entry = waiting.popleft()
        for chunk in entry["chunks"]:
            yield decode(Chunk, chunk)
        if "error" in entry:
            raise decode_error(entry["error"])

    async def info(self) -> ModelInfo:
        if self._info is None:
            raise RequestError(f"{self._path.name} is empty: nothing was recorded")
        return self._info

    async def flush_cache(self) -> None:
        return None

    async def aclose(self) -> None:
        return None


def _key(request: GenerateRequest) -> Any:
    return encode(replace(request, id="", program=None))


def _text(key: Any) -> str:
    return json.dumps(key, sort_keys=True)
