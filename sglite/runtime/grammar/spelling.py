"""The spelling a grammar has for a value: its order of properties, its way to write a number."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from sglite.runtime.grammar.base import MaskGrammar, MaskMatcher
from sglite.runtime.grammar.refs import Json
from sglite.runtime.grammar.tokens import TokenTable

MAX_STEPS = 30_000


def respell(text: str, masks: MaskGrammar, schema: dict[str, Any], tokens: TokenTable) -> str | None:
    """The JSON ``text`` as the mask would write its value, or None; ``schema`` is what the mask was made from.

    None also for a text that is not JSON or has a property twice.
    """
    try:
        value = json.loads(text, object_pairs_hook=_once, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    speller = _Speller(tokens, {name: rank for rank, name in enumerate(_names(schema))})
    return next((said for matcher, said in speller.value(masks.matcher(), value) if matcher.accepting), None)


def _once(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a property is there twice")
    return dict(pairs)


def _refuse(word: str) -> Json:
    raise ValueError(f"{word} is not JSON")


def _names(schema: dict[str, Any]) -> dict[str, None]:
    """Property names in the order in which the mask meets them, roughly: a good guess to begin with."""
    found: dict[str, None] = {}
    seen: set[str] = set()
    todo: list[Json] = [schema]
    while todo:
        node = todo.pop()
        if isinstance(node, dict):
            found.update(dict.fromkeys(node.get("properties", ())))
            reference = str(node.get("$ref", ""))
            if reference and reference not in seen:
                seen.add(reference)
                todo.append(schema.get("$defs", {}).get(reference.removeprefix("#/$defs/")))
            todo += [part for keyword, part in reversed(node.items()) if keyword != "$defs"]
        elif isinstance(node, list):
            todo += reversed(node)
    return found


Said = Iterator[tuple[MaskMatcher, str]]


@dataclass
class _Speller:
    """Every method yields the ways to go on: the matcher after them, and what was written."""

    tokens: TokenTable
    rank: dict[str, int]
    steps: int = field(default=0)

    def value(self, matcher: MaskMatcher, value: Json) -> Said:
        if isinstance(value, dict):
            names = sorted(value, key=lambda name: self.rank.get(name, len(self.rank)))
            for inner, said in self._write(matcher, "{"):
                yield from self._properties(inner, said, value, names, "")
        elif isinstance(value, list):
            for inner, said in self._write(matcher, "["):
                yield from self._items(inner, said, value, "")
        else:
            for spelling in _spellings(value):
                yield from self._write(matcher, spelling)

    def _properties(
        self, matcher: MaskMatcher, said: str, value: dict[str, Json], names: list[str], comma: str
    ) -> Said:
        """The next property is one after which every other that could have been next still can be."""
        if not names:
            yield from self._write(matcher, "}", said)
        possible = [name for name in names if self._can_write(matcher, comma + _key(name))]
        for name in possible:
            for after, so_far in self._property(matcher, said, comma + _key(name), value[name]):
                if all(self._can_write(after, ", " + _key(other)) for other in possible if other != name):
                    rest = [other for other in names if other != name]
                    yield from self._properties(after, so_far, value, rest, ", ")

    def _property(self, matcher: MaskMatcher, said: str, key: str, value: Json) -> Said:
        for named, so_far in self._write(matcher, key, said):
            for after, told in self.value(named, value):
                yield after, so_far + told

    def _items(self, matcher: MaskMatcher, said: str, items: list[Json], comma: str) -> Said:
        if not items:
            yield from self._write(matcher, "]", said)
            return
        for ready, so_far in self._write(matcher, comma, said):
            for after, told in self.value(ready, items[0]):
                yield from self._items(after, so_far + told, items[1:], ", ")

    def _write(self, matcher: MaskMatcher, text: str, said: str = "") -> Said:
        self.steps += 1
        ids = self.tokens.fewest(text.encode())
        if self.steps > MAX_STEPS or ids is None:
            return
        copy = matcher.clone()
        if copy.accept(ids):
            yield copy, said + text

    def _can_write(self, matcher: MaskMatcher, text: str) -> bool:
        return next(self._write(matcher, text), None) is not None


def _key(name: str) -> str:
    return json.dumps(name, ensure_ascii=False) + ": "


def _spellings(value: Json) -> list[str]:
    found = [json.dumps(value, ensure_ascii=False), json.dumps(value)]
    if isinstance(value, float):
        found.append(f"{Decimal(repr(value)):f}")
        found += [str(int(value))] if value.is_integer() else []
    return list(dict.fromkeys(found))
