"""One worker process as its parent sees it: calls go in, chunks come out, and all end when the process does."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from sglite.codec import decode, decode_error, encode
from sglite.errors import OverloadedError, RequestError, SgliteError, UnavailableError
from sglite.protocol import Chunk, GenerateRequest, ModelInfo
from sglite.runtime.mailbox import Mailbox
from sglite.runtime.pace import Pace
from sglite.runtime.worker.config import WorkerConfig
from sglite.runtime.worker.wire import (
    VERBS,
    Answer,
    Ask,
    Beat,
    Cancel,
    Link,
    Message,
    Ready,
    Refused,
    Start,
    Step,
    Submit,
)

Item = Chunk | Answer | SgliteError

MAX_WAITING = 10_000
"""Chunks that may wait for one caller who does not take them; then the call ends with an error."""
_ENDS = 2
"""Answers that end in one turn of the event loop: each costs its caller a fraction of a millisecond."""
_GRACE = 5.0
"""Seconds that a worker gets to end by itself before it is killed."""


class WorkerProcess:
    """A started process. ``ready`` and ``ended`` are awaited by the supervisor; ``error`` says why it ended."""

    def __init__(self, process: subprocess.Popen[bytes], config: WorkerConfig) -> None:
        self.process = process
        self.info: asyncio.Future[ModelInfo] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()
        self.error: SgliteError | None = None
        self.stats: Mapping[str, Any] = {}
        self._config = config
        self._link = Link(self._received, self._lost)
        self._calls: dict[int, Mailbox[Item]] = {}
        self._ends = Pace(_ENDS)
        self._numbers = itertools.count()
        self._heard = time.monotonic()

    @classmethod
    async def start(cls, command: Sequence[str], options: Mapping[str, Any], config: WorkerConfig) -> WorkerProcess:
        """Run ``command``, which gets the socket's number and our process id as its last arguments."""
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = [*command, str(theirs.fileno()), str(os.getpid())]
            process = subprocess.Popen(arguments, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        worker = cls(process, config)
        await asyncio.get_running_loop().create_unix_connection(lambda: worker._link, sock=ours)
        worker._link.send(Start(options))
        return worker

    # ---- health ------------------------------------------------------------------------------------------------

    @property
    def silence(self) -> float:
        """Seconds since the engine's own loop was last heard of."""
        return time.monotonic() - self._heard

    @property
    def in_flight(self) -> int:
        return len(self._calls)

    # ---- calls -------------------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> tuple[int, Mailbox[Item]]:
        """Raises UnavailableError, OverloadedError, or InvalidRequestError for what cannot be sent."""
        return self._open(lambda call: Submit(call, request))

    def cancel(self, call: int) -> None:
        """Forget a call; if it still runs, the worker ends it."""
        if self._calls.pop(call, None) is not None:
            self._link.send(Cancel(call))

    def forget(self, call: int) -> None:
        """A call whose last chunk has come."""
        self._calls.pop(call, None)

    async def ask(self, verb: str, *arguments: Any) -> Any:
        """The verb's result; raises what it raised there."""
        call, items = self._open(lambda call: Ask(call, verb, tuple(encode(value) for value in arguments)))
        try:
            item = await items.take()
        finally:
            self.cancel(call)
        if isinstance(item, SgliteError):
            raise item
        assert isinstance(item, Answer)
        return decode(VERBS[verb].result, item.value)

    def _open(self, message: Any) -> tuple[int, Mailbox[Item]]:
        if self.ended.is_set():
            raise died(self.process.returncode)
        if self._link.waiting_bytes > self._config.max_pending_bytes:
            raise OverloadedError("the engine does not keep up with reading requests; try again later")
        call = next(self._numbers)
        self._link.send(message(call))
        self._calls[call] = Mailbox()
        return call, self._calls[call]

    # ---- messages ----------------------------------------------------------------------------------------------

    def _received(self, message: Message) -> None:
        match message:
            case Step(chunks, failures):
                for call, chunk in chunks:
                    if chunk.finish is None and not self._ends.waiting:  # all in their order
                        self._deliver(call, chunk)
                    else:
                        self._ends.soon(partial(self._deliver, call, chunk))
                for call, error in failures:
                    self._ends.soon(partial(self._end, call, decode_error(error)))
            case Answer():  # an abort's answer follows what it aborted
                self._ends.soon(partial(self._end, message.call, message))
            case Beat(silence, stats):
                self._heard, self.stats = time.monotonic() - silence, stats
            case Ready(info):
                self._heard = time.monotonic()
                self.info.set_result(info)
            case Refused(error):
                self.error = decode_error(error)
                self._link.close()
            case _:
                raise AssertionError(f"a worker sends no {type(message).__name__}")

    def _deliver(self, call: int, item: Item) -> None:
        items = self._calls.get(call)
        if items is None:  # its caller left, and the news of it is under way
            return
        if len(items) < MAX_WAITING:
            items.put(item)
        else:
            self.cancel(call)
            items.put(RequestError("the answer was not read in time"))

    def _end(self, call: int, item: Item) -> None:
        self._deliver(call, item)
        self._calls.pop(call, None)

    def _lost(self, error: Exception | None) -> None:
        """Every call ends, once, in the same turn of the loop in which the end is known."""
        self._ends.finish()
        if self.error is None and isinstance(error, SgliteError):
            self.error = error
        self.ended.set()
        if not self.info.done():
            self.info.cancel()
        for call in list(self._calls):
            self._end(call, UnavailableError("the engine's process ended; the server starts it again: try again"))

    # ---- the end -----------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """SIGKILL, which also ends what is stopped or stuck."""
        self.process.kill()

    async def stop(self) -> int:
        """Close the connection, upon which the worker ends, or is made to. The process's exit code."""
        self._link.close()
        try:
            return await asyncio.shield(asyncio.to_thread(self._wait))
        except asyncio.CancelledError:
            self.process.kill()
            raise

    def _wait(self) -> int:
        try:
            return self.process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def died(code: int | None) -> UnavailableError:
    """How the end of a worker reads: by which signal, or with which exit code."""
    how = "" if code is None else f" (signal {-code})" if code < 0 else f" (exit code {code})"
    return UnavailableError(f"the engine's process ended{how}")
