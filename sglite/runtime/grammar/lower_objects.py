"""Lowering of the keywords that speak of objects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglite.runtime.grammar import proofs
from sglite.runtime.grammar.ecma import Pattern
from sglite.runtime.grammar.lower_types import IN_PLACE, NO_LIMIT
from sglite.runtime.grammar.lowering import Lowering, Place, a_map, conjoin_last, count, pattern, strings
from sglite.runtime.grammar.negate import ANNOTATIONS
from sglite.runtime.grammar.refs import Json, Schema

MAX_CHOICES = 12


def objects(low: Lowering, place: Place, out: dict[str, Any]) -> None:
    _properties(low, place, out)
    if "propertyNames" in place.node and low.dialect.year >= 6:
        _names(low, place, out)
    if "required" in place.node:
        out["required"] = list(dict.fromkeys(strings(place.node["required"], place, "required")))
        low.note("required", "mask")
    if not place.node.keys().isdisjoint(("minProperties", "maxProperties")):
        _counts(low, place, out)
    _dependents(low, place, out)
    if "unevaluatedProperties" in place.node and low.dialect.year >= 2019:
        _unevaluated(low, place, out)


def _properties(low: Lowering, place: Place, out: dict[str, Any]) -> None:
    if "properties" in place.node:
        schemas = a_map(place, "properties").items()
        out["properties"] = {name: low.sub(place, schema, "properties", name) for name, schema in schemas}
        low.note("properties", "mask")
    if "additionalProperties" in place.node:
        further = low.sub(place, place.node["additionalProperties"], "additionalProperties")
        if further is not True and further != {}:
            out["additionalProperties"] = further
        low.note("additionalProperties", "mask")
    if place.node.get("patternProperties"):
        _patterns(low, place, out)


def _patterns(low: Lowering, place: Place, out: dict[str, Any]) -> None:
    """Patterns that share no name are the mask engine's; otherwise it learns only that a name matches one of them."""
    schemas: dict[str, Schema] = {}
    patterns: list[Pattern] = []
    for text, schema in a_map(place, "patternProperties").items():
        found = pattern(low, text, place.at("patternProperties", text))
        patterns.append(found)
        schemas[found.portable or ""] = low.sub(place, schema, "patternProperties", text)
    portable = all(found.portable is not None and not found.conditions for found in patterns)
    shared = not low.effort.merge and any(
        found.search(name) for name in out.get("properties", ()) for found in patterns
    )
    if portable and not shared and proofs.disjoint_patterns(list(schemas)):
        out["patternProperties"] = schemas
        low.note("patternProperties", "mask")
        return
    low.judge(place, "patternProperties")
    low.judge_parts(place.node["patternProperties"])
    if portable:
        out["patternProperties"] = {"|".join(f"(?:{text})" for text in schemas): True}
    else:
        out.pop("additionalProperties", None)


def _names(low: Lowering, place: Place, out: dict[str, Any]) -> None:
    """propertyNames as a pattern or a list of names, when nothing else speaks of the names."""
    names = place.node["propertyNames"]
    low.sub(place, names, "propertyNames")  # for its faults
    if names is True or names == {}:
        return
    keywords = set(names) - ANNOTATIONS if isinstance(names, dict) else set()
    if not low.effort.rewrite or "patternProperties" in out or "patternProperties" in place.node:
        low.judge(place, "propertyNames")
    elif keywords <= {"type", "enum", "const"} and keywords != {"type"}:
        _only_names(low, place, out, names)
    elif keywords in ({"pattern"}, {"pattern", "type"}):
        _only_pattern(low, place, out, names["pattern"])
    else:
        low.judge(place, "propertyNames")


def _only_names(low: Lowering, place: Place, out: dict[str, Any], names: Json) -> None:
    values = [] if names is False else [names["const"]] if "const" in names else names["enum"]
    allowed = [name for name in values if isinstance(name, str) and name in names.get("enum", [name])] if names else []
    known = out.setdefault("properties", {})
    further = out.get("additionalProperties", True)
    for name in known:
        if name not in allowed:
            known[name] = False
    if further is not False:
        known.update({name: further for name in allowed if name not in known})
    out["additionalProperties"] = False
    low.note("propertyNames", "proof")


def _only_pattern(low: Lowering, place: Place, out: dict[str, Any], text: str) -> None:
    found = pattern(low, text, place.at("propertyNames", "pattern"))
    if found.portable is None or found.conditions:
        low.judge(place, "propertyNames")
        return
    known = out.setdefault("properties", {})
    known.update({name: False for name in known if not found.search(name)})
    out["patternProperties"] = {found.portable: out.get("additionalProperties", True)}
    out["additionalProperties"] = False
    low.note("propertyNames", "proof")


def _counts(low: Lowering, place: Place, out: dict[str, Any]) -> None:
    least, most = count(place, "minProperties", 0), count(place, "maxProperties", NO_LIMIT)
    known, needed = out.get("properties", {}), set(out.get("required", ()))
    closed = out.get("additionalProperties") is False and not out.get("patternProperties")
    least = 0 if least <= len(needed) else least
    most = NO_LIMIT if closed and most >= len(known) else most
    if least == 0 and most == NO_LIMIT:
        how = "proof"
    elif needed >= known.keys() and low.effort.rewrite:
        out.update({"minProperties": least} if least else {})
        out.update({"maxProperties": most} if most < NO_LIMIT else {})
        how = "mask"
    elif closed and least == 1 and most == NO_LIMIT and len(known) <= MAX_CHOICES and low.effort.rewrite:
        conjoin_last(out, [{"required": [name]} for name in known])
        how = "proof"
    else:
        how = "rollback"
    for keyword in {"minProperties", "maxProperties"} & place.node.keys():
        low.note(keyword, how)
        if how == "rollback":
            low.judge(place, keyword)


def _dependents(low: Lowering, place: Place, out: dict[str, Any]) -> None:
    conditions: list[tuple[str, str, Schema]] = []
    for keyword in ("dependencies",) if low.dialect.year <= 7 else ("dependentRequired", "dependentSchemas"):
        for name, then in a_map(place, keyword).items():
            if isinstance(then, list):
                conditions.append((keyword, name, {"required": strings(then, place, keyword, name)}))
            else:
                conditions.append((keyword, name, {"required": [name], "allOf": [then]}))
    for keyword, name, then in conditions:
        lowered = low.made(place, then, keyword, name)
        if low.effort.rewrite:
            conjoin_last(out, [{"properties": {name: False}}, lowered])
            low.note(keyword, "proof")
        else:
            low.judge(place, keyword)


def _unevaluated(low: Lowering, place: Place, out: dict[str, Any]) -> None:
    """The mask allows the names that anything in the node looks at; whether it always looks is judged."""
    further = low.sub(place, place.node["unevaluatedProperties"], "unevaluatedProperties")
    if further is True or "additionalProperties" in place.node:  # then every property is evaluated
        return
    names, certain = _evaluated(place.node, place)
    if names is not None and low.effort.rewrite:
        conjoin_last(out, [{"properties": dict.fromkeys(names, True), "additionalProperties": further}])
    if names is not None and certain and low.effort.rewrite:
        low.note("unevaluatedProperties", "proof")
    else:
        low.judge(place, "unevaluatedProperties")


def _evaluated(node: Json, place: Place, depth: int = 0) -> tuple[list[str] | None, bool]:
    """The names that ``node`` looks at (None: any), and whether it does so whatever the value is."""
    if not isinstance(node, dict):
        return [], True
    open_ended = depth and not node.keys().isdisjoint(("additionalProperties", "unevaluatedProperties"))
    if depth > 8 or open_ended or not node.keys().isdisjoint(("patternProperties", "$dynamicRef", "$recursiveRef")):
        return None, False
    names = list(node.get("properties", ()))
    certain = node.keys().isdisjoint(IN_PLACE - {"$ref", "allOf", "not"})
    for schema in _in_place(node, place):
        more, always = _evaluated(schema, place, depth + 1)
        if more is None:
            return None, False
        names += more
        certain = certain and always
    return names, certain


def _in_place(node: Json, place: Place) -> Iterator[Json]:
    """What is looked at, always or in some cases, for the same value."""
    for keyword in ("allOf", "anyOf", "oneOf"):
        yield from node.get(keyword, ())
    yield from (node[keyword] for keyword in ("if", "then", "else") if keyword in node)
    yield from node.get("dependentSchemas", {}).values()
    if "$ref" in node:
        yield place.scope.look_up(node["$ref"])[0]
