"""Which nodes of a schema hold for a value, found step by step on the way into the text.

A Spot is the set of nodes that hold for one place in a value, whatever the value turns out to be: a node, what it
refers to, its allOf, and below it what ``properties`` and ``items`` say. Nodes under anyOf, not, if and the like hold
only in some cases; they are checked with the node above them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglite.errors import GrammarError
from sglite.runtime.grammar.ecma import translate
from sglite.runtime.grammar.refs import Dialect, Json, Scope

Node = dict[str, Any]
Placed = tuple[Node, Scope]

_CASES = ("anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies")
_PARTS = ("contains", "propertyNames", "unevaluatedItems", "unevaluatedProperties")
_CHILDREN = ("properties", "patternProperties", "additionalProperties", "prefixItems", "items", "additionalItems")
_MAPS = frozenset({"properties", "patternProperties", "dependentSchemas", "dependencies"})


@dataclass(frozen=True)
class Atlas:
    """The schema, and the ids of its nodes that the mask does not fully enforce."""

    root: Json
    scope: Scope
    dialect: Dialect
    judged: frozenset[int]

    def spot(self) -> Spot:
        return Spot(Spots(self), self._placed(self.root, self.scope))

    def nodes(self) -> Iterator[Placed]:
        """Every node the root leads to, each once."""
        seen: set[int] = set()
        todo = list(self._placed(self.root, self.scope))
        while todo:
            placed = todo.pop()
            if id(placed[0]) not in seen:
                seen.add(id(placed[0]))
                yield placed
                todo += (*self.together(placed), *self.maybe(placed), *self.below(placed))

    def together(self, placed: Placed) -> Iterator[Placed]:
        """Nodes that hold for the same value as this one, in every case."""
        node, scope = placed
        if "$ref" in node:
            yield from self._placed(*scope.look_up(node["$ref"]))
            if self.dialect.ref_stands_alone:
                return
        yield from self._under(placed, ("allOf",))

    def maybe(self, placed: Placed) -> Iterator[Placed]:
        """Nodes that hold for the same value, or a part of it, in some cases."""
        return self._under(placed, (*_CASES, *_PARTS))

    def same_value(self, placed: Placed) -> Iterator[Placed]:
        """Nodes that are looked at, always or in some cases, for the same value."""
        yield from self.together(placed)
        yield from self._under(placed, _CASES)

    def below(self, placed: Placed) -> Iterator[Placed]:
        """Nodes that hold for items and properties."""
        return self._under(placed, _CHILDREN)

    def _under(self, placed: Placed, keywords: tuple[str, ...]) -> Iterator[Placed]:
        node, scope = placed
        if "$ref" in node and self.dialect.ref_stands_alone:
            return
        for part in _parts(node, keywords):
            yield from self._placed(part, scope)

    def _placed(self, node: Json, scope: Scope) -> tuple[Placed, ...]:
        return ((node, scope.enter(node)),) if isinstance(node, dict) else ()


def _parts(node: Node, keywords: tuple[str, ...]) -> Iterator[Json]:
    """What stands under ``keywords``: a schema, or a list or map of them (told apart by the keyword)."""
    for keyword in keywords:
        value = node.get(keyword)
        if isinstance(value, list):
            yield from value
        elif isinstance(value, dict):
            yield from value.values() if keyword in _MAPS else (value,)


class Spots:
    """The spots of one schema, each made once, and what is known of its nodes."""

    def __init__(self, atlas: Atlas) -> None:
        self.atlas = atlas
        self._made: dict[tuple[int, ...], Spot] = {}
        self._live: dict[int, bool] = {}

    def at(self, nodes: list[Placed]) -> Spot:
        key = tuple(id(node) for node, _ in nodes)
        if key not in self._made:
            self._made[key] = Spot(self, tuple(nodes))
        return self._made[key]

    def needs_check(self, placed: Placed) -> bool:
        """Whether a value must be checked against the node itself once it is complete."""
        return id(placed[0]) in self.atlas.judged or any(self.live(part) for part in self.atlas.maybe(placed))

    def live(self, placed: Placed) -> bool:
        """Whether the node, or any that it leads to, is judged."""
        if id(placed[0]) not in self._live:
            self._live[id(placed[0])] = self._reaches_judged(placed)
        return self._live[id(placed[0])]

    def _reaches_judged(self, start: Placed) -> bool:
        seen, todo = {id(start[0])}, [start]
        while todo:
            placed = todo.pop()
            if id(placed[0]) in self.atlas.judged:
                return True
            for way in (self.atlas.together, self.atlas.maybe, self.atlas.below):
                fresh = [next_ for next_ in way(placed) if id(next_[0]) not in seen]
                seen.update(id(node) for node, _ in fresh)
                todo += fresh
        return False


class Spot:
    """``live``: something at or below this place is judged. ``checks``: the nodes to check a complete value with."""

    def __init__(self, spots: Spots, start: tuple[Placed, ...]) -> None:
        self._spots = spots
        self.nodes = self._close(start)
        self.live = any(spots.live(placed) for placed in self.nodes)
        self.checks = tuple(placed for placed in self.nodes if spots.needs_check(placed))
        judged = [node for node, _ in self.nodes if id(node) in spots.atlas.judged]
        self.unique = any(node.get("uniqueItems") is True for node in judged)
        self.names = tuple((n, s) for n, s in self.nodes if "propertyNames" in n and id(n) in spots.atlas.judged)
        self.most = min((node["maxProperties"] for node in judged if "maxProperties" in node), default=None)
        self.is_checked = bool(self.checks or self.unique or self.names or self.most is not None)
        self._below: dict[str | int, Spot] = {}

    def _close(self, start: tuple[Placed, ...]) -> tuple[Placed, ...]:
        found, todo = {}, list(start)
        while todo:
            placed = todo.pop()
            if id(placed[0]) not in found:
                found[id(placed[0])] = placed
                todo += self._spots.atlas.together(placed)
        return tuple(found.values())

    def of_property(self, name: str) -> Spot:
        if not self.live:
            return self
        if name not in self._below:
            nodes = [part for placed in self.nodes for part in _property(placed, name)]
            if len(self._below) > 1000:  # names are the model's to choose
                return self._spots.at(nodes)
            self._below[name] = self._spots.at(nodes)
        return self._below[name]

    def of_item(self, index: int) -> Spot:
        if not self.live:
            return self
        index = min(index, self._last_index)
        if index not in self._below:
            self._below[index] = self._spots.at([part for placed in self.nodes for part in _item(placed, index)])
        return self._below[index]

    @property
    def _last_index(self) -> int:
        """All items from here on are governed alike."""
        lists = [node.get(keyword) for node, _ in self.nodes for keyword in ("prefixItems", "items")]
        return max((len(items) for items in lists if isinstance(items, list)), default=0)


def _property(placed: Placed, name: str) -> Iterator[Placed]:
    node, scope = placed
    found = [node["properties"][name]] if name in node.get("properties", {}) else []
    found += [part for pattern, part in node.get("patternProperties", {}).items() if _matches(pattern, name)]
    for part in found or [node.get("additionalProperties")]:
        if isinstance(part, dict):
            yield part, scope.enter(part)


def _item(placed: Placed, index: int) -> Iterator[Placed]:
    node, scope = placed
    items = node.get("items")
    prefix = items if isinstance(items, list) else node.get("prefixItems", [])
    rest = node.get("additionalItems") if isinstance(items, list) else items
    part = prefix[index] if index < len(prefix) else rest
    if isinstance(part, dict):
        yield part, scope.enter(part)


def _matches(pattern: str, name: str) -> bool:
    try:
        return translate(pattern).search(name)
    except (GrammarError, TimeoutError):
        return False
