"""Prometheus metrics, measured at the one seam every route passes: the backend.

Labels are bounded: they name outcomes and routes that we know, never what a client wrote.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from sglite.errors import AbortedError, InvalidRequestError, OverloadedError
from sglite.protocol import Backend, Chunk, GenerateRequest, ModelInfo, Usage
from sglite.runtime.server.enginestats import EngineStats
from sglite.runtime.server.histogram import LoopHistogram
from sglite.runtime.server.streams import closing
from sglite.runtime.server.traces import CallRecord, kind_of

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_LAGS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1)
_PROGRAMS_KEPT = 10_000


class Metrics:
    """All metrics of one app, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.ttft = self._seconds("time_to_first_token", "From a request's start to its first token")
        self.itl = self._seconds("inter_token_latency", "Between one chunk of a streamed sample and the next")
        self.tpot = self._seconds("time_per_output_token", "A sample's decoding time per token after the first")
        self.duration = self._seconds("request_duration", "From a request's start to its end")
        self.queue = self._seconds("queue", "Waiting before the first step")
        self.requests = self._counter("requests", "Requests by how they ended", "outcome")
        self.constrained = self._counter(
            "constrained_requests", "Requests under a grammar, by outcome; cut: the tokens ran out first", "outcome"
        )
        self.prompt = self._counter("prompt_tokens", "Tokens of prompts")
        self.cached = self._counter("cached_tokens", "Tokens of prompts found in the prefix cache")
        self.generated = self._counter("generation_tokens", "Tokens generated")
        self.forced = self._counter("forced_tokens", "Tokens that a grammar forced without sampling")
        self.rollbacks = self._counter("rollbacks", "Tokens taken back because of a grammar")
        self.retractions = self._counter("retractions", "Sequences that gave up their place for others")
        self.tool_calls = self._counter("tool_calls", "Calls of tools")
        self.recalled = self._counter(
            "recalled_answers", "Earlier answers that stood in a prompt with their own tokens"
        )
        self.rewritten = self._counter(
            "rewritten_histories", "Earlier answers that stood after another text than before"
        )
        self.http = self._counter("http_responses", "Answers by route and status", "route", "status")
        self.programs = self._counter("programs", "Programs seen")
        self.branches = self._counter("program_branches", "Branches of programs seen")
        self.in_flight = Gauge("sglite_requests_in_flight", "Requests inside the backend", registry=self.registry)
        self.ready = Gauge("sglite_ready", "1 while requests are taken", registry=self.registry)
        self.lag = LoopHistogram("sglite_event_loop_lag_seconds", "How late the event loop is", _LAGS, self.registry)
        self.engine = EngineStats()
        self.registry.register(self.engine)
        self._seen: OrderedDict[str, set[str]] = OrderedDict()

    async def exposition(self, backend: Backend) -> bytes:
        """The text that Prometheus scrapes."""
        await self.engine.refresh(backend)
        return generate_latest(self.registry)

    def count(self, usage: Usage, *, first: bool) -> None:
        """A sample's usage; the prompt counts with the request's first."""
        if first:
            self.prompt.inc(usage.prompt_tokens)
            self.cached.inc(usage.cached_tokens)
            self.queue.observe(usage.queue_time)
        self.generated.inc(usage.completion_tokens)
        self.forced.inc(usage.forced_tokens)
        self.rollbacks.inc(usage.rollbacks)
        self.retractions.inc(usage.retractions)

    def see(self, request: GenerateRequest) -> None:
        """Remember which programs and branches there are; only the latest programs, to bound the memory."""
        if request.program is None:
            return
        program, branch = request.program.program, request.program.branch
        if program not in self._seen:
            self._seen[program] = set()
            self.programs.inc()
            if len(self._seen) > _PROGRAMS_KEPT:
                self._seen.popitem(last=False)
        if branch not in self._seen[program]:
            self._seen[program].add(branch)
            self.branches.inc()

    def _seconds(self, name: str, text: str) -> LoopHistogram:
        return LoopHistogram(f"sglite_{name}_seconds", text, _SECONDS, self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"sglite_{name}", text, labels, registry=self.registry)


Listener = Callable[[CallRecord], None]


class MeteredBackend:
    """A backend around another that measures every request, and tells ``listeners`` of its end."""

    def __init__(self, inner: Backend, metrics: Metrics, listeners: Sequence[Listener] = ()) -> None:
        self.inner = inner
        self._metrics = metrics
        self._listeners = listeners

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        metrics, watch = self._metrics, _Watch(request, self._metrics)
        metrics.see(request)
        outcome = "ok"
        with metrics.in_flight.track_inprogress():
            try:
                async with closing(self.inner.generate(request)) as chunks:
                    async for chunk in chunks:
                        watch.chunk(chunk)
                        yield chunk
            except BaseException as error:
                outcome = _outcome(error)
                raise
            finally:
                record = watch.ended(outcome)
                for listener in self._listeners:
                    listener(record)

    async def info(self) -> ModelInfo:
        return await self.inner.info()

    async def flush_cache(self) -> None:
        await self.inner.flush_cache()

    async def aclose(self) -> None:
        await self.inner.aclose()


class _Watch:
    """The times of one request."""

    def __init__(self, request: GenerateRequest, metrics: Metrics) -> None:
        self._metrics = metrics
        self._request = request
        self._began = time.time()
        self._started = time.perf_counter()
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._usages: list[Usage] = []
        self._cut = False

    def chunk(self, chunk: Chunk) -> None:
        now = time.perf_counter()
        if chunk.ids or chunk.text:
            self._token(chunk.index, now)
        if chunk.finish is not None:
            self._cut |= chunk.finish.reason == "length"
            if chunk.usage is not None:
                self._metrics.count(chunk.usage, first=not self._usages)
                self._usages.append(chunk.usage)
                self._per_token(chunk.index, now, chunk.usage.completion_tokens)

    def _token(self, index: int, now: float) -> None:
        if not self._first:
            self._metrics.ttft.observe(now - self._started)
        if index in self._last and not self._request.whole:
            self._metrics.itl.observe(now - self._last[index])
        self._first.setdefault(index, now)
        self._last[index] = now

    def _per_token(self, index: int, now: float, tokens: int) -> None:
        if index in self._first and tokens > 1:
            self._metrics.tpot.observe((now - self._first[index]) / (tokens - 1))

    def ended(self, outcome: str) -> CallRecord:
        wall = time.perf_counter() - self._started
        self._metrics.duration.observe(wall)
        self._metrics.requests.labels(outcome).inc()
        if self._request.constraint is not None:
            self._metrics.constrained.labels("cut" if outcome == "ok" and self._cut else outcome).inc()
        return self._record(wall, ("length" if self._cut else "stop") if outcome == "ok" else outcome)

    def _record(self, wall: float, finish: str) -> CallRecord:
        request, program = self._request, self._request.program
        return CallRecord(
            program=program.program if program else request.id,
            branch=program.branch if program else "",
            request_id=request.id,
            namespace=request.namespace,
            kind=kind_of(request),
            constrained=request.constraint is not None,
            last=program is None or program.last,
            began=self._began,
            ttft=min(self._first.values()) - self._started if self._first else None,
            wall=wall,
            finish=finish,
            usage=summed(self._usages),
        )


def summed(usages: Sequence[Usage]) -> Usage:
    """Of a request's samples: the prompt is one, however many samples it has."""
    if not usages:
        return Usage()
    new, forced = (sum(getattr(usage, name) for usage in usages) for name in ("completion_tokens", "forced_tokens"))
    return replace(usages[0], completion_tokens=new, forced_tokens=forced)


def _outcome(error: BaseException) -> str:
    if isinstance(error, GeneratorExit | asyncio.CancelledError | AbortedError):
        return "aborted"
    if isinstance(error, InvalidRequestError | OverloadedError):
        return "refused"
    return "failed"
