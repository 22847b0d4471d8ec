"""sglite with one idea taken away at a time, after the SGLang paper's ablations.

"full" is everything. Ideas of the engine are switched off by its options, those of the language by a backend in between
that changes the requests. The KV pool is small, so that the order of service matters.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import sglite as sgl
from lib.lineup import MODEL
from lib.sides import Around, Entry, OneAtATime, Side, flush
from sglite.protocol import Backend, GenerateRequest
from sglite.runtime import assembly
from sglite.runtime.radix import PrefixCache
from sglite.runtime.tree import Lease, Namespace

KV_TOKENS = 16_384
FULL = {"policy": "program", "kv_tokens": KV_TOKENS}


def ablations(options: dict[str, Any]) -> Iterator[Entry]:
    full = {**FULL, **options}
    yield Entry("full", lambda: _engine("full", full, ours=True))
    yield Entry("no cache", lambda: _engine("no cache", {**full, "prefix_cache": False}))
    yield Entry("flat cache", lambda: _flat(full))
    yield Entry("fcfs", lambda: _engine("fcfs", {**full, "policy": "fcfs"}))
    yield Entry("random order", lambda: _around("random order", {**full, "policy": "fcfs"}, _shuffled))
    yield Entry("no parallelism", lambda: _around("no parallelism", full, OneAtATime))
    yield Entry("no hints", lambda: _around("no hints", full, _unhinted))
    yield Entry("no jump-forward", lambda: _engine("no jump-forward", {**full, "jump_forward": False}))


def _engine(name: str, options: dict[str, Any], *, ours: bool = False) -> Side:
    engine = sgl.Engine(model=MODEL, **options)
    return Side(name, ours, engine, lambda: flush(engine), engine.close)


def _around(name: str, options: dict[str, Any], wrap: Any) -> Side:
    engine = sgl.Engine(model=MODEL, **options)
    return Side(name, False, wrap(engine), lambda: flush(engine), engine.close)


def _unhinted(inner: Backend) -> Backend:
    """The engine sees requests, not programs."""
    return Around(inner, lambda request: replace(request, program=None))


def _shuffled(inner: Backend) -> Backend:
    """Priorities decide before anything else, so random ones make a random order."""
    dice = random.Random(0)

    def change(request: GenerateRequest) -> GenerateRequest:
        return replace(request, priority=dice.randrange(1000))

    return Around(inner, change)


class FlatCache(PrefixCache):
    """A table of whole sequences, no tree: a prompt hits only a beginning that was a sequence of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._entries: set[bytes] = set()
        self._lengths: set[int] = set()

    def match(self, namespace: Namespace, tokens: Sequence[int], limit: int | None = None) -> Lease:
        return super().match(namespace, tokens, self._entry(tokens, limit))

    def probe(self, namespace: Namespace, tokens: Sequence[int], limit: int | None = None) -> int:
        return super().probe(namespace, tokens, self._entry(tokens, limit))

    def insert(self, lease: Lease, tokens: Sequence[int], pages: list[int]) -> list[int]:
        length = len(tokens) // self.page_size * self.page_size
        self._entries.add(array("i", tokens[:length]).tobytes())
        self._lengths.add(length)
        return super().insert(lease, tokens, pages)

    def _entry(self, tokens: Sequence[int], limit: int | None) -> int:
        most = len(tokens) if limit is None else limit
        for length in sorted(self._lengths, reverse=True):
            if length <= most and array("i", tokens[:length]).tobytes() in self._entries:
                return length
        return 0


def _flat(options: dict[str, Any]) -> Side:
    tree, assembly.PrefixCache = assembly.PrefixCache, FlatCache  # type: ignore[misc]  # the one place that makes it
    try:
        return _engine("flat cache", options)
    finally:
        assembly.PrefixCache = tree  # type: ignore[misc]
