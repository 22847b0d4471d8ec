"""The worker's side: an engine behind the socket, in a process that ends with its parent.

The event loop reads messages and gathers chunks; the engine computes on its own thread. All chunks that the loop
learns of in one turn, which is what one step of the engine gives, leave as one frame.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

from sglite.codec import decode, encode, encode_error
from sglite.errors import InvalidRequestError, RequestError, SgliteError, UnsupportedError
from sglite.protocol import Chunk, GenerateRequest
from sglite.runtime.garbage import keep_everything
from sglite.runtime.worker.joining import joined
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

if TYPE_CHECKING:
    from sglite.runtime.engine import Engine

log = logging.getLogger("sglite.worker")

Build = Callable[[Mapping[str, Any]], "Engine"]

BEAT_SECONDS = 0.5
_CLOSE_SECONDS = 3.0
_PR_SET_PDEATHSIG = 1


def main(build: Build | None = None) -> None:
    """Run a worker on the socket whose number is the first argument, for the parent whose id is the second."""
    end_with_parent(int(sys.argv[2]))
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal's, a service manager's: the parent drains, then we end
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    _run(_serve(socket.socket(fileno=int(sys.argv[1])), build or _engine))


def _run(main: Coroutine[Any, Any, None]) -> None:
    """On uvloop where there is one: the engine's thread wakes it without giving up the interpreter's lock."""
    if sys.platform == "win32":
        asyncio.run(main)
    else:
        import uvloop

        uvloop.run(main)


def end_with_parent(parent: int) -> None:
    """The kernel kills this process when its parent dies, also when it is stopped or stuck in a computation."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def _engine(options: Mapping[str, Any]) -> Engine:
    from sglite.runtime.engine import Engine

    return Engine(**options)


async def _serve(sock: socket.socket, build: Build) -> None:
    """Until the parent closes the socket. A worker that cannot be built says why and ends."""
    worker = _Worker(build)
    await asyncio.get_running_loop().create_unix_connection(lambda: worker.link, sock=sock)
    await worker.ended.wait()
    await worker.close()
    os._exit(0)  # a thread that still loads a model must not hold us up


class _Worker:
    def __init__(self, build: Build) -> None:
        self.link = Link(self._received, lambda error: self.ended.set())
        self.ended = asyncio.Event()
        self._build = build
        self._engine: Engine | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._chunks: list[tuple[int, Chunk]] = []
        self._failures: list[tuple[int, Mapping[str, Any]]] = []
        self._background: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Let the engine end in good order, if it does so soon."""
        if self._engine is not None:
            with suppress(Exception):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await self._engine.aclose()

    # ---- messages ----------------------------------------------------------------------------------------------

    def _received(self, message: Message) -> None:
        match message:
            case Start(options):
                self._spawn(self._load(options))
            case Submit(call, request):
                self._start(call, self._generate(call, request))
            case Cancel(call):
                if call in self._tasks:
                    self._tasks[call].cancel()
            case Ask():
                self._start(message.call, self._answer(message))
            case _:
                raise AssertionError(f"a parent sends no {type(message).__name__}")

    def _start(self, call: int, work: Coroutine[Any, Any, None]) -> None:
        self._tasks[call] = self._spawn(work)
        self._tasks[call].add_done_callback(lambda _: self._tasks.pop(call, None))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _load(self, options: Mapping[str, Any]) -> None:
        try:
            self._engine = await asyncio.to_thread(self._build, options)
            keep_everything()
            self.link.send(Ready(await self._engine.info()))
        except Exception as error:
            log.debug("the engine could not be built", exc_info=error)
            self.link.send(Refused(encode_error(error) if _typed(error) else encode_error(_unexpected(error))))
            return
        await self._beat(self._engine)

    async def _beat(self, engine: Engine) -> None:
        """The engine's own loop answers between two steps: that is the heartbeat."""
        heard, stats = time.monotonic(), await engine.stats()
        pending: asyncio.Task[dict[str, Any]] | None = None
        while True:
            self.link.send(Beat(time.monotonic() - heard, stats))
            pending = pending or asyncio.create_task(engine.stats())
            await asyncio.wait([pending], timeout=BEAT_SECONDS)
            if pending.done():
                heard, stats, pending = time.monotonic(), pending.result(), None
                await asyncio.sleep(BEAT_SECONDS)

    # ---- calls -------------------------------------------------------------------------------------------------

    async def _generate(self, call: int, request: GenerateRequest) -> None:
        assert self._engine is not None, "the parent waits for Ready"
        try:
            async with aclosing(self._engine.generate(request)) as found:
                async for chunk in joined(found) if request.whole else found:
                    self._tell(self._chunks, (call, chunk))
        except Exception as error:
            self._fail(call, error)

    async def _answer(self, ask: Ask) -> None:
        try:
            verb, method = VERBS[ask.verb], getattr(self._engine, ask.verb, None)
            if method is None:
                raise UnsupportedError(f"this engine has no {ask.verb}")
            pairs = zip(verb.arguments, ask.arguments, strict=True)
            arguments = [decode(kind, value, "the argument") for kind, value in pairs]
            count = len(arguments) - len(verb.keywords)
            value = await method(*arguments[:count], **dict(zip(verb.keywords, arguments[count:], strict=True)))
            self._flush()  # an abort's answer follows what it aborted
            self.link.send(Answer(ask.call, encode(value)))
        except Exception as error:
            self._fail(ask.call, error)

    def _fail(self, call: int, error: Exception) -> None:
        if not _typed(error):
            log.error("a call failed", exc_info=error)
        self._tell(self._failures, (call, encode_error(error)))

    def _tell(self, outgoing: list[Any], item: Any) -> None:
        if not self._chunks and not self._failures:
            asyncio.get_running_loop().call_soon(self._flush)
        outgoing.append(item)

    def _flush(self) -> None:
        if not self._chunks and not self._failures:
            return
        step = Step(tuple(self._chunks), tuple(self._failures))
        self._chunks.clear()
        self._failures.clear()
        try:
            self.link.send(step)
        except InvalidRequestError:
            self._send_apart(step)

    def _send_apart(self, step: Step) -> None:
        """One answer is too large for a frame: it fails, the others go on."""
        for call, chunk in step.chunks:
            try:
                self.link.send(Step(((call, chunk),)))
            except InvalidRequestError as error:
                if call in self._tasks:
                    self._tasks[call].cancel()
                self.link.send(Step((), ((call, encode_error(RequestError(f"the answer is too large: {error}"))),)))
        self.link.send(Step((), step.failures))


def _typed(error: Exception) -> bool:
    return isinstance(error, SgliteError)


def _unexpected(error: Exception) -> RequestError:
    return RequestError(f"the engine could not be started: {type(error).__name__}: {error}")
