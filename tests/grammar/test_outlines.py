"""The second mask engine: the same answers on what both can do, and limits that hold."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from conftest import drive

from sglite.errors import GrammarError
from sglite.protocol import Constraint
from sglite.runtime.grammar.guard import GuardedBackend
from sglite.runtime.grammar.outlines_backend import OutlinesBackend

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "n": {"type": "integer"}},
    "required": ["kind", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def outlines(bench):
    masks = OutlinesBackend(bench.vocabulary)
    yield GuardedBackend(masks)
    masks.close()


@pytest.mark.parametrize(
    ("kind", "source", "texts"),
    [
        ("regex", "[0-9]+(\\.[0-9]+)?", ["1", "1.5", "", "1.", "12"]),
        ("regex", "^a{2,3}b?$", ["aa", "aaab", "a", "aaaa"]),
        ("choices", '["foo", "foobar", "a.b"]', ["foo", "foobar", "foob", "a.b", "axb"]),
        (
            "json_schema",
            json.dumps(SCHEMA),
            ['{"kind": "a", "n": 1}', '{"kind":"b","n":-3}', '{"kind": "c", "n": 1}', "{}"],
        ),
    ],
)
def test_both_engines_agree(bench, outlines, kind, source, texts):
    one, other = bench.compile(kind, source), outlines.compile(Constraint(kind, source))
    assert [bench.accepts(one, text) for text in texts] == [bench.accepts(other, text) for text in texts]


def test_masks_of_walks_agree(bench, outlines):
    rng = np.random.default_rng(0)
    for source in ("[ab]{1,4}c|name", "[0-9]{4}-[0-9]{2}(:x)?"):
        one, other = bench.compile("regex", source).matcher(), outlines.compile(Constraint("regex", source)).matcher()
        while not one.terminated:
            allowed = bench.allowed(one)
            assert allowed == bench.allowed(other)
            id = int(rng.choice(sorted(allowed)))
            assert one.accept([id])
            assert other.accept([id])
        assert other.accepting == one.accepting


def test_rollback_and_eos(bench, outlines):
    matcher = outlines.compile(Constraint("regex", "ab?")).matcher()
    assert matcher.accept(bench.ids("a"))
    before = bench.allowed(matcher)
    assert set(bench.eos) <= before
    assert matcher.accept([bench.eos[0]])
    assert not matcher.accept(bench.ids("b"))
    matcher.rollback(1)
    assert bench.allowed(matcher) == before


def test_answers_fit_their_budget(bench, outlines):
    grammar = outlines.compile(Constraint("json_schema", json.dumps(SCHEMA)))
    text, matcher = drive(bench, grammar, np.random.default_rng(0), budget=grammar.min_tokens)
    assert matcher.accepting
    assert json.loads(text)["kind"] in ("a", "b")


def test_unknown_keywords_are_refused_by_name(outlines):
    with pytest.raises(GrammarError, match="minimum") as caught:
        outlines.compile(Constraint("json_schema", '{"type": "integer", "minimum": 3}'))
    assert caught.value.kind == "unsupported"


def test_a_hostile_pattern_ends_in_time_and_the_next_one_works(bench):
    masks = OutlinesBackend(bench.vocabulary, seconds=1.0)
    backend = GuardedBackend(masks)
    started = time.monotonic()
    with pytest.raises(GrammarError) as caught:
        backend.compile(Constraint("regex", '"[^"]{0,400}"[a-z]{0,400}.{0,400}'))
    assert caught.value.kind == "limit"
    assert time.monotonic() - started < 20
    assert bench.accepts(backend.compile(Constraint("regex", "ab")), "ab")
    masks.close()
