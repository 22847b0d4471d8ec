"""Never truncated: whatever the budget, a constrained answer is complete when it is used up."""

from __future__ import annotations

import json

import jsonschema
import numpy as np
import pytest
from conftest import drive

from sglite.errors import GrammarError
from sglite.protocol import Constraint

TEXT, INTEGER = {"type": "string"}, {"type": "integer"}


def closed(properties: dict, **more) -> dict:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **more,
    }


SCHEMAS = {
    "record": closed({"name": TEXT, "age": INTEGER, "ok": {"type": "boolean"}}),
    "optional parts": {
        "type": "object",
        "properties": {"a": closed({"x": TEXT, "y": closed({"z": INTEGER})}), "b": TEXT},
    },
    "recursive": {
        "$ref": "#/$defs/tree",
        "$defs": {"tree": closed({"name": TEXT, "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}}})},
    },
    "counted": {"type": "array", "items": {"type": "string", "minLength": 3}, "minItems": 2},
    "pattern": closed(
        {"date": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}$"}, "n": {"type": "integer", "minimum": 100}}
    ),
    "unique": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 2},
    "anything": {},
    "date-time": closed({"at": {"type": "string", "format": "date-time"}}),
    "choice": {"anyOf": [closed({"kind": {"const": "long"}, "a": TEXT, "b": TEXT}), {"type": "null"}]},
}


def never_ends(bench, allowed, rng):
    """A model that goes on as long as it is let."""
    tokens = bench.masks.tokens.bytes_of
    going_on = [id for id in allowed if tokens[id] and not set(tokens[id]) & set(b'"}]')]
    return int(rng.choice(going_on or allowed))


def opens(bench, allowed, rng):
    """A model that begins as much as it can."""
    tokens = bench.masks.tokens.bytes_of
    opening = [id for id in allowed if set(tokens[id]) & set(b"{[,") and b'"' not in tokens[id][:1]]
    return int(rng.choice(opening if opening and rng.random() < 0.7 else allowed))


@pytest.mark.parametrize("pick", [never_ends, opens, None], ids=["never ends", "opens", "likes endings"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_budget_gives_a_valid_answer(bench, name, pick):
    schema = SCHEMAS[name]
    grammar = bench.compile("json_schema", json.dumps(schema))
    least = grammar.min_tokens
    assert least is not None
    rng = np.random.default_rng(3)
    for budget in (least, least + 1, least + 2, least + 7, 2 * least, 2 * least + 30):
        text, matcher = drive(bench, grammar, rng, budget=budget, pick=pick)
        assert matcher.accepting, (budget, text)
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    ("kind", "source", "text"),
    [
        ("choices", '["foobar", "foo", "name"]', "foo"),
        ("json_schema", json.dumps(SCHEMAS["record"]), '{"name":"","age":0,"ok":true}'),
        ("json_schema", json.dumps(SCHEMAS["choice"]), "null"),
        ("json_object", "", "{}"),
        ("json_schema", '{"type": "array", "items": {"type": "integer"}, "minItems": 3}', "[0,0,0]"),
    ],
)
def test_the_minimum_is_no_more_than_a_short_answer_needs(bench, kind, source, text):
    grammar = bench.compile(kind, source)
    assert grammar.min_tokens is not None
    assert grammar.min_tokens <= len(bench.ids(text))


def test_a_budget_below_the_minimum_names_it(bench):
    grammar = bench.compile("json_schema", json.dumps(SCHEMAS["record"]))
    with pytest.raises(GrammarError, match=f" {grammar.min_tokens}$") as caught:
        grammar.matcher(grammar.min_tokens - 1)
    assert (caught.value.kind, caught.value.param) == ("limit", "max_tokens")


def test_a_large_budget_changes_nothing(bench):
    grammar = bench.compile("json_schema", json.dumps(SCHEMAS["record"]))
    rng, twin = np.random.default_rng(5), np.random.default_rng(5)
    for _ in range(5):
        text, matcher = drive(bench, grammar, rng, budget=2000)
        same, _ = drive(bench, grammar, twin, limit=2000)
        assert text == same
        assert not matcher.shortened


@pytest.mark.parametrize("name", ["record", "unique", "date-time", "pattern", "recursive"])
def test_a_budget_that_is_not_reached_never_speaks(bench, name):
    """Also where answers are judged, and the way out of a place may not be found."""
    grammar = bench.compile("json_schema", json.dumps(SCHEMAS[name]))
    rng = np.random.default_rng(9)
    for _ in range(6):
        text, matcher = drive(bench, grammar, rng, budget=400, limit=400)
        if len(bench.masks.tokens.fewest(text.encode()) or ()) < 150 and len(text) < 250:
            assert not matcher.shortened, text


def test_shortened_says_that_the_budget_spoke(bench):
    grammar = bench.compile("json_schema", json.dumps(SCHEMAS["record"]))
    _, matcher = drive(bench, grammar, np.random.default_rng(1), budget=grammar.min_tokens + 3, pick=never_ends)
    assert matcher.shortened
    assert matcher.accepting


def test_strings_are_cut_between_characters(bench):
    grammar = bench.compile("json_schema", json.dumps(closed({"name": TEXT})))

    def foreign(bench, allowed, rng):
        high = [id for id in allowed if bench.masks.tokens.bytes_of[id][:1] > b"\x7f"]
        return int(rng.choice(high or allowed))

    rng = np.random.default_rng(2)
    for budget in range(grammar.min_tokens, grammar.min_tokens + 12):
        text, matcher = drive(bench, grammar, rng, budget=budget, pick=foreign)
        assert matcher.accepting
        assert "\ufffd" not in text


def test_forced_tokens_leave_a_way_out(bench):
    grammar = bench.compile("json_schema", json.dumps(SCHEMAS["record"]))
    for budget in range(grammar.min_tokens, grammar.min_tokens + 10):
        matcher, count = grammar.matcher(budget), 0
        rng = np.random.default_rng(budget)
        while not matcher.terminated:
            jump = matcher.forced()
            ids = jump or [never_ends(bench, sorted(bench.allowed(matcher)), rng)]
            assert matcher.accept(ids)
            count += len(ids) - matcher.retreat()
            assert count <= budget
        assert matcher.accepting


def test_clones_keep_their_own_budget(bench):
    grammar = bench.compile("json_schema", json.dumps(SCHEMAS["record"]))
    matcher = grammar.matcher(grammar.min_tokens)
    twin = matcher.clone()
    for one in (matcher, twin):
        count = 0
        while not one.terminated:
            assert one.accept([min(bench.allowed(one))])
            assert one.retreat() == 0
            count += 1
        assert count == grammar.min_tokens


@pytest.mark.parametrize("whitespace", ["compact", "pretty"])
def test_budgets_hold_with_any_whitespace(bench, whitespace):
    grammar = bench.backend.compile(Constraint("json_schema", json.dumps(SCHEMAS["optional parts"]), whitespace))
    least = grammar.min_tokens
    rng = np.random.default_rng(5)
    for budget in (least, least + 1, 2 * least, 40):
        text, _ = drive(bench, grammar, rng, budget=budget)
        assert jsonschema.Draft202012Validator(SCHEMAS["optional parts"]).is_valid(json.loads(text))


def test_a_long_string_fits_a_budget_of_two_tokens_a_character(bench):
    """The way out of a place far from the end is found, or what was begun would count as too large at once."""
    schema = closed({"n": INTEGER, "text": {"type": "string", "minLength": 300, "maxLength": 500}})
    grammar = bench.compile("json_schema", json.dumps(schema))
    text, matcher = drive(bench, grammar, np.random.default_rng(5), budget=600, pick=never_ends)
    assert matcher.accepting, text
    jsonschema.validate(json.loads(text), schema)


def test_who_is_never_done_is_led_out_in_the_end(bench):
    """A key whose length only the judge knows, and a writer that never closes it: it would go back for ever."""
    schema = {"type": "object", "propertyNames": {"minLength": 3, "maxLength": 5}, "minProperties": 2}
    rng = np.random.default_rng(0)
    grammar = bench.compile("json_schema", json.dumps(schema))
    text, matcher = drive(bench, grammar, rng, budget=40, limit=100, pick=never_ends)
    assert matcher.terminated and jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


def test_a_value_that_the_schema_speaks_of_leads_out(bench):
    schema = {"type": "array", "items": {"type": "integer"}, "contains": {"minimum": 100}, "maxItems": 6}
    grammar = bench.compile("json_schema", json.dumps(schema))
    for budget in (20, 60):
        for seed in range(3):
            text, _ = drive(bench, grammar, np.random.default_rng(seed), budget=budget, pick=never_ends)
            assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


@pytest.mark.parametrize("budget", [24, 30])
def test_a_way_out_that_was_refused_since_is_not_followed(bench, budget):
    n = {"then": {"properties": {"n": {"minimum": 1000}}}, "else": {"properties": {"n": {"maximum": -1000}}}}
    properties = {"t": {"type": "string", "maxLength": 8}, "n": INTEGER}
    schema = {"type": "object", "properties": properties, "required": ["t", "n"]}
    schema |= {"if": {"properties": {"t": {"pattern": "^a"}}}, **n}
    grammar = bench.compile("json_schema", json.dumps(schema))
    rng = np.random.default_rng(1)
    text, _ = drive(bench, grammar, rng, budget=budget, pick=lambda bench, allowed, rng: int(rng.choice(allowed)))
    jsonschema.validate(json.loads(text), schema)
