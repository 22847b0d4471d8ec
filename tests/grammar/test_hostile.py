"""Hostile constraints end in a GrammarError or are served, soon, and never reach anybody else."""

from __future__ import annotations

import json
import random
import time

import pytest

from sglite.errors import GrammarError
from sglite.protocol import Constraint
from sglite.runtime.grammar.cache import GrammarCache


def chain(n: int) -> dict:
    """Every step doubles what a naive check would look at."""
    defs = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(n)}
    return {"$ref": "#/$defs/d0", "$defs": defs | {f"d{n}": {"type": "array", "uniqueItems": True}}}


def deep(n: int) -> str:
    return '{"items":' * n + "{}" + "}" * n


NAMED = {
    "in itself": ("json_schema", '{"$ref": "#"}'),
    "round about": ("json_schema", '{"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"anyOf": [{"$ref": "#"}]}}}'),
    "a thousand deep": ("json_schema", deep(1000)),
    "doubling": ("json_schema", json.dumps(chain(30))),
    "100,000 values": ("json_schema", json.dumps({"enum": list(range(100_000))})),
    "5,000 values": ("json_schema", json.dumps({"enum": list(range(5_000))})),
    "many properties": ("json_schema", json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(1500)}})),
    "many conditions": (
        "json_schema",
        json.dumps({"allOf": [{"if": {"required": [f"a{i}"]}, "then": {"required": [f"b{i}"]}} for i in range(200)]}),
    ),
    "backtracking": ("json_schema", '{"type": "string", "pattern": "^(?!x)((a+)+)+$"}'),
    "elsewhere": ("json_schema", '{"$ref": "http://127.0.0.1:1/x"}'),
    "counted": ("regex", "((a{1,100}){1,100}){1,100}"),
    "long dots": ("regex", ".{0,60000}x"),
    "nested groups": ("regex", "(" * 5000 + "a" + ")" * 5000),
    "alternatives": ("regex", "|".join(f"{i}.*{i}" for i in range(2000))),
    "left recursion": ("ebnf", 'start: start "a" | start start | "b"'),
    "empty loops": ("ebnf", 'start: ("a"*)*\n'),
    "deep gbnf": ("ebnf", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000),
    "huge choice": ("choices", json.dumps(["x" * 60_000])),
}


@pytest.fixture(scope="module")
def cache(bench):
    cache = GrammarCache(bench.backend)
    yield cache
    cache.close()


def attempt(bench, cache, kind: str, source: str) -> tuple[str, float]:
    """What came of compiling it and asking for the first mask, and the seconds it took."""
    started = time.monotonic()
    try:
        matcher = cache.compile(Constraint(kind, source)).matcher(64)
        bench.allowed(matcher)
        matcher.forced()
        outcome = "served"
    except GrammarError as error:
        assert len(str(error)) < 1000
        outcome = error.kind
    return outcome, time.monotonic() - started


@pytest.mark.parametrize("name", NAMED)
def test_named(bench, cache, name):
    outcome, seconds = attempt(bench, cache, *NAMED[name])
    assert outcome in ("served", "malformed", "unsupported", "unsatisfiable", "limit")
    assert seconds < 10  # 2 s alone on a core; the tests share theirs


@pytest.mark.parametrize("name", ["in itself", "round about", "a thousand deep", "100,000 values", "elsewhere"])
def test_what_must_be_refused(bench, cache, name):
    outcome, _ = attempt(bench, cache, *NAMED[name])
    assert outcome != "served"


def random_schema(rng: random.Random, depth: int) -> object:
    if depth == 0 or rng.random() < 0.2:
        return rng.choice([{"type": "string"}, {"type": "integer"}, True, False, {}, {"enum": [1, "a"]}, {"$ref": "#"}])
    inner = lambda: random_schema(rng, depth - 1)  # noqa: E731
    parts = {
        "properties": lambda: {rng.choice("abc"): inner() for _ in range(rng.randint(0, 3))},
        "required": lambda: rng.sample("abc", rng.randint(0, 2)),
        "items": inner,
        "anyOf": lambda: [inner() for _ in range(rng.randint(1, 3))],
        "oneOf": lambda: [inner() for _ in range(rng.randint(1, 3))],
        "allOf": lambda: [inner() for _ in range(rng.randint(1, 2))],
        "not": inner,
        "if": inner,
        "then": inner,
        "additionalProperties": inner,
        "patternProperties": lambda: {rng.choice(["a", "^b", "(a|b)+"]): inner()},
        "propertyNames": inner,
        "uniqueItems": lambda: True,
        "contains": inner,
        "minItems": lambda: rng.choice([0, 1, 1000, 10**9, -1, "x"]),
        "maxLength": lambda: rng.choice([0, 3, 10**9]),
        "pattern": lambda: rng.choice(["(a+)+$", "a{0,999}", "(?=a)b", "[", "\\1", "(x*)*y"]),
        "minimum": lambda: rng.choice([0, 1e308, -5, "x"]),
        "dependentRequired": lambda: {"a": ["b", "c"]},
        "unevaluatedProperties": inner,
    }
    return {name: parts[name]() for name in rng.sample(sorted(parts), rng.randint(1, 4))}


def test_generated_schemas(bench, cache):
    """Whatever they are, the outcome is typed, and what is served can begin."""
    rng = random.Random(11)
    outcomes = [attempt(bench, cache, "json_schema", json.dumps(random_schema(rng, 4))) for _ in range(150)]
    assert max(seconds for _, seconds in outcomes) < 10
    assert {"served", "malformed"} <= {outcome for outcome, _ in outcomes}


NEVER = {"type": "integer", "minimum": 5, "maximum": 1}


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        (NEVER, ""),
        ({"type": "object", "properties": {"n": NEVER}, "required": ["n"]}, "/properties/n"),
        ({"type": "array", "minItems": 1, "items": {"allOf": [{"type": "string"}, {"type": "null"}]}}, "/items"),
    ],
)
def test_a_contradiction_is_named_where_it_stands(cache, schema, pointer):
    with pytest.raises(GrammarError) as caught:
        cache.compile(Constraint("json_schema", json.dumps(schema)))
    assert (caught.value.kind, caught.value.pointer) == ("unsatisfiable", pointer)
