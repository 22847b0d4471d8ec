"""Those who do the works: a model in a process of its own, or a server. Asked for a batch, they give an outcome.

Starting one raises FailedError with its last words; so does a batch that it cannot do.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from lib.client import Client, Dialect
from lib.watch import peak_megabytes, tree
from lib.works import Batch, Outcome

START_SECONDS = 300
BATCH_SECONDS = 300
WORKERS = Path(__file__).parents[1] / "peers"


class FailedError(Exception):
    """A contestant that did not start, or could not do a batch."""


class Contestant(Protocol):
    """``pid`` is None for a server that somebody else started: then nobody knows what it uses."""

    @property
    def pid(self) -> int | None: ...

    @property
    def abilities(self) -> frozenset[str]: ...

    def run(self, batch: Batch) -> Outcome: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


_libc = ctypes.CDLL(None)


def _end_with_parent() -> None:
    """In the child: even a benchmark that is killed leaves no server behind. See prctl(2), PR_SET_PDEATHSIG."""
    _libc.prctl(1, signal.SIGTERM)


class Process:
    """A child whose stderr goes to a file, so that its last words can be quoted."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None, **pipes: Any) -> None:
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115  # closed by stop
        self.command = command
        # A session of its own, so that what it starts can be ended with it.
        pipes |= {"env": {**os.environ, **(environment or {})}, "stderr": self._log, "start_new_session": True}
        self.child = subprocess.Popen(command, preexec_fn=_end_with_parent, **pipes)

    def last_words(self) -> str:
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 4000))
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"

    def stop(self) -> None:
        descendants = tree(self.child.pid)[1:]
        self.child.terminate()
        try:
            self.child.wait(15)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        for pid in descendants:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        for pipe in (self.child.stdin, self.child.stdout, self._log):
            with suppress(OSError):  # what was never read
                if pipe is not None:
                    pipe.close()


class Worker:
    """A model behind ``peers/wire.py``, run by the interpreter that has its library."""

    def __init__(self, python: str, script: str, options: Mapping[str, Any]) -> None:
        command = [python, str(WORKERS / script), json.dumps(options)]
        self._process = Process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self.abilities = frozenset(self._read(START_SECONDS)["ready"])
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.child.pid

    def run(self, batch: Batch) -> Outcome:
        answer = self._ask({"run": [asdict(request) for request in batch.requests], "stream": batch.stream})
        return Outcome(answer["wall"], tuple(answer["tokens"]), tuple(answer["texts"]), answer["first"])

    def flush(self) -> None:
        self._ask({"flush": True})

    def close(self) -> None:
        self._process.stop()

    def _ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        with suppress(BrokenPipeError):  # then reading says why
            print(json.dumps(command), file=self._process.child.stdin, flush=True)
        return self._read(BATCH_SECONDS)

    def _read(self, seconds: float) -> dict[str, Any]:
        assert self._process.child.stdout is not None
        with _killed_after(seconds, self._process.child):
            line = self._process.child.stdout.readline()
        if not line:
            raise FailedError(self._process.last_words())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise FailedError(answer["error"])
        return answer


class Server:
    """An OpenAI-compatible server at ``url``; started with ``command`` where one is given."""

    def __init__(
        self,
        url: str,
        dialect: Dialect,
        command: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.abilities = dialect.abilities
        self.url = url
        self._process = Process(command, environment, stdout=subprocess.DEVNULL) if command else None
        self._client = Client(url, dialect, BATCH_SECONDS)
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.child.pid

    def run(self, batch: Batch) -> Outcome:
        return self._called(lambda: self._client.run(batch))

    def flush(self) -> None:
        self._called(self._client.flush)

    def close(self) -> None:
        self._client.close()
        if self._process is not None:
            self._process.stop()

    def _called(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # of the HTTP library, or an answer of another form: all mean "it cannot"
            raise FailedError(f"{type(error).__name__}: {error}") from error

    def _wait(self) -> None:
        deadline = time.monotonic() + (START_SECONDS if self._process else 0)
        while not self._client.ready():
            if self._process and self._process.child.poll() is not None:
                raise FailedError(self._process.last_words())
            if time.monotonic() >= deadline:
                raise FailedError("no answer to GET /v1/models")
            time.sleep(0.1)


def peak(contestant: Contestant) -> float | None:
    return None if contestant.pid is None else peak_megabytes(contestant.pid)


@contextmanager
def _killed_after(seconds: float, child: subprocess.Popen[str]) -> Any:
    """End a child that does not answer in time, so that whoever waits for its line gets an end of file."""
    timer = threading.Timer(seconds, child.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
