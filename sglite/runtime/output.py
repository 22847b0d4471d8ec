"""From sampled ids to what the caller sees: characters, stop strings, and which ids the text is made of.

Text is handed out only when it is certain: no half characters, and nothing that may turn out to be the beginning of
a stop string. Ids follow their text, so a caller who keeps ``(ids, text)`` can send the ids back as an exact prefix.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sglite.protocol import TokenLogprob
from sglite.runtime.stoppattern import StopPattern


class Detokenizer(Protocol):
    def whole(self, token: int) -> str | None:
        """The characters that this id adds, where they are known to be whole; None, and nothing done, else."""
        ...

    def push_one(self, token: int) -> str:
        """The complete characters that this id adds."""
        ...

    def flush(self) -> str:
        """What is left of an incomplete character, as replacement characters."""
        ...

    @property
    def pending(self) -> bool:
        """Whether an incomplete character waits for more ids."""
        ...


class Emission(NamedTuple):
    """New text, the ids it is made of, and how many characters at its end no id covers (a stop cut a token)."""

    text: str = ""
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    uncovered: int = 0
    stopped: str | None = None


@dataclass(slots=True)
class _Unit:
    """Ids that together make whole characters, and the length of the text up to their end."""

    ids: list[int]
    logprobs: list[TokenLogprob]
    end: int


class OutputStream:
    """One sample's output: ``push`` each id as it is known; ``close`` at the end, unless a stop string was found."""

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str] = (), patterns: Sequence[StopPattern] = ()
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = tuple(stops)
        self._scanners = [pattern.scanner() for pattern in patterns]
        self._stopless = not self._stops and not self._scanners
        self._longest = max((len(s) for s in self._stops), default=0)
        self._held = ""
        self._emitted = 0  # length of the text handed out
        self._covered = 0  # length of the text that the ids handed out decode to
        self._open = _Unit([], [], 0)
        self._units: deque[_Unit] = deque()

    def passed(self, token: int) -> str | None:
        """Like ``push``, for a token of whole characters behind which nothing is held: its text, as in most steps.

        None, and nothing done, where it is not known to be one.
        """
        text = self._detokenizer.whole(token) if self._stopless and not self._open.ids else None
        if text is not None:
            self._emitted += len(text)
            self._covered = self._emitted
        return text

    def push(self, token: int, logprob: TokenLogprob | None = None) -> Emission:
        """What became certain. ``stopped`` names the stop string found, if one was: push no more then."""
        text = self._detokenizer.push_one(token)
        checked = len(self._held)
        self._held += text
        self._add(token, logprob)
        for scanner in self._scanners:
            scanner.feed(text)
        if self._stopless:
            return self._emit(len(self._held))
        found = self._find_stop(checked) or self._find_match()
        if found is not None:
            return self._cut(*found)
        return self._emit(min(len(self._held) - self._may_begin_stop(), self._may_begin_match()))

    def close(self) -> Emission:
        """Everything still held back: the sample ended for another reason than a stop string."""
        self._held += self._detokenizer.flush()
        self._seal()
        return self._emit(len(self._held))

    def _add(self, token: int, logprob: TokenLogprob | None) -> None:
        self._open.ids.append(token)
        if logprob is not None:
            self._open.logprobs.append(logprob)
        if not self._detokenizer.pending:
            self._seal()

    def _seal(self) -> None:
        self._open.end = self._emitted + len(self._held)
        self._units.append(self._open)
        self._open = _Unit([], [], 0)

    def _find_stop(self, checked: int) -> tuple[int, str] | None:
        """The earliest stop string in the held text; only where new characters may complete one is searched."""
        start = max(0, checked - self._longest + 1)
        hits = [(at, stop) for stop in self._stops if (at := self._held.find(stop, start)) >= 0]
        return min(hits, key=lambda hit: (hit[0], -len(hit[1]))) if hits else None

    def _may_begin_stop(self) -> int:
        """Length of the longest end of the held text that is a beginning of some stop string."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0

    def _find_match(self) -> tuple[int, str] | None:
        """The earliest match of a pattern. What was emitted cannot be part of one."""
        hits = [(at - self._emitted, one.source) for one in self._scanners if (at := one.found) is not None]
        return min(hits, default=None)

    def _may_begin_match(self) -> int:
        """Where the held text begins to be the beginning of a match."""
        begun = [at - self._emitted for one in self._scanners if (at := one.earliest) is not None]
        return min(begun, default=len(self._held))

    def _emit(self, count: int) -> Emission:
        text, self._held = self._held[:count], self._held[count:]
        self._emitted += len(text)
        ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        while self._units and self._units[0].end <= self._emitted:
            unit = self._units.popleft()
            ids += unit.ids
            logprobs += unit.logprobs
            self._covered = unit.end
        return Emission(text, tuple(ids), tuple(logprobs))

    def _cut(self, position: int, stop: str) -> Emission:
        emission = self._emit(position)
        return emission._replace(uncovered=self._emitted - self._covered, stopped=stop)
