"""Compiled grammars, kept by use and bounded by bytes; compilation off the caller's thread with a deadline."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, get_args

from sglite.errors import GrammarError
from sglite.protocol import Constraint, ConstraintKind
from sglite.runtime.grammar.base import Grammar, GrammarBackend

MAX_SOURCE = 64 * 1024
DEADLINE = 1.5
"""In seconds: a caller is told within 2, and a library that holds the interpreter's lock lets no alarm through."""
T = TypeVar("T")
Key = tuple[str, str, str]
"""Kind, source and whitespace of a constraint."""


@dataclass(slots=True)
class CacheStats:
    """Counters since the start; ``compile_seconds`` is the sum over all compilations, ``refusals`` counts by the
    keyword of a schema that was at fault, or by the kind of constraint or "other"."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    refused: int = 0
    compile_seconds: float = 0.0
    refusals: Counter[str] = field(default_factory=Counter)

    def refuse(self, error: BaseException) -> None:
        self.refused += 1
        self.refusals[keyword_of(error)] += 1


def keyword_of(error: BaseException) -> str:
    """The last keyword in a refusal's pointer, else the kind of constraint or "other": a bounded set of words."""
    if not isinstance(error, GrammarError) or error.param not in _KINDS:
        return "other"
    if error.param != "json_schema" or not error.pointer:
        return str(error.param)
    from sglite.runtime.grammar.lower import KEYWORDS  # only where schemas are compiled, and its libraries with it

    return next((word for word in reversed(error.pointer.split("/")) if word in KEYWORDS), "json_schema")


_KINDS = frozenset(get_args(ConstraintKind))


class GrammarCache:
    """Least recently used grammars go first when more than ``capacity`` bytes are held. Safe from any thread.

    A backend belongs to one tokenizer and one engine version, so neither needs to be in the key. A compilation that
    takes longer than ``deadline`` seconds ends its own request only; its thread runs on until it is done.
    """

    def __init__(
        self, backend: GrammarBackend, *, capacity: int = 256 << 20, deadline: float = DEADLINE, threads: int = 2
    ) -> None:
        self.backend = backend
        self.stats = CacheStats()
        self._capacity = capacity
        self._deadline = deadline
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="grammar", initializer=_stand_back)
        self._beside = ThreadPoolExecutor(threads, thread_name_prefix="grammar-check", initializer=_stand_back)
        self._lock = threading.Lock()
        self._grammars: OrderedDict[Key, Grammar] = OrderedDict()
        self._bytes = 0
        self._pending: dict[Key, Future[Grammar]] = {}

    @property
    def nbytes(self) -> int:
        return self._bytes

    def counters(self) -> dict[str, Any]:
        """For metrics: numbers, and ``grammar_refusals`` as numbers by keyword."""
        stats = self.stats
        return {
            "grammar_cache_hits": stats.hits,
            "grammar_compilations": stats.misses,
            "grammar_compile_seconds": stats.compile_seconds,
            "grammar_cache_bytes": self._bytes,
            "grammar_evictions": stats.evictions,
            "grammar_refused": stats.refused,
            "grammar_refusals": dict(stats.refusals),
        }

    def compile(self, constraint: Constraint) -> Grammar:
        """Waits for it; raises GrammarError, of kind "limit" at the deadline. Not for the engine thread."""
        return self.compile_async(constraint).result()

    def compile_async(self, constraint: Constraint) -> Future[Grammar]:
        """A future that is done at once on a hit, and within the deadline otherwise, with a Grammar or GrammarError."""
        try:
            key = canonical(constraint)
        except GrammarError as error:
            self.stats.refuse(error)
            return _failed(error)
        with self._lock:
            if key in self._grammars:
                self.stats.hits += 1
                self._grammars.move_to_end(key)
                return _done(self._grammars[key])
            if key not in self._pending:
                self.stats.misses += 1
                self._pending[key] = self._start(key, replace(constraint, source=key[1]))
            return self._pending[key]

    def beside(self, work: Callable[[], T]) -> Future[T]:
        """Do long work on a grammar (a search, a check) as compilations are done, away from the engine; it may wait
        for compilations."""
        return self._beside.submit(work)

    def close(self) -> None:
        for pool in (self._pool, self._beside):
            pool.shutdown(wait=False, cancel_futures=True)

    def _start(self, key: Key, constraint: Constraint) -> Future[Grammar]:
        answer: Future[Grammar] = Future()
        answer.set_running_or_notify_cancel()  # shared by all who ask for it, so nobody may cancel it
        alarm = threading.Timer(self._deadline, self._expire, (key, answer))
        alarm.daemon = True
        alarm.start()
        self._pool.submit(self._run, key, constraint, answer, alarm)
        return answer

    def _run(self, key: Key, constraint: Constraint, answer: Future[Grammar], alarm: threading.Timer) -> None:
        started = time.perf_counter()
        grammar: Grammar | None = None
        error: BaseException | None = None
        try:
            if not answer.done():
                grammar = self.backend.compile(constraint)
        except BaseException as caught:
            error = caught
        alarm.cancel()
        with self._lock:
            self.stats.compile_seconds += time.perf_counter() - started
            if grammar is not None:
                self._store(key, grammar)
        self._settle(key, answer, grammar, error)

    def _expire(self, key: Key, answer: Future[Grammar]) -> None:
        message = f"compiling the grammar takes longer than {self._deadline:g} s; make it smaller"
        self._settle(key, answer, None, GrammarError(message, kind="limit", param=key[0]))

    def _settle(self, key: Key, answer: Future[Grammar], grammar: Grammar | None, error: BaseException | None) -> None:
        with self._lock:
            if self._pending.get(key) is not answer:
                return
            del self._pending[key]
            if error is not None:
                self.stats.refuse(error)
        if grammar is not None:  # outside the lock: it runs the callbacks of those who wait
            answer.set_result(grammar)
        else:
            answer.set_exception(error)

    def _store(self, key: Key, grammar: Grammar) -> None:
        old = self._grammars.pop(key, None)
        self._bytes += grammar.nbytes - (old.nbytes if old else 0)
        self._grammars[key] = grammar
        while self._bytes > self._capacity and len(self._grammars) > 1:
            _, evicted = self._grammars.popitem(last=False)
            self._bytes -= evicted.nbytes
            self.stats.evictions += 1


def _stand_back() -> None:
    """Let this thread compute only when those of the engine leave a processor idle, or nearly so."""
    if sys.platform == "linux":  # elsewhere a thread has no priority of its own
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)


def canonical(constraint: Constraint) -> Key:
    """The kind and a source that is equal for constraints that mean the same to the letter.

    The order of a schema's keys is kept: properties are generated in that order. Raises GrammarError for a source
    that is too long or not the JSON it must be.
    """
    kind, source = constraint.kind, constraint.source
    if len(source) > MAX_SOURCE:
        raise GrammarError(f"{kind} is longer than {MAX_SOURCE} characters", kind="limit", param=kind)
    if constraint.whitespace != "spaced" and kind not in ("json_schema", "json_object"):
        raise GrammarError(f"{kind} has no whitespace to choose; leave it out", param=kind)
    if kind in ("json_schema", "choices", "structural_tag"):
        source = json.dumps(_json(kind, source), separators=(",", ":"), ensure_ascii=False)
    return kind, "" if kind == "json_object" else source, constraint.whitespace


def _json(kind: str, source: str) -> object:
    try:
        value = json.loads(source, parse_constant=_not_json)
        source.encode()
    except RecursionError:
        raise GrammarError(f"{kind} is nested too deeply", kind="limit", param=kind) from None
    except ValueError as error:  # also what is not Unicode, and integers of thousands of digits
        raise GrammarError(f"{kind} is not valid JSON: {error}", param=kind) from None
    if kind == "choices":
        return _choices(value)
    return value


def _choices(value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(choice, str) for choice in value):
        raise GrammarError("choices must be a JSON list of strings", param="choices")
    if not value:
        raise GrammarError("choices must not be empty", kind="unsatisfiable", param="choices")
    return value


def _not_json(word: str) -> object:
    raise ValueError(f"{word} is not JSON")


def _done(grammar: Grammar) -> Future[Grammar]:
    future: Future[Grammar] = Future()
    future.set_result(grammar)
    return future


def _failed(error: GrammarError) -> Future[Grammar]:
    future: Future[Grammar] = Future()
    future.set_exception(error)
    return future
