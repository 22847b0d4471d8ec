"""JSON as it is written: which values are complete, where they began, and which schema nodes govern them.

States are immutable, so that going back to an earlier one costs nothing. The mask guarantees well-formed text; this
only finds its way in it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from sglite.runtime.grammar.spots import Spot


class Mode(Enum):
    VALUE = "a value, or the end of an empty array"
    STRING = "inside a string value"
    SCALAR = "inside a number or a word"
    KEY = "a key, or the end of an object"
    NAME = "inside a key"
    COLON = "the colon after a key"
    AFTER = "a comma or a closing bracket"


@dataclass(frozen=True, slots=True)
class Member:
    """A complete item or property. ``key_end`` is where its key ends (its start for items); ``normal`` is set where
    items must differ. ``before`` is the one before it."""

    key: str | int
    key_end: int
    end: int
    normal: str | None
    before: Member | None


@dataclass(frozen=True, slots=True)
class Frame:
    """An open array or object, from the outside in. ``start`` is the offset of its bracket."""

    outer: Frame | None
    is_object: bool
    start: int
    spot: Spot
    members: Member | None = None
    count: int = 0
    key: str = ""
    key_end: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """After ``at`` bytes. ``start`` is the offset of the string, key or scalar one is in."""

    at: int
    frame: Frame | None
    mode: Mode
    start: int = 0
    escaped: bool = False


@dataclass(frozen=True, slots=True)
class Violation:
    """The text up to ``ends[0]`` cannot be continued to anything valid; if staying with its beginning does not help,
    the text up to ``ends[1]`` is to be given up, and so on. ``start`` is where the value at fault begins."""

    start: int
    ends: tuple[int, ...]
    message: str


class Judge(Protocol):
    """What is asked as values complete; offsets are in the text, ``end`` is behind the byte that completes."""

    root: Spot

    def value(
        self, spot: Spot, text: bytes | bytearray, start: int, stop: int, end: int, frame: Frame | None
    ) -> Violation | None:
        """``text[start:stop]`` is a complete value; ``frame`` is its own where it is an array or object."""
        ...

    def key(self, frame: Frame, key: str, start: int, end: int) -> Violation | None: ...

    def item(self, frame: Frame, normal: str | None, start: int, end: int) -> Violation | None: ...

    def normal(self, frame: Frame, text: bytes | bytearray, start: int, stop: int) -> str | None:
        """The text by which an item is compared with the others, where they must differ."""
        ...


_STRING_END = re.compile(rb'["\\]')
_SCALAR_END = re.compile(rb"[\s,\]}]")
_SPACE = b" \t\r\n"


class Stream:
    def __init__(self, judge: Judge) -> None:
        self.judge = judge

    def begin(self) -> State:
        return State(0, None, Mode.VALUE)

    def advance(self, state: State, text: bytes | bytearray) -> tuple[State, Violation | None]:
        """Read ``text`` from ``state.at`` to its end, or to the first violation."""
        violation = None
        while state.at < len(text) and violation is None:
            state, violation = self._step(state, text)
        return state, violation

    def finish(self, state: State, text: bytes | bytearray) -> Violation | None:
        """The violation there would be if the text ended here, in a number or word at the root."""
        if state.frame is not None or state.mode is not Mode.SCALAR:
            return None  # whatever else is whole was judged when it was closed
        return self.judge.value(self.judge.root, text, state.start, len(text), len(text), None)

    def _step(self, state: State, text: bytes | bytearray) -> tuple[State, Violation | None]:
        if state.mode in (Mode.STRING, Mode.NAME):
            return self._in_string(state, text)
        if state.mode is Mode.SCALAR:
            return self._in_scalar(state, text)
        byte = text[state.at : state.at + 1]
        if byte in _SPACE:
            return replace(state, at=state.at + 1), None
        if byte in b"]}" and state.frame is not None:
            return self._close(state, text)
        if state.mode is Mode.VALUE:
            return self._open(state, byte), None
        mode = {Mode.KEY: Mode.NAME, Mode.COLON: Mode.VALUE, Mode.AFTER: self._next_mode(state)}[state.mode]
        return replace(state, at=state.at + 1, mode=mode, start=state.at), None

    def _next_mode(self, state: State) -> Mode:
        return Mode.KEY if state.frame is not None and state.frame.is_object else Mode.VALUE

    def _open(self, state: State, byte: bytes | bytearray) -> State:
        if byte == b'"':
            return State(state.at + 1, state.frame, Mode.STRING, state.at)
        if byte not in b"[{":
            return State(state.at + 1, state.frame, Mode.SCALAR, state.at)
        inner = Frame(state.frame, byte == b"{", state.at, self._spot(state.frame))
        return State(state.at + 1, inner, Mode.KEY if inner.is_object else Mode.VALUE)

    def _spot(self, frame: Frame | None) -> Spot:
        """Of the value that begins in ``frame``."""
        if frame is None:
            return self.judge.root
        return frame.spot.of_property(frame.key) if frame.is_object else frame.spot.of_item(frame.count)

    def _in_string(self, state: State, text: bytes | bytearray) -> tuple[State, Violation | None]:
        at = state.at + state.escaped
        found = _STRING_END.search(text, at) if at <= len(text) else None
        if found is None:
            return replace(state, at=len(text), escaped=at > len(text)), None
        if found.group() == b"\\":
            return replace(state, at=found.end(), escaped=True), None
        end = found.end()
        if state.mode is Mode.STRING:
            return self._complete(state.frame, text, state.start, end, end, None)
        frame = state.frame
        assert frame is not None
        key = _read(text[state.start : end])
        named = replace(frame, key=key, key_end=end)
        return State(end, named, Mode.COLON), self.judge.key(frame, key, state.start, end)

    def _in_scalar(self, state: State, text: bytes | bytearray) -> tuple[State, Violation | None]:
        found = _SCALAR_END.search(text, state.at)
        if found is None:
            return replace(state, at=len(text)), None
        return self._complete(state.frame, text, state.start, found.start(), found.end(), None)

    def _close(self, state: State, text: bytes | bytearray) -> tuple[State, Violation | None]:
        frame = state.frame
        assert frame is not None
        return self._complete(frame.outer, text, frame.start, state.at + 1, state.at + 1, frame)

    def _complete(
        self, outer: Frame | None, text: bytes | bytearray, start: int, stop: int, end: int, own: Frame | None
    ) -> tuple[State, Violation | None]:
        """A value is complete; ``end`` includes the byte that shows it, ``stop`` does not where it is not its own."""
        spot = own.spot if own is not None else self._spot(outer)
        violation = self.judge.value(spot, text, start, stop, end, own) if spot.live else None
        if outer is None:
            return State(stop, None, Mode.AFTER), violation
        normal = self.judge.normal(outer, text, start, stop)
        violation = violation or self.judge.item(outer, normal, start, end)
        key: str | int = outer.key if outer.is_object else outer.count
        member = Member(key, outer.key_end if outer.is_object else start, stop, normal, outer.members)
        return State(stop, replace(outer, members=member, count=outer.count + 1), Mode.AFTER), violation


def _read(quoted: bytes | bytearray) -> str:
    return str(json.loads(quoted))
