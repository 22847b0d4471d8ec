"""Proofs that schemas or patterns have nothing in common, so that ``oneOf`` is the same as ``anyOf``.

``False`` never means the opposite, only that no proof was found. Patterns are intersected as automata by interegular,
in pure Python, so only short ones without large counts are tried.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import combinations
from typing import Any

import interegular
import interegular.patterns

from sglite.errors import GrammarError
from sglite.runtime.grammar.ecma import has_top_level_bar, plain_characters, translate
from sglite.runtime.grammar.negate import ANNOTATIONS, TYPES, same, type_of
from sglite.runtime.grammar.refs import Json, Scope

MAX_BRANCHES = 32
MAX_PATTERN = 80
MAX_DEPTH = 6


def all_disjoint(schemas: Sequence[Json], scope: Scope, types: Iterable[str] = TYPES) -> bool:
    """No value of ``types`` satisfies two of ``schemas``."""
    if len(schemas) > MAX_BRANCHES:
        return False
    limit = {"type": list(types)}
    parts = [list(_conjuncts(schema, scope, 0)) for schema in schemas]
    return all(_disjoint([limit, *one], other, scope, 0) for one, other in combinations(parts, 2))


def exclusive_types(schemas: Sequence[Json], scope: Scope, types: str | Iterable[str]) -> set[str] | None:
    """The types among ``types`` whose values satisfy at most one of ``schemas``, when every value of the others
    satisfies two or more of them; None where that could not be proved."""
    asked = json_types(types)
    twice = {name for name in asked if sum(_all_satisfy(name, schema, scope, 0) for schema in schemas) > 1}
    return asked - twice if all_disjoint(schemas, scope, asked - twice) else None


_SPECIFIC = {
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "string": frozenset({"minLength", "maxLength", "pattern"}),
    "array": frozenset({"items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains"}),
    "object": frozenset({"properties", "additionalProperties", "patternProperties", "required", "propertyNames"}),
}
"""Keywords that mean nothing to values of other types."""


def _all_satisfy(name: str, schema: Json, scope: Scope, depth: int) -> bool:
    """Every value of type ``name`` satisfies ``schema``, which says nothing about such values."""
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return schema is True
    others = (words for kind, words in _SPECIFIC.items() if kind != name)
    parts = [(part, scope) for part in schema.get("allOf", ())]
    parts += [scope.look_up(schema["$ref"])] if "$ref" in schema else []
    own = schema.keys() - ANNOTATIONS - {"$ref", "allOf"}
    return own <= frozenset().union(*others) and all(_all_satisfy(name, *part, depth + 1) for part in parts)


def all_within(schemas: Sequence[Json], scope: Scope, types: str | list[str]) -> bool:
    """Every one of ``schemas`` by itself allows values of ``types`` only ("integer" is not tried)."""
    allowed = {types} if isinstance(types, str) else set(types)
    if "integer" in allowed:
        return False
    parts = [list(_conjuncts(schema, scope, 0)) for schema in schemas]
    return all(set.intersection(set(TYPES), *map(_types, part)) <= allowed for part in parts)


def disjoint_patterns(patterns: Sequence[str]) -> bool:
    """No string is matched, anywhere in it, by two of ``patterns``."""
    return all(_disjoint_patterns(one, other) for one, other in combinations(patterns, 2))


def _conjuncts(schema: Json, scope: Scope, depth: int) -> Iterator[dict[str, Any]]:
    """Schemas without references and allOf that all have to hold. Some may be missing: that only weakens a proof."""
    if schema is False:
        yield {"enum": []}
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return
    yield schema
    for part in schema.get("allOf", ()):
        yield from _conjuncts(part, scope, depth + 1)
    if "$ref" in schema:
        node, inner = scope.look_up(schema["$ref"])
        yield from _conjuncts(node, inner, depth + 1)


def _disjoint(one: list[dict[str, Any]], other: list[dict[str, Any]], scope: Scope, depth: int) -> bool:
    if depth > MAX_DEPTH:
        return False
    both = one + other
    shared = set.intersection(set(TYPES), *(_types(part) for part in both))
    if not shared or not _shared_values(both):
        return True
    if any(_no_branch(parts, rest, scope, depth) for parts, rest in ((one, other), (other, one))):
        return True
    proofs = {"number": _numbers, "string": _texts, "array": _lists, "object": _records}
    return all(name in proofs and proofs[name](both, scope, depth) for name in shared)


def json_types(types: str | Iterable[str]) -> set[str]:
    """The types a ``type`` names; integers are numbers."""
    return {"number" if name == "integer" else name for name in ([types] if isinstance(types, str) else types)}


def _types(part: dict[str, Any]) -> set[str]:
    """JSON types the schema allows; integers are numbers."""
    found = json_types(part.get("type", TYPES))
    if "enum" in part:
        found &= {type_of(value) for value in part["enum"]}
    if "const" in part:
        found &= {type_of(part["const"])}
    return found


def _shared_values(parts: list[dict[str, Any]]) -> bool:
    """Whether the enums and constants leave a value (True where there are none)."""
    lists = [part["enum"] for part in parts if "enum" in part] + [[part["const"]] for part in parts if "const" in part]
    return not lists or any(all(any(same(value, v) for v in values) for values in lists) for value in lists[0])


def _no_branch(parts: list[dict[str, Any]], rest: list[dict[str, Any]], scope: Scope, depth: int) -> bool:
    """Some anyOf or oneOf in ``parts`` has no branch that meets ``rest``."""
    for part in parts:
        for keyword in ("anyOf", "oneOf"):
            branches = part.get(keyword)
            if branches and all(
                _disjoint(list(_conjuncts(branch, scope, depth)), rest, scope, depth + 1) for branch in branches
            ):
                return True
    return False


def _numbers(parts: list[dict[str, Any]], scope: Scope, depth: int) -> bool:
    low = [part["minimum"] for part in parts if "minimum" in part]
    high = [part["maximum"] for part in parts if "maximum" in part]
    above = [part["exclusiveMinimum"] for part in parts if _is_number(part.get("exclusiveMinimum"))]
    below = [part["exclusiveMaximum"] for part in parts if _is_number(part.get("exclusiveMaximum"))]
    return (
        (bool(low and high) and max(low) > min(high))
        or (bool(above and high + below) and max(above) >= min(high + below))
        or (bool(below and low + above) and min(below) <= max(low + above))
    )


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _texts(parts: list[dict[str, Any]], scope: Scope, depth: int) -> bool:
    patterns = [part["pattern"] for part in parts if "pattern" in part]
    values = [value for part in parts for value in _values(part) if isinstance(value, str)]
    return (
        _apart(parts, "minLength", "maxLength")
        or any(_disjoint_patterns(one, other) for one, other in combinations(patterns, 2))
        or bool(values and patterns and not any(all(_search(p, value) for p in patterns) for value in values))
    )


def _values(part: dict[str, Any]) -> list[Any]:
    return part["enum"] if "enum" in part else [part["const"]] if "const" in part else []


def _search(pattern: str, text: str) -> bool:
    try:
        return translate(pattern).search(text)
    except (GrammarError, TimeoutError):
        return True


def _apart(parts: list[dict[str, Any]], least: str, most: str) -> bool:
    low = max((part.get(least, 0) for part in parts), default=0)
    return bool(low > min((part.get(most, low) for part in parts), default=low))


def _lists(parts: list[dict[str, Any]], scope: Scope, depth: int) -> bool:
    if _apart(parts, "minItems", "maxItems"):
        return True
    items = [part["items"] for part in parts if isinstance(part.get("items"), dict)]
    if not items or not any(part.get("minItems", 0) > 0 for part in parts) or _has_prefix(parts):
        return False
    return any(_meet_nowhere(one, other, scope, depth) for one, other in combinations(items, 2))


def _has_prefix(parts: list[dict[str, Any]]) -> bool:
    return any("prefixItems" in part or isinstance(part.get("items"), list) for part in parts)


def _meet_nowhere(one: Json, other: Json, scope: Scope, depth: int) -> bool:
    return _disjoint(list(_conjuncts(one, scope, 0)), list(_conjuncts(other, scope, 0)), scope, depth + 1)


def _records(parts: list[dict[str, Any]], scope: Scope, depth: int) -> bool:
    """A property that must be there can satisfy only one side, or is forbidden by the other."""
    needed = {name for part in parts for name in part.get("required", ()) if isinstance(name, str)}
    for name in needed:
        schemas = [_property(part, name) for part in parts]
        found = [schema for schema in schemas if schema is not None]
        if any(schema is False for schema in found):
            return True
        if any(_meet_nowhere(one, other, scope, depth) for one, other in combinations(found, 2)):
            return True
    return _apart(parts, "minProperties", "maxProperties")


def _property(part: dict[str, Any], name: str) -> Json | None:
    """The schema for property ``name``; None where it is not simply known."""
    properties = part.get("properties", {})
    if name in properties:
        return properties[name]
    return part.get("additionalProperties") if not part.get("patternProperties") else None


# ----------------------------------------------------------------------------------------------------------- patterns


@lru_cache(4096)
def _disjoint_patterns(one: str, other: str) -> bool:
    first, second = automaton(one), automaton(other)
    if first is None or second is None:
        return False
    return bool((first & second).empty())  # not isdisjoint: it is wrong where the alphabets differ


@lru_cache(256)
def automaton(pattern: str, longest: int = MAX_PATTERN) -> Any:
    """The automaton of the strings the pattern matches somewhere; None for what is too large or not understood."""
    try:
        portable = translate(pattern).portable
    except GrammarError:
        return None
    if portable is None or len(portable) > longest or re.search(r"\{\d{3}|\{\d+,?\d*\}.*\{\d", portable):
        return None
    inner = _unanchored(portable)
    try:
        return None if inner is None else interegular.parse_pattern(inner).to_fsm()
    except (interegular.patterns.InvalidSyntax, interegular.patterns.Unsupported, ValueError, RecursionError):
        return None


def _unanchored(pattern: str) -> str | None:
    """interegular knows no anchors and matches whole strings: turn a search into a full match."""
    start, end = pattern.startswith("^"), plain_characters(pattern)[-1:] == [(len(pattern) - 1, "$")]
    inner = pattern[start : len(pattern) - end]
    if any(char in "^$" for _, char in plain_characters(inner)) or (has_top_level_bar(inner) and (start or end)):
        return None
    anything = r"(?:.|\n)*"
    return f"{'' if start else anything}(?:{inner}){'' if end else anything}"
