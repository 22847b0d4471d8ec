"""A state's text so far, as prompt segments that forks share.

``closed`` is an immutable tuple, so a fork is a reference; text that may still grow waits in ``pieces`` until
something else follows, so contiguous text becomes one segment and is encoded together.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sglite.errors import ProgramError
from sglite.protocol import Prompt, Segment, Text, Tokens, prompt_text


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a transcript: closed segments before it, and characters of the text that was open."""

    epoch: int
    segments: int
    characters: int


@dataclass(slots=True)
class Transcript:
    closed: Prompt = ()
    pieces: list[str] = field(default_factory=list)
    special: bool = False
    epoch: int = 0
    """Counts rewrites of the whole: marks of an earlier epoch point nowhere."""

    def say(self, text: str, *, special: bool = False) -> None:
        if not text:
            return
        if special is not self.special:
            self._close()
            self.special = special
        self.pieces.append(text)

    def add(self, ids: tuple[int, ...], text: str) -> None:
        """A generated span, token for token."""
        self._close()
        self.closed = (*self.closed, Tokens(ids, text))

    def extend(self, segments: Prompt) -> None:
        for segment in segments:
            if isinstance(segment, Text):
                self.say(segment.value, special=segment.special)
            else:
                self.add(segment.ids, segment.text)

    def prompt(self) -> Prompt:
        self._close()
        return self.closed

    def text(self) -> str:
        return prompt_text(self.closed) + "".join(self.pieces)

    def mark(self) -> Mark:
        return Mark(self.epoch, len(self.closed), sum(map(len, self.pieces)))

    def since(self, mark: Mark) -> Prompt:
        """What was added after ``mark``."""
        if mark.epoch != self.epoch:
            raise ProgramError("the model's chat template has rewritten the text that this refers to")
        segments = (*self.closed, *self._open())[mark.segments :]
        if not mark.characters:
            return segments
        head = segments[0]
        assert isinstance(head, Text), "a mark inside a segment stands in text"
        rest = head.value[mark.characters :]
        return (Text(rest, head.special), *segments[1:]) if rest else segments[1:]

    def cut(self, mark: Mark) -> Prompt:
        """Takes everything after ``mark`` away and returns it."""
        taken = self.since(mark)
        kept: list[Segment] = [*self.closed, *self._open()][: mark.segments + 1]
        head = kept.pop() if len(kept) > mark.segments else None
        self.closed, self.pieces = tuple(kept), []
        if mark.characters and isinstance(head, Text):
            self.special = head.special
            self.pieces = [head.value[: mark.characters]]
        return taken

    def restart(self) -> None:
        """Empties it; marks made before point nowhere from now on."""
        self.closed, self.pieces = (), []
        self.epoch += 1

    def copy(self) -> Transcript:
        """Shares every segment."""
        return Transcript(self.closed, list(self.pieces), self.special, self.epoch)

    def _open(self) -> Prompt:
        return (Text("".join(self.pieces), self.special),) if self.pieces else ()

    def _close(self) -> None:
        if self.pieces:
            self.closed = (*self.closed, *self._open())
            self.pieces = []
