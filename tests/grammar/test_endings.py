"""How strings may end where what is allowed next does not tell, and ways out that need it."""

from __future__ import annotations

import json
import re

import jsonschema
import numpy as np
import pytest
from conftest import drive
from test_budget import TEXT, closed, never_ends

from sglite.runtime.grammar.endings import Endings, ending

EMAIL = r"^[a-z\d_\.-]+@([a-z\d\.-]+\.)+[a-z]+$"
BRANCH = {name: {"required": ["name"], "properties": {"name": {"enum": [name]}}} for name in ("http", "sql", "auth")}
SCHEMAS = {
    "somewhere": closed({"version": {"type": "string", "pattern": r"\d+\.\d+\.\d+-?.*"}, "name": TEXT}),
    "looks alike": closed({"mail": {"type": "string", "pattern": EMAIL}}),
    "long": closed({"text": {"type": "string", "minLength": 300, "maxLength": 500}, "name": TEXT}),
    "names": {
        "type": "object",
        "minProperties": 2,
        "propertyNames": {"anyOf": [{"pattern": "^[^-]*-[0-9]$"}, {"const": "x"}]},
        "additionalProperties": {"type": "integer"},
    },
    "judged at the end": closed(
        {
            "failure": {"oneOf": [*BRANCH.values(), {"type": "string", "minLength": 1, "pattern": "^(?!a).*$"}]},
            "n": TEXT,
        }
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_budget_gives_a_valid_answer(bench, name):
    grammar = bench.compile("json_schema", json.dumps(SCHEMAS[name]))
    least = grammar.min_tokens
    assert least is not None
    for budget in (least, least + 5, 2 * least, least + 120):
        text, matcher = drive(bench, grammar, np.random.default_rng(budget), budget=budget, pick=never_ends)
        assert matcher.accepting, (budget, text)
        jsonschema.validate(json.loads(text), SCHEMAS[name])


@pytest.mark.parametrize(
    ("pattern", "begun"),
    [(EMAIL, "foo"), (EMAIL, "foo@bar"), (r"\d+\.\d+", "a1."), ("[^a]{3}$", "a"), ("^(foo|bar)$", "b"), ("é+z$", "xé")],
)
def test_an_ending_makes_the_pattern_match(pattern, begun):
    rest = ending(pattern, begun)
    assert rest
    assert not re.search(pattern, begun)
    assert re.search(pattern, begun + rest)


def test_no_ending_where_nothing_can_follow_or_nothing_must():
    assert ending("^[a-z]+$", "A") is None
    assert ending("^[a-z]+$", "a") == ""
    assert list(Endings(("^[a-z]+$",)).of(b"a")) == []
    assert list(Endings(('^a"b$',)).of(b"a")) == [b'\\"b"']
    assert list(Endings(("^ab$",)).of(b"a\\")) == []


def test_a_budget_gone_too_far_looks_but_a_few_times(bench, monkeypatch):
    """A key of many tokens that its pattern refuses is given up at once, not token by token."""
    grammar = bench.compile("json_schema", json.dumps(SCHEMAS["names"]))
    looks = []
    inner = type(grammar._exits).search
    monkeypatch.setattr(type(grammar._exits), "search", lambda *args: looks.append(1) or inner(*args))
    text, matcher = drive(bench, grammar, np.random.default_rng(2), budget=250, pick=never_ends)
    assert matcher.accepting
    jsonschema.validate(json.loads(text), SCHEMAS["names"])
    assert len(looks) < 40
