"""Every accepted keyword is enforced: by the mask, by rewriting, or by taking back what breaks it."""

from __future__ import annotations

import json

import jsonschema
import numpy as np
import pytest
from conftest import drive

from sglite.errors import GrammarError


def closed(properties: dict, **more) -> dict:
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
AB = closed({"a": INTEGER, "b": INTEGER})

CASES = {
    "uniqueItems": (
        {"type": "array", "items": INTEGER, "uniqueItems": True},
        ["[1, 2]", "[]"],
        ["[1, 1]", "[1, 2, 1]"],
    ),
    "uniqueItems of few": (
        {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 2},
        ['["a", "b"]', '["c", "a", "b"]'],
        ['["a", "a"]', '["a"]'],
    ),
    "uniqueItems of objects": (
        {"type": "array", "items": closed({"x": {"type": "number"}}, required=["x"]), "uniqueItems": True},
        ['[{"x": 1}, {"x": 2}]'],
        ['[{"x": 1}, {"x": 1.0}]'],
    ),
    "oneOf overlapping": (
        {"oneOf": [{"type": "integer", "multipleOf": 2}, {"type": "integer", "multipleOf": 3}]},
        ["4", "9"],
        ["6", "5"],
    ),
    "oneOf of open objects": (
        {"oneOf": [{"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}]},
        ['{"a": 1}', '{"b": 1}'],
        ['{"a": 1, "b": 1}', "{}"],
    ),
    "not const": ({"type": "integer", "not": {"const": 3}}, ["4", "33"], ["3"]),
    "not a schema": (
        {"type": "array", "items": INTEGER, "not": {"contains": {"const": 1}}},
        ["[]", "[2]"],
        ["[1]", "[2, 1]"],
    ),
    "if then": (
        closed({"k": {"enum": ["a", "b"]}, "v": INTEGER}, required=["k"])
        | {"if": {"properties": {"k": {"const": "a"}}}, "then": {"required": ["v"]}},
        ['{"k": "a", "v": 1}', '{"k": "b"}'],
        ['{"k": "a"}'],
    ),
    "if then, judged": (
        closed({"k": TEXT, "v": INTEGER}, required=["k"])
        | {"if": {"properties": {"k": {"pattern": "^x"}}}, "then": {"required": ["v"]}},
        ['{"k": "x", "v": 1}', '{"k": "b"}'],
        ['{"k": "xy"}'],
    ),
    "contains": ({"type": "array", "contains": INTEGER}, ['["a", 1]', "[3]"], ['["a"]', "[]"]),
    "maxContains": (
        {"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 1}, "maxContains": 1},
        ["[1]", "[2, 1]"],
        ["[1, 1]", "[2]"],
    ),
    "dependentRequired": (AB | {"dependentRequired": {"a": ["b"]}}, ['{"a": 1, "b": 2}', '{"b": 1}'], ['{"a": 1}']),
    "dependentSchemas": (
        AB | {"dependentSchemas": {"a": {"properties": {"b": {"minimum": 5}}, "required": ["b"]}}},
        ['{"a": 1, "b": 7}', '{"b": 1}'],
        ['{"a": 1}', '{"a": 1, "b": 2}'],
    ),
    "propertyNames": (
        {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": INTEGER},
        ['{"ab": 1}'],
        ['{"A": 1}'],
    ),
    "propertyNames, judged": (
        {"type": "object", "propertyNames": {"not": {"pattern": "z"}}, "additionalProperties": INTEGER},
        ['{"ab": 1}'],
        ['{"az": 1}'],
    ),
    "patternProperties overlapping": (
        {"type": "object", "patternProperties": {"a": INTEGER, "b": {"minimum": 3}}, "additionalProperties": False},
        ['{"a": 1, "b": 3}', '{"ab": 5}'],
        ['{"ab": 1}', '{"c": 1}'],
    ),
    "minProperties": (AB | {"minProperties": 1}, ['{"a": 1}', '{"b": 1}'], ["{}"]),
    "minProperties beside allOf": (
        {
            "type": "object",
            "minProperties": 2,
            "allOf": [{"properties": {"a": INTEGER, "b": INTEGER}, "required": ["a"]}],
        },
        ['{"a": 1, "b": 2}', '{"a": 1, "x": 2}'],
        ['{"a": 1}', '{"a": 1, "b": ""}'],
    ),
    "maxProperties": (
        {"type": "object", "properties": {"a": INTEGER}, "maxProperties": 2, "additionalProperties": INTEGER},
        ["{}", '{"a": 1, "b": 2}'],
        ['{"a": 1, "b": 2, "c": 3}'],
    ),
    "unevaluatedProperties": (
        {"type": "object", "allOf": [{"properties": {"a": INTEGER}}], "unevaluatedProperties": False},
        ['{"a": 1}', "{}"],
        ['{"b": 1}'],
    ),
    "unevaluatedProperties, judged": (
        {
            "type": "object",
            "properties": {"a": INTEGER},
            "anyOf": [{"properties": {"b": INTEGER}, "required": ["b"]}, True],
            "unevaluatedProperties": False,
        },
        ['{"a": 1}', '{"a": 1, "b": 2}'],
        ['{"c": 1}'],
    ),
    "unevaluatedItems": (
        {"type": "array", "prefixItems": [INTEGER], "unevaluatedItems": False},
        ["[1]", "[]"],
        ["[1, 2]"],
    ),
    "multipleOf": ({"type": "number", "multipleOf": 0.01}, ["19.99", "3"], ["0.001"]),
    "date": ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"x"']),
    "hostname": ({"type": "string", "format": "hostname"}, ['"a.b-c.de"'], ['"xn--X"', '"a_b"']),
    "regex": ({"type": "string", "format": "regex"}, ['"a+"'], ['"a("']),
    "lookahead": ({"type": "string", "pattern": "^(?=.*[0-9])[a-z0-9]+$"}, ['"a1"'], ['"ab"']),
    "negative lookahead": ({"type": "string", "pattern": "^(?!ab)[a-c]+$"}, ['"ac"'], ['"abc"']),
    "duplicate keys": (
        {"type": "array", "items": {"type": "object"}, "uniqueItems": True},
        ['[{"a": 1}]'],
        ['[{"a": 1, "a": 2}]'],
    ),
    "nested under anyOf": (
        {
            "anyOf": [
                closed({"t": {"type": "array", "items": INTEGER, "uniqueItems": True}}, required=["t"]),
                {"type": "null"},
            ]
        },
        ['{"t": [1, 2]}', "null"],
        ['{"t": [1, 1]}'],
    ),
    "through references": (
        {
            "$ref": "#/$defs/list",
            "$defs": {
                "list": {"type": "array", "items": {"anyOf": [INTEGER, {"$ref": "#/$defs/list"}]}, "uniqueItems": True}
            },
        },
        ["[1, [1]]", "[[], [1]]"],
        ["[[1, 1]]", "[[2], [2]]"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_texts(bench, name):
    schema, good, bad = CASES[name]
    grammar = bench.compile("json_schema", json.dumps(schema))
    assert [text for text in good if not bench.accepts(grammar, text)] == []
    assert [text for text in bad if bench.accepts(grammar, text)] == []


@pytest.mark.parametrize("name", CASES)
def test_whatever_the_model_samples_validates(bench, name):
    schema = CASES[name][0]
    grammar = bench.compile("json_schema", json.dumps(schema))
    rng = np.random.default_rng(7)
    finished = 0
    for _ in range(12):
        try:
            text, matcher = drive(bench, grammar, rng)
        except GrammarError as error:
            assert error.kind in ("limit", "unsatisfiable")
            continue
        if matcher.accepting:
            finished += 1
            jsonschema.validate(json.loads(text), schema, format_checker=None)
    assert finished >= 6
