"""Validate, roll back, resample: the part of a matcher that knows what was tried and must not be tried again.

What is refused is a set of byte strings, each the beginning of a text: nothing that begins so is allowed any more.
That is independent of how a text is cut into tokens, so a rollback to any token boundary forbids the right tokens
there. A place where nothing is allowed any more is refused itself, and one goes back further.
"""

from __future__ import annotations

import numpy as np

from sglite.runtime.grammar.base import MaskRow
from sglite.runtime.grammar.stream import Frame, Judge, Mode, State, Stream, Violation
from sglite.runtime.grammar.tokens import TokenTable

PATIENCE = 6
"""How often a string or number may be ended differently before its beginning is given up."""


class Search:
    """``states[i]`` is the place in the JSON after i tokens."""

    def __init__(self, judge: Judge, tokens: TokenTable) -> None:
        self._stream = Stream(judge)
        self._tokens = tokens
        self._refused: set[bytes] = set()
        self._strikes: dict[int, int] = {}
        self.states: list[State] = [self._stream.begin()]

    def advance(self, text: bytes | bytearray) -> Violation | None:
        """One more token was accepted; ``text`` is all of it, with that token."""
        state, violation = self._stream.advance(self.states[-1], text)
        self.states.append(state)
        return violation

    def at_end(self, text: bytes | bytearray) -> Violation | None:
        """What is wrong with ``text`` as a whole answer."""
        return self._stream.finish(self.states[-1], text)

    def rollback(self, n: int, length: int) -> None:
        """``n`` tokens are taken back; ``length`` bytes are left."""
        del self.states[len(self.states) - n :]
        self._strikes = {start: times for start, times in self._strikes.items() if start < length}

    def refuse(self, text: bytes) -> None:
        self._refused.add(text)

    def give_up(self, violation: Violation, text: bytes | bytearray) -> int:
        """Refuse a part of the text for a violation, more of it each time, and return the part's length."""
        times = self._strikes.get(violation.start, 0)
        self._strikes[violation.start] = times + 1
        ends = violation.ends if len(violation.ends) > 1 else violation.ends * PATIENCE + (violation.start + 1,)
        end = ends[times % len(ends)]
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

    def clone(self) -> Search:
        twin = Search(self._stream.judge, self._tokens)
        twin._refused, twin._strikes, twin.states = set(self._refused), dict(self._strikes), list(self.states)
        return twin
