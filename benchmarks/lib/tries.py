"""One workload on one side, once: how many programs it gets, how long they take, and what came of them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
from workloads import Workload, Writer
from workloads.base import Inputs, Prose

from lib.contestants import FailedError
from lib.hits import Hits, Ids, Recorder, hits
from lib.sides import Side
from lib.standings import Cell, Taken
from lib.watch import Watch, settle
from sglite.errors import SgliteError
from sglite.protocol import Chunk, GenerateRequest, Prompt

FOREIGN_LIMIT = 0.1
"""Cores."""
LEAST_SECONDS = 0.5
"""Below this the machine's own ticks are most of what is measured, so the watch says nothing."""
LEAST_SHARE = 0.25
"""Nobody gets a smaller share of a workload's programs."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The same for everybody. ``budget``: seconds that all programs of a workload may take by what the warm-up showed;
    who would take longer gets fewer. ``limit``: seconds after which they are cut off."""

    prose: Prose
    encode: Callable[[Prompt], Ids]
    quick: bool
    scale: float
    seed: int
    retries: int
    budget: float
    limit: float

    def count(self, work: Workload) -> int:
        return max(1, work.count.quick if self.quick else round(work.count.full * self.scale))

    def share(self, work: Workload, seconds_each: float | None) -> int:
        """How many programs a side gets that needs so long for each."""
        everything = self.count(work)
        if seconds_each is None or everything * seconds_each <= self.budget:
            return everything
        return max(1, round(everything * LEAST_SHARE), int(self.budget / seconds_each))


def warm_up(side: Side, works: list[Workload], terms: Terms) -> dict[str, float]:
    """Runs a part of each workload; seconds of each program then, more than it takes among many. What the quick form
    leaves out, for its length, is warmed up by the others. Who would get less than all shows again what it takes, lest
    a first call's price (compiling, loading) be held against it."""
    each = {}
    for work in works:
        if work.count.quick:
            each[work.name] = seconds_each(side, work, "warm-up", terms)
            if terms.share(work, each[work.name]) < terms.count(work):
                each[work.name] = min(each[work.name], seconds_each(side, work, "again", terms))
    return each


def seconds_each(side: Side, work: Workload, key: str, terms: Terms) -> float:
    programs = max(1, round(terms.count(work) * LEAST_SHARE))
    batch = work.inputs(Writer(terms.prose, f"{key} {work.name}"), programs)
    began = time.perf_counter()
    with limited(side, terms.limit) as backend, suppress(TimeIsOverError):
        work.program.run_batch(batch, backend=backend)
    return (time.perf_counter() - began) / programs


def measure(side: Side, work: Workload, programs: int, number: int, terms: Terms, cell: Cell) -> None:
    """A disturbed try is made again; when all were disturbed, the least disturbed counts, and is marked."""
    tries: list[Taken] = []
    while len(tries) <= terms.retries and not (tries and tries[-1].foreign <= FOREIGN_LIMIT):
        writer = Writer(terms.prose, f"{terms.seed} {work.name} {number} {len(tries)}")
        try:
            tries.append(one_try(side, work, programs, writer, terms))
        except (FailedError, SgliteError, httpx.HTTPError, OSError) as error:
            if tries:
                break
            cell.failure = str(error) if isinstance(error, FailedError) else f"{type(error).__name__}: {error}"
            return
    cell.take(min(tries, key=lambda each: each.foreign), len(tries) - 1, FOREIGN_LIMIT)


def one_try(side: Side, work: Workload, programs: int, writer: Writer, terms: Terms) -> Taken:
    """All at once, then some alone. Everybody's inputs are the same; who gets fewer gets the first ones. Raises
    FailedError for a program that failed."""
    together = work.inputs(writer, terms.count(work))[:programs]
    alone = work.inputs(writer, 1 if terms.quick else work.count.alone)
    side.flush()
    settle()
    recorder = Recorder(side.backend)
    watch, began = Watch(side.pid), time.perf_counter()
    states = finished(side, work, together, terms.limit, recorder)
    seconds = time.perf_counter() - began
    foreign = watch.foreign_cores() if seconds > LEAST_SECONDS else 0.0
    side.flush()
    walls = []
    for inputs in alone:
        began = time.perf_counter()
        states += finished(side, work, [inputs], terms.limit, side.backend)
        walls.append(time.perf_counter() - began)
    counted = hits(recorder.seen, terms.encode) if side.ours else Hits(0, 0, 0)
    pairs = [work.valid(state) for state in states]
    valid, checked = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
    tokens = sum(call.new_tokens for state in states for call in state.trace())
    rate, latency = len(together) / seconds, sum(walls) / len(walls)
    return Taken(seconds + sum(walls), len(together), rate, latency, foreign, counted, valid, checked, tokens)


def finished(side: Side, work: Workload, batch: Inputs, limit: float, backend: Any) -> list[Any]:
    """The states of a batch. Raises FailedError saying what prevented one of them."""
    states: list[Any] = []
    with limited(side, limit, backend) as bounded, suppress(TimeIsOverError):
        states = work.program.run_batch(batch, backend=bounded)
    failed = [error for state in states if (error := state.error()) is not None]
    if bounded.over:
        raise FailedError(f"cut off after {limit:g} s, when {len(states) - len(failed)} of {len(batch)} were done")
    if failed:
        raise FailedError(f"{type(failed[0]).__name__}: {failed[0]}")
    return states


class TimeIsOverError(Exception):
    """Of whatever was running then."""


class Limited:
    """A backend around another until it is told to stop; then what runs is cancelled and nothing new is begun."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._running: set[asyncio.Task[Any]] = set()
        self.over = False
        self.info, self.flush_cache = inner.info, inner.flush_cache

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        if self.over:
            raise TimeIsOverError
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            async for chunk in self._inner.generate(request):
                yield chunk
        except asyncio.CancelledError:
            if not self.over:
                raise
            task.uncancel()
            raise TimeIsOverError from None
        finally:
            self._running.discard(task)

    async def aclose(self) -> None:
        return

    def stop(self) -> None:
        """From any thread."""
        self.over = True
        for task in list(self._running):
            task.get_loop().call_soon_threadsafe(task.cancel)


@contextmanager
def limited(side: Side, seconds: float, backend: Any = None) -> Iterator[Limited]:
    bounded = Limited(side.backend if backend is None else backend)
    timer = threading.Timer(seconds, bounded.stop)
    timer.daemon = True
    timer.start()
    try:
        yield bounded
    finally:
        timer.cancel()
