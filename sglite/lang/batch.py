"""Many runs of one program: bodies on a bounded pool, everything else on the shared loop."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from sglite.errors import ProgramError
from sglite.lang.bodies import run_in_task, run_in_thread
from sglite.lang.foresight import NOTHING_FORESEEN, Foresight, foresee
from sglite.lang.options import Options
from sglite.lang.prefix import warm
from sglite.lang.state import ProgramState
from sglite.lang.waiting import Signal, background
from sglite.protocol import Backend

if TYPE_CHECKING:
    from sglite.lang.program import Program

Arguments = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional and keyword arguments of one run."""

_IN_FLIGHT = 1024


def run_batch(
    program: Program,
    batch: Any,
    backend: Backend,
    num_threads: int | str,
    options: Options,
    progress_bar: bool,
    *,
    eager: bool,
) -> Iterator[ProgramState]:
    """The states in order, each as soon as it and those before it are done; ``eager`` says that somebody waits for the
    first ones. Raises ProgramError before any runs."""
    if not isinstance(batch, list | tuple):
        raise ProgramError(f"run_batch takes a list of dicts or tuples of arguments, not {type(batch).__name__}")
    calls = [_arguments(program, each) for each in batch]
    foresight = foresee(program) if len(calls) > 1 else NOTHING_FORESEEN
    rows = list(enumerate(calls))
    if len(rows) > _IN_FLIGHT and not eager:
        rows.sort(key=lambda row: _beginning(program, foresight, row[1]))
    states = _Batch(program, rows, backend, options, foresight, *_limits(num_threads)).states()
    return _with_progress(states, len(calls), program.name) if progress_bar else states


def _arguments(program: Program, each: Any) -> Arguments:
    if isinstance(each, Mapping):
        call: Arguments = (), each
    elif isinstance(each, list | tuple):
        call = each, {}
    else:
        raise ProgramError(f"each set of arguments must be a dict or a tuple, not {type(each).__name__}")
    program.arguments(*call)
    return call


def _beginning(program: Program, foresight: Foresight, call: Arguments) -> list[str]:
    """The runtime puts together what begins alike of the requests that it has; a larger batch comes sorted by this."""
    arguments = program.arguments(*call).arguments
    return [str(arguments.get(name)) for name in foresight.leading]


def _limits(num_threads: int | str) -> tuple[int, int]:
    """How many functions run at once, and how many programs are unfinished at once."""
    if num_threads == "auto":
        return max(96, 16 * (os.cpu_count() or 1)), _IN_FLIGHT
    if isinstance(num_threads, bool) or not isinstance(num_threads, int) or num_threads < 1:
        raise ProgramError(f'num_threads must be "auto" or a number of at least 1, not {num_threads!r}')
    return num_threads, num_threads


class _Batch:
    """Threads (for plain functions) or tasks (for ``async def``) that take one set of arguments after the other.

    A thread is busy only while the function runs; what the function leaves running counts against ``_slots``.
    """

    def __init__(
        self,
        program: Program,
        rows: list[tuple[int, Arguments]],
        backend: Backend,
        options: Options,
        foresight: Foresight,
        threads: int,
        in_flight: int,
    ) -> None:
        self._program = program
        self._backend = backend
        self._options = options
        self._foresight = foresight
        self._waiting = deque(rows)
        self._results: list[ProgramState | None] = [None] * len(rows)
        self._running: dict[int, ProgramState] = {}
        self._threads = min(threads, len(rows))
        self._tasks = min(in_flight, len(rows))
        self._slots = threading.Semaphore(in_flight)
        self._done = Signal()
        self._stopped = False
        self._home = background()

    def states(self) -> Iterator[ProgramState]:
        self._home.refuse_blocking("run_batch")
        try:
            self._begin()
            for index in range(len(self._results)):
                self._done.block_until(lambda index=index: self._results[index] is not None)  # type: ignore[misc]
                state, self._results[index] = self._results[index], None
                assert state is not None
                yield state
        finally:
            self._stop()

    def _begin(self) -> None:
        if len(self._results) > 1:
            asyncio.run_coroutine_threadsafe(warm(self._program, self._backend), self._home.loop).result()
        if self._program.is_async:
            for _ in range(self._tasks):
                self._home.call(self._home.start, self._work_in_task())
            return
        for number in range(self._threads):
            work = contextvars.copy_context().run
            name = f"sglite-batch-{number}"
            threading.Thread(target=work, args=(self._work_in_thread,), name=name, daemon=True).start()

    def _work_in_thread(self) -> None:
        self._slots.acquire()
        while (taken := self._take()) is not None:
            index, state, arguments = taken
            run_in_thread(self._program.func, state, arguments)
            branch = state._branch
            branch.progress.when(branch.is_idle, partial(self._finish_in_thread, index))
            self._slots.acquire()
        self._slots.release()

    async def _work_in_task(self) -> None:
        while (taken := self._take()) is not None:
            index, state, arguments = taken
            await self._home.start(run_in_task(self._program.func, state, arguments))
            await state.wait()
            self._finish(index)

    def _take(self) -> tuple[int, ProgramState, inspect.BoundArguments] | None:
        try:
            index, call = self._waiting.popleft()
        except IndexError:
            return None
        state, arguments = self._program.prepare(
            *call, self._options, self._backend, self._home, foresight=self._foresight
        )
        self._running[index] = state
        if self._stopped:
            state.cancel()
        return index, state, arguments

    def _finish(self, index: int) -> None:
        self._results[index] = self._running.pop(index)
        self._done.notify()

    def _finish_in_thread(self, index: int) -> None:
        self._finish(index)
        self._slots.release()

    def _stop(self) -> None:
        """At the end, or when the reader leaves early: what still runs is aborted."""
        self._stopped = True
        self._waiting.clear()
        for state in list(self._running.values()):
            state.cancel()


def _with_progress(states: Iterator[ProgramState], total: int, title: str) -> Iterator[ProgramState]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        yield from progress.track(states, total=total)
