"""Values and names that a schema speaks of: where a judge refuses what is shortest, one of them is likely right.

``{"contains": {"minimum": 100}}`` is satisfied by 100, which a search for the shortest text comes to late. These are
guesses: what the mask or the judge refuses is of no harm.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

MOST = 24
"""So many are tried wherever a value or a name may begin."""
LONGEST = 120
"""In bytes."""
MAX_DEPTH = 4
MAX_BOUND = 2**53
_LISTS = ("enum", "required", "examples")
_BRANCHES = ("oneOf", "anyOf", "allOf")
_BOUNDS = {"minimum": 0, "exclusiveMinimum": 1, "maximum": 0, "exclusiveMaximum": -1, "multipleOf": 0}
"""What to add to a bound for a value within it."""
_PLAIN: dict[str, Any] = {"null": None, "boolean": False, "object": {}}


def hints(schema: Any) -> tuple[bytes, ...]:
    """As JSON, each once."""
    found = (json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() for value in _spoken_of(schema))
    return tuple(islice(dict.fromkeys(text for text in found if len(text) <= LONGEST), MOST))


def _spoken_of(schema: Any) -> Iterator[Any]:
    todo = [schema]
    while todo:
        node = todo.pop(0)
        if isinstance(node, dict):
            yield from _of(node)
            todo += node.values()
        elif isinstance(node, list):
            todo += [part for part in node if isinstance(part, dict)]


def _of(node: dict[str, Any]) -> Iterator[Any]:
    if "contains" in node:
        yield _example([node.get("items"), node["contains"]])
    for branch in [*_branches(node), *(node[keyword] for keyword in ("then", "else") if keyword in node)]:
        yield _example([node, branch])
    yield from [node["const"]] if "const" in node else []
    for keyword in _LISTS:
        yield from _list(node, keyword)
    yield from _numbers([node])


def _branches(node: dict[str, Any]) -> Iterator[Any]:
    for keyword in _BRANCHES:
        yield from _list(node, keyword)


def _example(schemas: Sequence[Any], depth: int = 0) -> Any:
    """A small value that may satisfy all of ``schemas``."""
    parts = [schema for schema in schemas if isinstance(schema, dict)]
    constants = [value for part in parts for value in ([part["const"]] if "const" in part else _list(part, "enum"))]
    if constants or depth > MAX_DEPTH:
        return min(constants, key=lambda value: sum(_refuses(part, value) for part in parts), default=None)
    if any("properties" in part or "required" in part for part in parts):
        return _object(parts, depth)
    types = [part["type"] for part in parts if isinstance(part.get("type"), str)]
    if types and types[0] in _PLAIN:
        return _PLAIN[types[0]]
    if "string" in types or any("minLength" in part for part in parts):
        return "a" * min(LONGEST, int(max((_number(part, "minLength") or 0 for part in parts), default=0)))
    return [] if "array" in types else next(iter(_numbers(parts)), 0)


def _refuses(part: dict[str, Any], value: Any) -> bool:
    return value not in (_list(part, "enum") or [part.get("const", value)])


def _object(parts: Sequence[dict[str, Any]], depth: int) -> dict[str, Any]:
    """All that is required, in the order in which the properties stand."""
    properties = [_map(part, "properties") for part in parts]
    needed = [name for part in parts for name in _list(part, "required") if isinstance(name, str)]
    order = dict.fromkeys(name for known in (*properties, needed) for name in known if name in needed)
    return {name: _example([known.get(name) for known in properties], depth + 1) for name in order}


def _numbers(parts: Sequence[dict[str, Any]]) -> list[Any]:
    """The bounds, and what is divisible as asked at or above them."""
    found = [(_number(part, name), more) for name, more in _BOUNDS.items() for part in parts]
    bounds = [bound + more for bound, more in found if bound is not None]
    steps = [step for part in parts if (step := _number(part, "multipleOf"))]
    return [-(-bound // step) * step for bound in bounds for step in steps] + bounds


# What stands under a keyword may be something else: a property may have such a name, too.


def _list(node: dict[str, Any], keyword: str) -> list[Any]:
    value = node.get(keyword)
    return value if isinstance(value, list) else []


def _map(node: dict[str, Any], keyword: str) -> dict[str, Any]:
    value = node.get(keyword)
    return value if isinstance(value, dict) else {}


def _number(node: dict[str, Any], keyword: str) -> float | None:
    value = node.get(keyword)
    is_one = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_BOUND
    return value if is_one else None
