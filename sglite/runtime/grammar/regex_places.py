"""Places in a regular expression: the states of an automaton over ASCII, built as texts come along.

A state is the set of positions in the expression at which a text may stand, so it tells all that may follow. Only
what is certain is read: an expression with flags, assertions, properties or nested classes has no automaton, and a
text with other characters than ASCII has no place. ``\\d`` and the like are read for ASCII alone, ``.`` as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import reduce
from threading import Lock

MAX_NODES = 1000
"""Of the automaton: expressions with large counts have none."""
MAX_STATES = 4096
MAX_SIZE = 100_000
"""Nodes in all states together, and steps that are remembered: some 15 MB."""

ASCII = (1 << 128) - 1
_REPEAT = re.compile(r"[*+?]|\{(\d+)(,?)(\d*)\}")
_GROUP = re.compile(r"\((\?:|\?P?<[A-Za-z_]\w*>)?(?!\?)")
_SET_OPERATION = re.compile(r"&&|--|~~|\[")
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}

Build = Callable[[int], int]
"""Given the node that follows an expression, makes its nodes and returns the first."""


class _UnreadError(ValueError):
    """Something in the expression that is not read here, or too much of it."""


def _bits(characters: str) -> int:
    """A set of ASCII characters, bit i for character i."""
    return reduce(int.__or__, (1 << ord(char) for char in characters if ord(char) < 128), 0)


def _range(first: str, last: str) -> int:
    low, high = ord(first), min(ord(last), 127)
    return (1 << high + 1) - (1 << low) if low <= high else 0


_DIGITS = _range("0", "9")
_CLASSES = {"d": _DIGITS, "w": _range("a", "z") | _range("A", "Z") | _DIGITS | _bits("_"), "s": _bits(" \t\n\r\f\v")}
_DOT = ASCII & ~_bits("\n")


class RegexPlaces:
    """See places.Places. A place is the number of a state. Raises ValueError for what is not read."""

    def __init__(self, source: str) -> None:
        self._nodes = nodes = _Nodes()
        first = _Parser(source, nodes).whole()
        self._states: list[frozenset[int]] = []
        self._numbers: dict[frozenset[int], int] = {}
        self._next: dict[tuple[int, int], int | None] = {}
        self._size = 0
        self._lock = Lock()  # two states with one number would share their masks
        self.start = self._number(nodes.closure({first}))

    def after(self, place: int | None, data: bytes) -> int | None:
        for byte in data:
            if place is None:
                break
            edge = place, byte
            place = self._next[edge] if edge in self._next else self._step(*edge)
        return place

    def key(self, place: int | None) -> int | None:
        return place

    def _step(self, place: int, byte: int) -> int | None:
        reached = self._nodes.after(self._states[place], byte) if byte < 128 else frozenset[int]()
        number = self._number(reached) if reached else None
        if len(self._next) < MAX_SIZE:
            self._next[place, byte] = number
        return number

    def _number(self, state: frozenset[int]) -> int | None:
        with self._lock:
            if state not in self._numbers:
                if len(self._states) >= MAX_STATES or self._size + len(state) > MAX_SIZE:
                    return None
                self._size += len(state)
                self._numbers[state] = len(self._states)
                self._states.append(state)
            return self._numbers[state]


class _Nodes:
    """Node i reads a character of ``sets[i]`` and goes to ``targets[i][0]``, or nothing and goes to all of them."""

    def __init__(self) -> None:
        self.sets: list[int | None] = []
        self.targets: list[list[int]] = []

    def add(self, characters: int | None, *targets: int) -> int:
        if len(self.sets) >= MAX_NODES:
            raise _UnreadError("too large")
        self.sets.append(characters)
        self.targets.append(list(targets))
        return len(self.sets) - 1

    def closure(self, nodes: set[int]) -> frozenset[int]:
        """All nodes that read, reached from ``nodes`` without reading, and the end."""
        todo, seen = list(nodes), set(nodes)
        while todo:
            node = todo.pop()
            if self.sets[node] is None:
                fresh = [target for target in self.targets[node] if target not in seen]
                seen.update(fresh)
                todo += fresh
        return frozenset(node for node in seen if self.sets[node] is not None or not self.targets[node])

    def after(self, state: frozenset[int], byte: int) -> frozenset[int]:
        return self.closure({self.targets[node][0] for node in state if (self.sets[node] or 0) >> byte & 1})


class _Parser:
    def __init__(self, source: str, nodes: _Nodes) -> None:
        self._source = source
        self._nodes = nodes
        self._at = 0

    def whole(self) -> int:
        if self._source.startswith("^") or self._source.endswith("$"):
            raise _UnreadError("anchors")
        build = self._alternatives()
        if self._at < len(self._source):
            raise _UnreadError("a parenthesis too many")
        return build(self._nodes.add(None))

    def _alternatives(self) -> Build:
        branches = [self._sequence()]
        while self._skip("|"):
            branches.append(self._sequence())
        if len(branches) == 1:
            return branches[0]
        return lambda then: self._nodes.add(None, *(build(then) for build in branches))

    def _sequence(self) -> Build:
        parts: list[Build] = []
        while self._at < len(self._source) and self._source[self._at] not in "|)":
            parts.append(self._repeated(self._atom()))
        return lambda then: reduce(lambda end, build: build(end), reversed(parts), self._nodes.add(None, then))

    def _repeated(self, build: Build) -> Build:
        while (found := _REPEAT.match(self._source, self._at)) is not None:
            self._at = found.end()
            build = self._times(build, *_bounds(found))
            if self._skip("?"):
                raise _UnreadError("lazy")
        return build

    def _times(self, build: Build, least: int, most: int | None) -> Build:
        if max(least, most or 0) > MAX_NODES:
            raise _UnreadError("too many times")

        def made(then: int) -> int:
            end = self._nodes.add(None, then) if most is not None else self._loop(build, then)
            for _ in range((most or least) - least):
                end = self._nodes.add(None, build(end), then)
            return reduce(lambda place, _: build(place), range(least), end)

        return made

    def _loop(self, build: Build, then: int) -> int:
        node = self._nodes.add(None, then)
        self._nodes.targets[node].append(build(node))
        return node

    def _atom(self) -> Build:
        if self._source[self._at] == "(":
            return self._group()
        characters = self._class() if self._skip("[") else self._single()
        return lambda then: self._nodes.add(characters, then)

    def _group(self) -> Build:
        opening = _GROUP.match(self._source, self._at)
        if opening is None:
            raise _UnreadError("a group of another kind")
        self._at = opening.end()
        build = self._alternatives()
        if not self._skip(")"):
            raise _UnreadError("unclosed group")
        return build

    def _single(self) -> int:
        char = self._take()
        if char in "*+?{}^$":
            raise _UnreadError(char)
        return self._escape() if char == "\\" else _DOT if char == "." else _bits(char)

    def _class(self) -> int:
        negated = self._skip("^")
        start = self._at
        found = self._member()
        while not self._skip("]"):
            found |= self._member()
        if _SET_OPERATION.search(self._source, start, self._at):
            raise _UnreadError("operations on sets")
        return ASCII & ~found if negated else found

    def _member(self) -> int:
        first = self._take()
        if first in "[]":
            raise _UnreadError("a bracket in a class")
        if first == "\\":
            members = self._escape()
            if self._source.startswith("-", self._at) and not self._source.startswith("-]", self._at):
                raise _UnreadError("a range from an escape")
            return members
        if not self._source.startswith("-", self._at) or self._source.startswith("-]", self._at):
            return _bits(first)
        self._at += 1
        last = self._take()
        if last in "\\[]":
            raise _UnreadError("a range to an escape")
        return _range(first, last)

    def _escape(self) -> int:
        char = self._take()
        if char.lower() in _CLASSES:
            members = _CLASSES[char.lower()]
            return members if char.islower() else ASCII & ~members
        if char in _CONTROLS:
            return _bits(_CONTROLS[char])
        if char.isalnum() or char in "<>" or ord(char) > 127:
            raise _UnreadError("an escape")
        return _bits(char)

    def _take(self) -> str:
        if self._at >= len(self._source):
            raise _UnreadError("the end")
        self._at += 1
        return self._source[self._at - 1]

    def _skip(self, char: str) -> bool:
        found = self._source.startswith(char, self._at)
        self._at += found
        return found


def _bounds(repeat: re.Match[str]) -> tuple[int, int | None]:
    text = repeat.group()
    if text in "*+?":
        return int(text == "+"), 1 if text == "?" else None
    least = int(repeat.group(1))
    return least, int(repeat.group(3)) if repeat.group(3) else None if repeat.group(2) else least
