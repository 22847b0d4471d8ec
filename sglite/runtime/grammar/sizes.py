"""How many tokens the smallest value of a schema takes, about: a look at the schema, no search."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from typing import Any

_PLAIN = frozenset({"type"})
"""What says nothing of a size."""
_MAPS = frozenset({"properties", "patternProperties", "$defs"})
_UNKNOWN = 64


class Sizes:
    """Of the schema that the mask was made from; None for a grammar that has none."""

    def __init__(self, schema: dict[str, Any] | None) -> None:
        self._schema = schema
        self._defs: dict[str, Any] = schema.get("$defs", {}) if schema is not None else {}
        self._known: dict[int, int] = {}

    @cached_property
    def whole(self) -> int:
        return _UNKNOWN if self._schema is None else self._size(self._schema)

    @cached_property
    def growth(self) -> int:
        """What may be still to come once one more part has begun: the largest, as the whole begins only once."""
        if self._schema is None:
            return _UNKNOWN
        sizes = [self._size(node) for node in _nodes(self._schema) if node is not self._schema]
        return max(sizes, default=self.whole) + 8

    def _size(self, node: Any) -> int:
        if not isinstance(node, dict):
            return 2
        if node.keys() <= _PLAIN:
            return 3
        if id(node) not in self._known:
            self._known[id(node)] = 0  # a recursion ends somewhere
            self._known[id(node)] = self._own_size(node) + sum(self._parts(node))
        return self._known[id(node)]

    def _parts(self, node: dict[str, Any]) -> list[int]:
        """Of what holds for the same value: all of it, or the largest branch."""
        found = [self._size(part) for part in node.get("allOf", ())]
        if "$ref" in node:
            found.append(self._size(self._defs.get(node["$ref"].removeprefix("#/$defs/"))))
        branches = (node[keyword] for keyword in ("anyOf", "oneOf") if keyword in node)
        return found + [max(map(self._size, parts), default=0) for parts in branches]

    def _own_size(self, node: dict[str, Any]) -> int:
        values = node.get("enum", [node["const"]] if "const" in node else [])
        constant = min((len(json.dumps(value)) for value in values), default=0)
        text = node.get("minLength", 0) + 16 * ("pattern" in node) + 24 * ("format" in node)
        return 3 + constant + int(text) + self._members(node) + self._items(node)

    def _members(self, node: dict[str, Any]) -> int:
        properties = node.get("properties", {})
        return sum(len(name) // 2 + 4 + self._size(properties.get(name)) for name in node.get("required", ()))

    def _items(self, node: dict[str, Any]) -> int:
        least = int(node.get("minItems", 0))
        if not least:
            return 0
        return least * (1 + max(map(self._size, (node.get("items"), *node.get("prefixItems", ())))))


def _nodes(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    todo: list[Any] = [schema]
    while todo:
        node = todo.pop()
        if isinstance(node, list):
            todo += node
        elif isinstance(node, dict):
            yield node
            for keyword, value in node.items():
                if keyword in _MAPS:
                    todo += value.values()
                elif keyword not in ("enum", "const"):
                    todo.append(value)
