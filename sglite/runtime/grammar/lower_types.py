"""Lowering of the keywords that speak of numbers, strings and arrays."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from sglite.runtime.grammar import formats
from sglite.runtime.grammar.lowering import Lowering, Place, a_list, conjoin, count, number, pattern
from sglite.runtime.grammar.refs import refuse

IN_PLACE = frozenset(
    {"$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "if", "then", "else", "not", "dependentSchemas"}
)
MAX_BOUND = 2**53
MAX_DIGITS = 9
NO_LIMIT = 2**31 - 1

# ------------------------------------------------------------------------------------------------------------ numbers


def numbers(low: Lowering, place: Place, out: dict[str, Any]) -> None:
    for keyword, value in _bounds(low, place).items():
        if abs(value) > MAX_BOUND:  # llguidance cannot write such a range as a regex
            low.judge(place, keyword)
        else:
            out[keyword] = value
            low.note(keyword, "mask")
    if "multipleOf" in place.node:
        _multiple(low, place, out)


def _bounds(low: Lowering, place: Place) -> dict[str, float]:
    """The four bounds as they are written since draft 6; in draft 4 an exclusive one is a boolean beside the other."""
    found = {}
    for keyword, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        strict = place.node.get(exclusive)
        if isinstance(strict, bool) and (low.dialect.year == 4 or not low.dialect.declared):
            if keyword in place.node:
                found[exclusive if strict else keyword] = number(place, keyword)
            continue
        found.update({name: number(place, name) for name in (keyword, exclusive) if name in place.node})
    return found


def _multiple(low: Lowering, place: Place, out: dict[str, Any]) -> None:
    value = number(place, "multipleOf")
    if value <= 0:
        refuse("multipleOf must be greater than 0", place.at("multipleOf"))
    digits = Decimal(repr(value)).normalize().as_tuple()
    if len(digits.digits) + abs(int(digits.exponent)) > MAX_DIGITS:
        low.judge(place, "multipleOf")
    else:
        out["multipleOf"] = value
        low.note("multipleOf", "mask")


# ------------------------------------------------------------------------------------------------------------ strings


def strings(low: Lowering, place: Place, out: dict[str, Any]) -> None:
    for keyword in ("minLength", "maxLength"):
        if keyword in place.node:
            out[keyword] = count(place, keyword, 0)
            low.note(keyword, "mask")
    if "pattern" in place.node:
        _pattern(low, place, out)
    if "format" in place.node:
        _format(low, place, out)


def _pattern(low: Lowering, place: Place, out: dict[str, Any]) -> None:
    found = pattern(low, place.node["pattern"], place.at("pattern"))
    if found.portable is None:
        low.judge(place, "pattern")
        if low.effort.rewrite:
            out["pattern"] = found.loose
        return
    out["pattern"] = found.portable
    for more in found.conditions:
        conjoin(out, {"pattern": more})
    low.note("pattern", "proof" if found.conditions else "mask")


def _format(low: Lowering, place: Place, out: dict[str, Any]) -> None:
    known = formats.known(place.node["format"])
    if known is None:
        low.note("format", "annotation")
        return
    conjoin(out, known.mask)
    if known.exact:
        low.note("format", "mask")
    else:
        low.judge(place, "format")


# ------------------------------------------------------------------------------------------------------------- arrays


def arrays(low: Lowering, place: Place, out: dict[str, Any]) -> None:
    _items(low, place, out)
    for keyword in ("minItems", "maxItems"):
        if keyword in place.node:
            out[keyword] = count(place, keyword, 0)
            low.note(keyword, "mask")
    if place.node.get("uniqueItems"):
        _unique(low, place, out)
    if "contains" in place.node and low.dialect.year >= 6:
        _contains(low, place, out)
    if "unevaluatedItems" in place.node and low.dialect.year >= 2019:
        _unevaluated(low, place, out)


def _items(low: Lowering, place: Place, out: dict[str, Any]) -> None:
    """Both spellings of tuples: prefixItems and items, or a list in items and additionalItems."""
    as_list = isinstance(place.node.get("items"), list)
    if as_list and low.dialect.year >= 2020:
        refuse("items must be a schema; for a tuple use prefixItems", place.at("items"))
    prefix = "items" if as_list else "prefixItems"
    rest = "additionalItems" if as_list else "items"
    if prefix in place.node and (as_list or low.dialect.year >= 2020):
        out["prefixItems"] = [low.sub(place, item, prefix, i) for i, item in enumerate(a_list(place, prefix))]
        low.note(prefix, "mask")
    if rest in place.node:
        out["items"] = low.sub(place, place.node[rest], rest)
        low.note(rest, "mask")


def _unique(low: Lowering, place: Place, out: dict[str, Any]) -> None:
    if not isinstance(place.node["uniqueItems"], bool):
        refuse("uniqueItems must be a boolean", place.at("uniqueItems"))
    if out.get("maxItems", NO_LIMIT) <= 1:
        low.note("uniqueItems", "proof")
    else:
        low.judge(place, "uniqueItems")


def _contains(low: Lowering, place: Place, out: dict[str, Any]) -> None:
    """The mask sees to the number of items; which of them match is judged."""
    low.sub(place, place.node["contains"], "contains")  # only to find its faults
    counted = low.dialect.year >= 2019
    least = count(place, "minContains", 1) if counted else 1
    most = count(place, "maxContains", NO_LIMIT) if counted else NO_LIMIT
    if least == 0 and most == NO_LIMIT:
        return
    if least > most:
        conjoin(out, {"type": ["null", "boolean", "number", "string", "object"]})
    out["minItems"] = max(least, out.get("minItems", 0))
    low.judge(place, "contains")


def _unevaluated(low: Lowering, place: Place, out: dict[str, Any]) -> None:
    items = low.sub(place, place.node["unevaluatedItems"], "unevaluatedItems")
    if items is True or "items" in out:  # then every item is evaluated
        return
    if IN_PLACE.isdisjoint(place.node) and "contains" not in place.node:
        out["items"] = items
        low.note("unevaluatedItems", "proof")
    else:
        low.judge(place, "unevaluatedItems")
