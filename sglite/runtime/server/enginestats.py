"""What the engine tells of itself, as Prometheus' families: counters, gauges, and shares made of two of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from sglite.errors import SgliteError
from sglite.protocol import Backend

_PATIENCE = 0.01
"""Seconds that a scrape waits for the engine. In process it answers between two steps, and those may be long."""

_GAUGES = {
    "running": "Sequences that are being computed",
    "waiting": "Sequences that wait for a place",
    "pages_total": "Pages of the KV pool",
    "pages_free": "Pages of the KV pool that hold nothing",
    "pages_cached": "Pages of the KV pool that only the prefix cache holds",
    "pages_protected": "Pages of the prefix cache that are in use or pinned",
    "grammar_cache_bytes": "Bytes of compiled constraints",
    "tree_nodes": "Nodes of the prefix cache's tree",
    "worker_silence": "Seconds since the engine's own loop was last heard of",
}
_COUNTERS = {
    "steps": "Steps of the engine",
    "admissions": "Sequences that got a place",
    "preemptions": "Sequences that gave their place to a more urgent one",
    "hit_tokens": "Prompt tokens found in the cache",
    "computed_tokens": "Positions computed",
    "evicted_pages": "Pages that the prefix cache gave up",
    "grammar_cache_hits": "Constraints found compiled",
    "grammar_compilations": "Constraints compiled, or refused",
    "grammar_compile_seconds": "Seconds spent compiling constraints",
    "grammar_evictions": "Compiled constraints that gave their place to others",
    "constrained_complete": "Samples under a constraint that ended with a complete answer",
    "constrained_failed": "Requests under a constraint for which no answer was found",
    "constrained_tokens": "Tokens of answers under a constraint",
    "constrained_forced_tokens": "Of them, those that the constraint forced without sampling",
    "constrained_rollbacks": "Times that tokens were taken back because of a constraint",
    "worker_restarts": "Times that the engine's process was started again",
}
_SHARES = {
    "kv_usage": ("Share of the KV pool that holds something", "pages_free", "pages_total", True),
    "cache_hit_rate": ("Share of prompt tokens found in the cache", "hit_tokens", "prompt_tokens", False),
}
"""Text, part, whole, and whether the part is what is missing."""


@runtime_checkable
class Measured(Protocol):
    """A backend that tells its own counters and gauges."""

    async def stats(self) -> Mapping[str, Any]: ...


class EngineStats(Collector):
    """Knows what the engine last told. A number that it does not tell is left out: unknown is not 0."""

    def __init__(self) -> None:
        self.values: Mapping[str, float] = {}
        self.refusals: Mapping[str, int] = {}
        self._asking: asyncio.Task[None] | None = None

    async def refresh(self, backend: Backend) -> None:
        """Ask, and wait a moment. An answer that comes later is there for whoever looks next."""
        if not isinstance(backend, Measured):
            return
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(backend))
        await asyncio.wait([self._asking], timeout=_PATIENCE)

    async def _ask(self, backend: Measured) -> None:
        try:
            told = await backend.stats()
        except SgliteError:  # it is down, or about to be: other metrics say so
            return
        self.values = {name: value for name, value in told.items() if type(value) in (int, float)}
        self.refusals = told.get("grammar_refusals", {})

    def collect(self) -> Iterable[Metric]:
        values = self.values
        for name, text in _GAUGES.items():
            if name in values:
                yield GaugeMetricFamily(f"sglite_{name}", text, values[name])
        for name, text in _COUNTERS.items():
            if name in values:
                yield CounterMetricFamily(f"sglite_{name}", text, values[name])
        if self.refusals:
            yield self._refusals()
        for name, (text, part, whole, missing) in _SHARES.items():
            if part in values and whole in values:
                share = values[part] / max(1, values[whole])
                yield GaugeMetricFamily(f"sglite_{name}", text, 1 - share if missing else share)

    def _refusals(self) -> Metric:
        family = CounterMetricFamily(
            "sglite_grammar_refusals", "Constraints refused, by the keyword at fault", labels=["keyword"]
        )
        for keyword, count in self.refusals.items():
            family.add_metric([keyword], count)
        return family

    def describe(self) -> Iterable[Metric]:
        return ()
