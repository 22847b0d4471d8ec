"""A server of our own in a child process, as a Backend: for programs that want a model apart from their process."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from types import TracebackType
from typing import IO, Any
from weakref import finalize

from sglite.errors import ConfigError, UnavailableError
from sglite.lang.backends.http import RuntimeEndpoint
from sglite.protocol import Chunk, GenerateRequest, ModelInfo

_READY = "sglite: serving at "
_GRACE = 15.0
"""Seconds that a child gets to end before it is killed."""


class Runtime:
    """``Runtime(model="smollm2-135m", **options)`` starts ``sglite serve`` on a free loopback port and waits for it.

    Options are those of the command, with underscores. ``model_path`` is SGLang's name for ``model``. The child ends
    with ``close()``, with the object, and with this process, however that ends. Raises ConfigError with the child's
    own words when it does not start.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        model_path: str | None = None,
        launch_timeout: float = 300.0,
        **options: Any,
    ) -> None:
        if model is not None and model_path is not None:
            raise ConfigError("model and model_path are the same; give one")
        name = model or model_path
        command = _command({**({"model": name} if name else {}), "port": 0, **options})
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._finalizer = finalize(self, _stop, self._child)
        try:
            self.url = _wait_until_ready(self._child, launch_timeout)
        except BaseException:
            self.close()
            raise
        self.endpoint = RuntimeEndpoint(self.url)

    @property
    def pid(self) -> int:
        return self._child.pid

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        chunks = self.endpoint.generate(request)
        async with aclosing(chunks):  # type: ignore[type-var]
            async for chunk in chunks:
                yield chunk

    async def info(self) -> ModelInfo:
        return await self.endpoint.info()

    async def flush_cache(self) -> None:
        await self.endpoint.flush_cache()

    async def aclose(self) -> None:
        await self.endpoint.aclose()
        self.close()

    def close(self) -> None:
        """End the child. Safe to call twice."""
        self._finalizer()

    shutdown = close

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _command(options: dict[str, Any]) -> list[str]:
    command = [sys.executable, "-m", "sglite", "serve", "--end-with-stdin"]
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            command += [f"--{flag}", str(value)]
    return command


def _wait_until_ready(child: subprocess.Popen[str], timeout: float) -> str:
    """The child's URL. What it writes to stderr before that is kept for the error, after that it is passed on."""
    assert child.stderr is not None
    found: list[str] = []
    words: deque[str] = deque(maxlen=20)
    ready = threading.Event()
    thread = threading.Thread(target=_read, args=(child.stderr, found, words, ready), daemon=True)
    thread.start()
    if not ready.wait(timeout):
        raise UnavailableError(f"the server did not start within {timeout:g} s: {' '.join(words)}")
    if not found:
        raise ConfigError(f"the server did not start: {' '.join(words) or 'it said nothing'}")
    return found[0]


def _read(stderr: IO[str], found: list[str], words: deque[str], ready: threading.Event) -> None:
    for line in stderr:
        if line.startswith(_READY):
            found.append(line.removeprefix(_READY).strip())
            ready.set()
        elif ready.is_set():
            sys.stderr.write(line)
        else:
            words.append(line.strip().removeprefix("sglite: error: "))
    ready.set()
    stderr.close()


def _stop(child: subprocess.Popen[str]) -> None:
    with suppress(OSError):
        child.terminate()
    try:
        child.wait(_GRACE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    if child.stdin is not None:
        child.stdin.close()
