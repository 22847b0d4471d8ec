"""Validate, roll back, resample: the part of a matcher that knows what was tried and must not be tried again.

What is refused is a set of byte strings, each the beginning of a text: nothing that begins so is allowed any more.
That is independent of how a text is cut into tokens, so a rollback to any token boundary forbids the right tokens
there. A place where nothing is allowed any more is refused itself, and one goes back further.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sglite.runtime.grammar.base import MaskRow
from sglite.runtime.grammar.stream import Frame, Judge, Mode, State, Stream, Violation
from sglite.runtime.grammar.tokens import TokenTable

PATIENCE = 6
"""In how many steps more and more of a string or number is given up, from its end to its beginning."""


class Search:
    """``states[i]`` is the place in the JSON after i tokens."""

    def __init__(self, judge: Judge, tokens: TokenTable) -> None:
        self._stream = Stream(judge)
        self._tokens = tokens
        self._refused: set[bytes] = set()
        self._tried: list[bytes] = []
        """What was refused since the last ``give_up``."""
        self._strikes: dict[int, int] = {}
        self.states: list[State] = [self._stream.begin()]

    def advance(self, text: bytes | bytearray) -> Violation | None:
        """One more token was accepted; ``text`` is all of it, with that token."""
        state, violation = self._stream.advance(self.states[-1], text)
        self.states.append(state)
        return violation

    def at_end(self, text: bytes | bytearray, tokens: int) -> Violation | None:
        """What is wrong with ``text``, that of the first ``tokens`` tokens, as a whole answer."""
        return self._stream.finish(self.states[tokens], text)

    def rollback(self, n: int, length: int) -> None:
        """``n`` tokens are taken back; ``length`` bytes are left."""
        del self.states[len(self.states) - n :]
        self._strikes = {start: times for start, times in self._strikes.items() if start < length}

    def refuse(self, text: bytes) -> None:
        if text not in self._refused:
            self._refused.add(text)
            self._tried.append(text)

    def forgive(self) -> None:
        """It led to a dead end: allow again what was refused since the last ``give_up``."""
        self._refused.difference_update(self._tried)

    def give_up(self, violation: Violation, text: bytes | bytearray) -> int:
        """Refuse a part of the text for a violation, more of it each time, and return the part's length."""
        times = self._strikes.get(violation.start, 0)
        self._strikes[violation.start] = times + 1
        ends = violation.ends if len(violation.ends) > 1 else _back_from(violation.ends[0], violation.start)
        end = ends[times % len(ends)]
        self._tried = []
        self.refuse(bytes(text[:end]))
        return end

    def forbids(self, text: bytes | bytearray, more: bytes) -> bool:
        """Whether ``text`` may not go on with ``more``."""
        return any(more.startswith(rest) for rest in self._rests(text))

    def remembers(self, text: bytes | bytearray) -> bool:
        """Whether something that begins with ``text`` was refused."""
        return bool(self._rests(text))

    def restrict(self, row: MaskRow, text: bytes | bytearray) -> None:
        """Take the tokens out of a mask that lead to what was refused."""
        bits = row.view(np.uint32)
        for rest in self._rests(text):
            ids = self._tokens.starting_with(rest)
            np.bitwise_and.at(bits, ids // 32, ~(np.uint32(1) << (ids % 32).astype(np.uint32)))

    def _rests(self, text: bytes | bytearray) -> list[bytes]:
        if not self._refused:
            return []
        known = bytes(text)
        return [
            refused[len(known) :]
            for refused in self._refused
            if len(refused) > len(known) and refused.startswith(known)
        ]

    def settled_before(self) -> int:
        """Offset in the text up to which nothing can be found wrong any more."""
        state = self.states[-1]
        start = state.start if state.mode in (Mode.STRING, Mode.SCALAR, Mode.NAME) else state.at
        frame: Frame | None = state.frame
        if frame is None and self._stream.judge.root.checks:
            return 0
        while frame is not None:
            if frame.spot.is_checked:
                start = frame.start
            frame = frame.outer
        return start

    def ahead(self, text: bytes | bytearray, wrong: Callable[[bytes], str | None]) -> Ahead:
        """What this search knows of texts that begin with ``text``; ``wrong`` checks a whole one."""
        return Ahead(self._stream, self.states[-1], bytes(text), frozenset(self._rests(text)), wrong)

    def clone(self) -> Search:
        twin = Search(self._stream.judge, self._tokens)
        twin._refused, twin._strikes, twin.states = set(self._refused), dict(self._strikes), list(self.states)
        return twin


@dataclass(frozen=True)
class Ahead:
    """See way_out.Judged."""

    stream: Stream
    start: State
    text: bytes
    refused: frozenset[bytes]
    wrong: Callable[[bytes], str | None]

    def begin(self) -> State:
        return self.start

    def after(self, place: State, path: bytes) -> State | None:
        if any(path.startswith(refused) for refused in self.refused):
            return None
        state, violation = self.stream.advance(place, self.text + path)
        return state if violation is None else None

    def valid(self, path: bytes) -> bool:
        allowed = not any(path.startswith(refused) for refused in self.refused)
        return allowed and self.wrong(self.text + path) is None


def _back_from(end: int, start: int) -> tuple[int, ...]:
    """The end twice, then places closer and closer to the beginning, then that, too."""
    steps = (end - (end - start) * step // PATIENCE for step in range(1, PATIENCE))
    return (end, end, *(place for place in steps if place > start + 1), start + 1)
