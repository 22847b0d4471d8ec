"""Waiting across threads and event loops: one-shot wakers, and the loop on which states live.

A ``Signal`` needs no lock: whoever waits adds a waker and then looks again; whoever changes something changes it first
and then wakes.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable, Coroutine
from functools import lru_cache, partial
from typing import Any

from sglite.errors import ProgramError

_LAST_SECONDS = 2.0


class Signal:
    __slots__ = ("_wakers",)

    def __init__(self) -> None:
        self._wakers: list[Callable[[], None]] = []

    def notify(self) -> None:
        if self._wakers:
            wakers, self._wakers = self._wakers, []
            for wake in wakers:
                wake()

    def add(self, wake: Callable[[], None]) -> None:
        self._wakers.append(wake)

    def block_until(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """In a thread whose event loop, if it runs one, has no part in making it ready. False after ``timeout`` s."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not ready():
            lock = threading.Lock()
            lock.acquire()
            self.add(lock.release)
            if ready():
                break
            left = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
            if not lock.acquire(timeout=left):
                return ready()
        return True

    def when(self, ready: Callable[[], bool], act: Callable[[], None]) -> None:
        """Calls ``act`` once, as soon as it is ready: here and now, or by whoever makes it so."""
        once = [act]

        def look() -> None:
            if not ready():
                self.add(look)
            if ready():
                with contextlib.suppress(IndexError):  # somebody else was quicker
                    once.pop()()

        look()

    async def until(self, ready: Callable[[], bool]) -> None:
        """On any event loop."""
        while not ready():
            loop = asyncio.get_running_loop()
            future = loop.create_future()
            self.add(partial(_wake, loop, threading.get_ident(), future))
            if ready():
                return
            await future


def _wake(loop: asyncio.AbstractEventLoop, thread: int, future: asyncio.Future[None]) -> None:
    if threading.get_ident() == thread:
        _resolve(future)
    else:
        with contextlib.suppress(RuntimeError):  # that loop is closed: nobody waits there any more
            loop.call_soon_threadsafe(_resolve, future)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Home:
    """The event loop on which some states' tasks run, and its thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: int) -> None:
        self.loop = loop
        self.thread = thread
        self._working: set[asyncio.Task[Any]] = set()

    @property
    def here(self) -> bool:
        return threading.get_ident() == self.thread

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Runs ``function`` on the loop: at once when we are there, else as soon as it gets to it."""
        if self.here:
            function(*args)
            return
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError as error:
            raise ProgramError("the event loop of this program is closed") from error

    def start(self, coroutine: Coroutine[Any, Any, Any], then: Callable[[Any], None] | None = None) -> Any:
        """A task on the loop's thread, kept alive until it ends; then ``then`` is called with it."""
        task = self.loop.create_task(coroutine)
        self._working.add(task)
        if then is None:
            task.add_done_callback(self._working.discard)
        else:
            task.add_done_callback(partial(self._ended, then))
        return task

    def _ended(self, then: Callable[[Any], None], task: asyncio.Task[Any]) -> None:
        self._working.discard(task)
        then(task)

    async def close(self) -> None:
        """Cancels what was started here, and stops the loop when all of it has ended."""
        while self._working:
            for task in self._working:
                task.cancel()
            await asyncio.wait(self._working)
        self.loop.stop()

    def refuse_blocking(self, what: str) -> None:
        if self.here:
            raise ProgramError(f"{what} would block the event loop that has to produce it; await it instead")


def take_back_cancellation() -> None:
    """For a task that has caught its own cancellation and goes on."""
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()


@lru_cache(1)
def background() -> Home:
    """The loop shared by all programs that are plain functions; one daemon thread for the whole process."""
    loop = asyncio.new_event_loop()
    started: threading.Event = threading.Event()
    thread = threading.Thread(target=_serve, args=(loop, started), name="sglite-programs", daemon=True)
    thread.start()
    started.wait()
    assert thread.ident is not None
    home = Home(loop, thread.ident)
    atexit.register(_end, home, thread)
    return home


def _serve(loop: asyncio.AbstractEventLoop, started: threading.Event) -> None:
    asyncio.set_event_loop(loop)
    loop.call_soon(started.set)
    loop.run_forever()
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def _end(home: Home, thread: threading.Thread) -> None:
    """With the process: what still runs is cancelled and closes what it has open, instead of being torn off."""
    if thread.is_alive():  # not in a forked child
        asyncio.run_coroutine_threadsafe(home.close(), home.loop)
        thread.join(_LAST_SECONDS)


def running_home() -> Home:
    """The caller's own event loop as a home."""
    return Home(asyncio.get_running_loop(), threading.get_ident())


os.register_at_fork(after_in_child=background.cache_clear)  # the loop's thread does not survive a fork
