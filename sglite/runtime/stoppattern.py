"""Stop patterns: regular expressions searched in text that grows, in time linear in it.

A pattern becomes a nondeterministic automaton (Thompson, Regular Expression Search Algorithm, CACM 1968) whose states
are followed side by side, so no text can make a search take long; each state remembers the earliest character from
which it can be reached. Python parses the expression; what is not regular in it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

from sglite.errors import InvalidRequestError

MAX_STATES = 2000
"""Of one pattern: bounds the work per character."""

_parser: Any = import_module("re._parser")

Test = Callable[[str], bool]
Look = Callable[[str, str], bool]
"""Whether a place between two characters is the right one; "" stands for the beginning of the text."""

_CATEGORIES = {
    "CATEGORY_DIGIT": r"\d",
    "CATEGORY_NOT_DIGIT": r"\D",
    "CATEGORY_SPACE": r"\s",
    "CATEGORY_NOT_SPACE": r"\S",
    "CATEGORY_WORD": r"\w",
    "CATEGORY_NOT_WORD": r"\W",
}
_REFUSED = {
    "GROUPREF": "a back-reference",
    "GROUPREF_EXISTS": "a conditional",
    "ASSERT": "a look-around",
    "ASSERT_NOT": "a look-around",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive repeat",
}


class StopPattern:
    """A compiled pattern. Raises InvalidRequestError (``param`` "stop_regex") for one that cannot be used."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.free: list[list[int]] = []
        """By state, where one may go without a character."""
        self.looks: list[list[tuple[Look, int]]] = []
        """... where only between certain characters."""
        self.reads: list[tuple[Test, int] | None] = []
        """... where with one."""
        try:
            parsed = _parser.parse(source)
            self.start = self._state()
            self.end = self._sequence(parsed, self.start, parsed.state.flags)
        except (re.error, RecursionError, OverflowError) as error:
            raise self._refuse(f"is not usable: {error}") from None
        if self.end in self.closure([(self.start, 0)], None):
            raise self._refuse("matches the empty text, so nothing could be said")
        self.accepting = self._before_end()
        """From these a match is complete."""

    def scanner(self) -> Scanner:
        """A search of its own, from the beginning of a text."""
        return Scanner(self)

    def closure(self, seeds: Iterable[tuple[int, int]], between: tuple[str, str] | None) -> dict[int, int]:
        """All states to be reached without reading, with the origins of the first seed that reaches them. ``between``
        are the characters around the place; None: any place will do."""
        reached: dict[int, int] = {}
        for seed, origin in seeds:
            stack = [seed]
            while stack:
                state = stack.pop()
                if state in reached:
                    continue
                reached[state] = origin
                stack += self.free[state]
                stack += [to for look, to in self.looks[state] if between is None or look(*between)]
        return reached

    def _before_end(self) -> set[int]:
        before: dict[int, list[int]] = {}
        for state, ways in enumerate(self.free):
            for to in ways:
                before.setdefault(to, []).append(state)
        found, stack = set[int](), [self.end]
        while stack:
            state = stack.pop()
            if state not in found:
                found.add(state)
                stack += before.get(state, [])
        return found

    # ---- building: every method adds what follows a state, and returns the state where it ends

    def _state(self) -> int:
        if len(self.free) == MAX_STATES:
            raise self._refuse(f"is too large: it needs more than {MAX_STATES} states")
        self.free.append([])
        self.looks.append([])
        self.reads.append(None)
        return len(self.free) - 1

    def _sequence(self, items: Any, at: int, flags: int) -> int:
        for kind, value in items:
            at = self._item(str(kind), value, at, flags)
        return at

    def _item(self, kind: str, value: Any, at: int, flags: int) -> int:
        if kind in _REFUSED:
            raise self._refuse(f"holds {_REFUSED[kind]}, which cannot be matched in linear time")
        if kind == "SUBPATTERN":
            _, added, removed, items = value
            return self._sequence(items, at, (flags | added) & ~removed)
        if kind == "BRANCH":
            return self._branch(value[1], at, flags)
        if kind in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, items = value
            return self._repeat(least, most, items, at, flags)
        if kind == "AT":
            return self._look(str(value), at, flags)
        to = self._state()
        self.reads[at] = (_test(kind, value, flags), to)
        return to

    def _branch(self, alternatives: Any, at: int, flags: int) -> int:
        ends = []
        for items in alternatives:
            begin = self._state()
            self.free[at].append(begin)
            ends.append(self._sequence(items, begin, flags))
        return self._join(ends)

    def _repeat(self, least: int, most: Any, items: Any, at: int, flags: int) -> int:
        for _ in range(int(least)):
            before, at = at, self._sequence(items, at, flags)
            if at == before:
                break  # repeating nothing is nothing
        if most is _parser.MAXREPEAT:
            loop = self._join([at])
            begin = self._join([loop])
            self.free[self._sequence(items, begin, flags)].append(loop)
            return self._join([loop])
        ends = [at]
        for _ in range(int(most) - int(least)):
            at = self._sequence(items, self._join([at]), flags)
            ends.append(at)
        return self._join(ends)

    def _look(self, kind: str, at: int, flags: int) -> int:
        look = _look(kind, flags)
        if look is None:
            raise self._refuse("asks for the end of the text, which is not known while it grows")
        to = self._state()
        self.looks[at].append((look, to))
        return to

    def _join(self, ends: Sequence[int]) -> int:
        to = self._state()
        for end in ends:
            self.free[end].append(to)
        return to

    def _refuse(self, why: str) -> InvalidRequestError:
        return InvalidRequestError(f"stop_regex {self.source[:80]!r} {why}", param="stop_regex")


@lru_cache(256)
def stop_pattern(source: str) -> StopPattern:
    """Compiled once for all that use it: a pattern does not change, its scanners do."""
    return StopPattern(source)


class Scanner:
    """``feed`` every character; ``found`` is where the first match begins, ``earliest`` where one may have begun."""

    def __init__(self, pattern: StopPattern) -> None:
        self.source = pattern.source
        self.found: int | None = None
        self._pattern = pattern
        self._alive: dict[int, int] = {}
        """States with the character from which they were reached, earliest first."""
        self._last = ""
        self._position = 0

    @property
    def earliest(self) -> int | None:
        return next(iter(self._alive.values()), None)

    def feed(self, text: str) -> None:
        for character in text:
            if self.found is None:
                self._step(character)

    def _step(self, character: str) -> None:
        pattern = self._pattern
        seeds = [*self._alive.items(), (pattern.start, self._position)]
        reached = pattern.closure(seeds, (self._last, character))
        alive: dict[int, int] = {}
        for state, origin in reached.items():
            read = pattern.reads[state]
            if read is not None and read[0](character):
                alive.setdefault(read[1], origin)
        ended = [origin for state, origin in alive.items() if state in pattern.accepting]
        ended += [reached[pattern.end]] if pattern.end in reached else []
        self.found = min(ended, default=None)
        self._alive, self._last, self._position = alive, character, self._position + 1


def _look(kind: str, flags: int) -> Look | None:
    """None for what only the end of the text can tell."""
    if kind == "AT_BEGINNING_STRING" or (kind == "AT_BEGINNING" and not flags & re.MULTILINE):
        return lambda before, after: before == ""
    if kind == "AT_BEGINNING":
        return lambda before, after: before in ("", "\n")
    if kind == "AT_END" and flags & re.MULTILINE:
        return lambda before, after: after == "\n"
    if kind in ("AT_BOUNDARY", "AT_NON_BOUNDARY"):
        word = re.compile(r"\w", flags & re.ASCII).match
        differs = kind == "AT_BOUNDARY"
        return lambda before, after: (bool(word(before)) != bool(word(after))) == differs
    return None


def _test(kind: str, value: Any, flags: int) -> Test:
    if kind == "ANY":
        return (lambda character: True) if flags & re.DOTALL else (lambda character: character != "\n")
    if kind == "LITERAL":
        return _folded(lambda character: ord(character) == value, flags)
    if kind == "NOT_LITERAL":
        inside = _folded(lambda character: ord(character) == value, flags)
        return lambda character: not inside(character)
    assert kind == "IN", f"an item of kind {kind}"
    return _set(value, flags)


def _set(items: Any, flags: int) -> Test:
    negated = str(items[0][0]) == "NEGATE"
    tests = [_member(str(kind), value, flags) for kind, value in items[negated:]]
    inside = _folded(lambda character: any(test(character) for test in tests), flags)
    return (lambda character: not inside(character)) if negated else inside


def _member(kind: str, value: Any, flags: int) -> Test:
    if kind == "CATEGORY":
        match = re.compile(_CATEGORIES[str(value)], flags & re.ASCII).match
        return lambda character: match(character) is not None
    low, high = value if kind == "RANGE" else (value, value)
    return lambda character: low <= ord(character) <= high


def _folded(test: Test, flags: int) -> Test:
    """The test whatever the case, where the flag says so."""
    if not flags & re.IGNORECASE:
        return test

    def any_case(character: str) -> bool:
        return any(len(form) == 1 and test(form) for form in (character, character.lower(), character.upper()))

    return any_case
