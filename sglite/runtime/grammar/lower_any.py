"""Lowering of the keywords that speak of any value: type, constants, references, and what combines schemas."""

from __future__ import annotations

from typing import Any

from sglite.runtime.grammar import proofs
from sglite.runtime.grammar.lowering import (
    Lowering,
    Place,
    a_list,
    alternatives,
    branches_of,
    conjoin,
    conjoin_last,
    strings,
)
from sglite.runtime.grammar.negate import TYPES as ANY_TYPE
from sglite.runtime.grammar.negate import complement, normal
from sglite.runtime.grammar.refs import Json, refuse

MAX_VALUES = 1000
CONDITIONS = frozenset({"if", "not", "dependencies", "dependentRequired", "dependentSchemas"})
TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})


def reference(low: Lowering, place: Place, out: dict[str, Any]) -> None:
    value = place.node["$ref"]
    if not isinstance(value, str):
        refuse("$ref must be a string", place.at("$ref"))
    try:
        node, scope = place.scope.look_up(value)
    except LookupError:
        if value.startswith("#"):
            refuse(f"{value[:200]!r} points to nothing", place.at("$ref"))
        refuse(f"{value[:200]!r} is not in the schema, and nothing is fetched", place.at("$ref"), "unsupported")
    out["$ref"] = low.define(node, scope, value[1:] if value.startswith("#") else place.below("$ref"))
    low.note("$ref", "mask")


def dynamic_reference(low: Lowering, place: Place, out: dict[str, Any]) -> None:
    for keyword in ("$dynamicRef", "$recursiveRef"):
        if keyword in place.node:
            _refuse_lost(place, keyword)
            low.judge(place, keyword)


def _refuse_lost(place: Place, keyword: str) -> None:
    value = place.node[keyword]
    if not isinstance(value, str):
        refuse(f"{keyword} must be a string", place.at(keyword))
    try:
        place.scope.look_up(value)
    except LookupError:
        refuse(f"{value[:200]!r} is not in the schema, and nothing is fetched", place.at(keyword), "unsupported")


def type_and_values(low: Lowering, place: Place, out: dict[str, Any]) -> None:
    node = place.node
    if "type" in node:
        out["type"] = _type(place)
        low.note("type", "mask")
    if "enum" in node:
        out["enum"] = _spellings(a_list(place, "enum"))
        if len(out["enum"]) > MAX_VALUES:
            refuse(f"enum has more than {MAX_VALUES} values", place.at("enum"), "limit")
        if not out["enum"]:
            conjoin(out, False)
        low.note("enum", "mask")
    if "const" in node and low.dialect.year > 4:
        values = _spellings([node["const"]])
        conjoin(out, {"enum": values} if len(values) > 1 else {"const": values[0]})
        low.note("const", "mask")


def _type(place: Place) -> Json:
    value = place.node["type"]
    names = [value] if isinstance(value, str) else strings(value, place, "type")
    unknown = [name for name in names if name not in TYPES]
    if unknown or not names:
        refuse(f"unknown type {unknown[0]!r}" if unknown else "type must not be empty", place.at("type"))
    return value


def _spellings(values: list[Any]) -> list[Any]:
    """The values, each once; 1.0 may also be written 1."""
    once = list({f"{normal(value)} {type(value)}": value for value in values}.values())
    return once + [int(value) for value in once if isinstance(value, float) and value.is_integer()]


def all_of(low: Lowering, place: Place, out: dict[str, Any]) -> None:
    for i, schema in enumerate(branches_of(place, "allOf")):
        lowered = low.sub(place, schema, "allOf", i)
        if isinstance(schema, dict) and not CONDITIONS.isdisjoint(schema):
            conjoin_last(out, [lowered])
        else:
            conjoin(out, lowered)
    low.note("allOf", "mask")


def any_of(low: Lowering, place: Place, out: dict[str, Any]) -> None:
    _drop_known_type(place, out, "anyOf")
    alternatives(out, [low.sub(place, schema, "anyOf", i) for i, schema in enumerate(branches_of(place, "anyOf"))])
    low.note("anyOf", "mask")


def _drop_known_type(place: Place, out: dict[str, Any], keyword: str) -> None:
    """A type that every branch repeats is left to the branches: there is less to merge into them."""
    if "type" in out and proofs.all_within(branches_of(place, keyword), place.scope, out["type"]):
        del out["type"]


def one_of(low: Lowering, place: Place, out: dict[str, Any]) -> None:
    schemas = branches_of(place, "oneOf")
    _drop_known_type(place, out, "oneOf")
    branches = [low.sub(place, schema, "oneOf", i) for i, schema in enumerate(schemas)]
    alternatives(out, branches)
    asked = place.node.get("type", ANY_TYPE)
    types = proofs.exclusive_types(schemas, place.scope, asked)
    if types is None:
        low.judge(place, "oneOf")
        return
    low.note("oneOf", "proof")
    if not types:
        conjoin(out, False)
    elif types < proofs.json_types(asked):
        conjoin(out, {"type": sorted(types)})


def negation(low: Lowering, place: Place, out: dict[str, Any]) -> None:
    other = complement(place.node["not"]) if low.effort.rewrite else None
    if other is None:
        low.sub(place, place.node["not"], "not")  # only to find its faults
        low.judge(place, "not")
    else:
        conjoin_last(out, [low.made(place, other, "not")])
        low.note("not", "proof")


def condition(low: Lowering, place: Place, out: dict[str, Any]) -> None:
    node = place.node
    if low.dialect.year < 7:
        return
    if node.keys().isdisjoint(("then", "else")):
        low.sub(place, node["if"], "if")  # only to find its faults
        return
    then, otherwise = node.get("then", True), node.get("else", True)
    other = complement(node["if"]) if low.effort.rewrite else None
    if other is None:
        for keyword, schema in (("if", node["if"]), ("then", then), ("else", otherwise)):
            low.sub(place, schema, keyword)
        low.judge(place, "if")
        return
    yes = low.made(place, {"allOf": [node["if"], then]}, "then")
    no = low.made(place, {"allOf": [other, otherwise]}, "else")
    conjoin_last(out, [yes, no])
    low.note("if", "proof")
