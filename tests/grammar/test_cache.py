"""The grammar cache: one compilation per constraint, bounded memory, a deadline, errors to those who asked."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest

from sglite.errors import GrammarError
from sglite.protocol import Constraint
from sglite.runtime.grammar.cache import MAX_SOURCE, GrammarCache


@dataclass
class FakeGrammar:
    source: str
    nbytes: int = 100
    min_tokens: int | None = None

    def matcher(self, budget=None):
        raise NotImplementedError


@dataclass
class FakeBackend:
    """Compiles anything; waits at ``gate`` for sources that start with "slow"."""

    name: str = "fake"
    kinds: frozenset[str] = frozenset({"regex"})
    gate: threading.Event = field(default_factory=threading.Event)
    compiled: list[str] = field(default_factory=list)

    def compile(self, constraint):
        if constraint.source.startswith("slow"):
            self.gate.wait(30)
        if constraint.source == "bad":
            raise GrammarError("bad", param="regex")
        self.compiled.append(constraint.source)
        return FakeGrammar(constraint.source)


@pytest.fixture
def backend():
    backend = FakeBackend()
    yield backend
    backend.gate.set()


def test_second_use_is_a_hit(backend):
    cache = GrammarCache(backend)
    first = cache.compile(Constraint("regex", "a"))
    assert cache.compile(Constraint("regex", "a")) is first
    assert cache.compile_async(Constraint("regex", "a")).done()
    assert (cache.stats.hits, cache.stats.misses, backend.compiled) == (2, 1, ["a"])


def test_equal_schemas_share_but_property_order_counts(backend):
    cache = GrammarCache(backend)
    sources = ['{"a": 1, "b": 2}', '{"a":1,\n"b":2}', '{"b":2,"a":1}']
    one, same, other = (cache.compile(Constraint("json_schema", source)) for source in sources)
    assert one is same
    assert other is not one


def test_those_who_wait_share_one_compilation(backend):
    cache = GrammarCache(backend)
    futures = [cache.compile_async(Constraint("regex", "slow")) for _ in range(3)]
    assert not futures[0].done()
    assert not futures[0].cancel()
    backend.gate.set()
    assert len({id(future.result(10)) for future in futures}) == 1
    assert backend.compiled == ["slow"]


def test_least_recently_used_goes_first(backend):
    cache = GrammarCache(backend, capacity=250)
    for source in "ab":
        cache.compile(Constraint("regex", source))
    cache.compile(Constraint("regex", "a"))
    cache.compile(Constraint("regex", "c"))
    assert cache.nbytes == 200
    assert cache.stats.evictions == 1
    cache.compile(Constraint("regex", "a"))
    cache.compile(Constraint("regex", "b"))
    assert backend.compiled == ["a", "b", "c", "b"]


def test_deadline_ends_one_request_only(backend):
    cache = GrammarCache(backend, deadline=0.05)
    slow = cache.compile_async(Constraint("regex", "slow"))
    assert cache.compile(Constraint("regex", "fast"))
    with pytest.raises(GrammarError) as caught:
        slow.result(10)
    assert (caught.value.kind, caught.value.param) == ("limit", "regex")
    assert cache.stats.refused == 1


def test_errors_are_not_kept(backend):
    cache = GrammarCache(backend)
    for _ in range(2):
        with pytest.raises(GrammarError):
            cache.compile(Constraint("regex", "bad"))
    assert cache.stats.refused == 2
    assert cache.stats.misses == 2


@pytest.mark.parametrize(
    ("kind", "source", "error_kind"),
    [
        ("json_schema", "{", "malformed"),
        ("json_schema", '{"minimum": NaN}', "malformed"),
        ("json_schema", '{"const": ' + "9" * 5000 + "}", "malformed"),
        ("json_schema", "[" * 30_000, "limit"),
        ("json_schema", '"\ud800"', "malformed"),
        ("json_schema", " " * (MAX_SOURCE + 1), "limit"),
        ("choices", "{}", "malformed"),
        ("choices", '["a", 1]', "malformed"),
        ("choices", "[]", "unsatisfiable"),
    ],
)
def test_broken_sources_are_refused_at_the_door(backend, kind, source, error_kind):
    cache = GrammarCache(backend)
    with pytest.raises(GrammarError) as caught:
        cache.compile(Constraint(kind, source))
    assert (caught.value.kind, caught.value.param) == (error_kind, kind)
    assert backend.compiled == []
