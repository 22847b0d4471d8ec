"""Masks that were computed before, by the place they belong to: most of them come again, in the same answer and in
others."""

from __future__ import annotations

import itertools
import json
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Protocol

from sglite.protocol import Constraint
from sglite.runtime.grammar.base import MaskBackend, MaskRow
from sglite.runtime.grammar.json_places import JsonPlaces
from sglite.runtime.grammar.places import Places, TextPlaces
from sglite.runtime.grammar.regex_places import RegexPlaces

Key = tuple[int, Hashable]
"""Number of the grammar, name of the place in it."""


class MaskMemory:
    """The masks used last, in at most ``capacity`` bytes. Safe from any thread."""

    def __init__(self, capacity: int) -> None:
        self.hits = 0
        self.nbytes = 0
        self._capacity = capacity
        self._masks: OrderedDict[Key, MaskRow] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Key) -> MaskRow | None:
        """Only to be read."""
        with self._lock:
            mask = self._masks.get(key)
            if mask is not None:
                self.hits += 1
                self._masks.move_to_end(key)
            return mask

    def put(self, key: Key, mask: MaskRow) -> None:
        """Keeps a copy."""
        kept = mask.copy()
        with self._lock:
            old = self._masks.pop(key, None)
            self._masks[key] = kept
            self.nbytes += kept.nbytes - (old.nbytes if old is not None else 0)
            while self.nbytes > self._capacity:
                self.nbytes -= self._masks.popitem(last=False)[1].nbytes


def places_of(constraint: Constraint, longest: int) -> Places:
    """The names that fit a constraint best; no token has more than ``longest`` bytes."""
    try:
        if constraint.kind == "regex":
            return RegexPlaces(constraint.source)
    except (ValueError, RecursionError):
        return TextPlaces()
    if constraint.kind == "json_schema":
        return JsonPlaces(json.loads(constraint.source), longest)
    return JsonPlaces({"type": "object"}, longest) if constraint.kind == "json_object" else TextPlaces()


class Placed(Protocol):
    """A grammar whose places have names."""

    @property
    def places(self) -> Places: ...

    @property
    def number(self) -> int: ...

    @property
    def backend(self) -> MaskBackend: ...


NUMBERS = itertools.count()


class Trail:
    """The places that accepted tokens have led to; each is looked up when it is first asked for."""

    __slots__ = ("_grammar", "_seen", "ids")

    def __init__(self, grammar: Placed) -> None:
        self._grammar = grammar
        self.ids: list[int] = []
        self._seen: list[object] = []
        """The place at the start and after each token, as far as anyone asked."""

    def extend(self, ids: Sequence[int]) -> None:
        self.ids += ids

    def rollback(self, n: int) -> None:
        del self.ids[len(self.ids) - n :]
        del self._seen[len(self.ids) + 1 :]

    def key(self) -> Key | None:
        places, seen = self._grammar.places, self._seen or [self._grammar.places.start]
        bytes_of = self._grammar.backend.tokens.bytes_of
        for id in self.ids[len(seen) - 1 :]:
            seen.append(places.after(seen[-1], bytes_of[id]) if bytes_of[id] else None)
        self._seen = seen
        name = places.key(seen[-1])
        return None if name is None else (self._grammar.number, name)

    def clone(self) -> Trail:
        twin = Trail(self._grammar)
        twin.ids, twin._seen = self.ids.copy(), self._seen.copy()
        return twin
