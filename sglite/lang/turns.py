"""Chat turns inside a transcript, in the frame that the model's own template gives them."""

from __future__ import annotations

from dataclasses import dataclass

from sglite.chat import Closing, Frames, Layout
from sglite.lang.transcript import Mark, Transcript
from sglite.protocol import Prompt, Text, prompt_text


@dataclass(frozen=True, slots=True)
class Turn:
    role: str
    content: Prompt


@dataclass(slots=True)
class OpenTurn:
    """``start`` is before the template's opening text, None where the whole was rewritten to open it."""

    role: str
    start: Mark | None
    content: Mark
    opening: str
    generated: bool = False


@dataclass(slots=True)
class Turns:
    """Owned by one branch; ``copy`` for a fork. Methods return the text they appended, for streams."""

    finished: tuple[Turn, ...] = ()
    open: OpenTurn | None = None
    loose: bool = False
    """There is text outside the turns, which no rewriting of the whole could put back."""

    def copy(self) -> Turns:
        turn = self.open
        again = turn and OpenTurn(turn.role, turn.start, turn.content, turn.opening, turn.generated)
        return Turns(self.finished, again, self.loose)

    def messages(self) -> list[dict[str, str]]:
        return [{"role": turn.role, "content": prompt_text(turn.content)} for turn in self.finished]

    def said(self, text: str) -> None:
        self.loose = self.loose or (self.open is None and bool(text.strip()))

    def generated(self) -> None:
        """The model answers here, so the turn's opening has been sent as it is."""
        if self.open is None:
            self.loose = True
        else:
            self.open.generated = True

    def begin(self, role: str, transcript: Transcript, frames: Frames, notes: list[str]) -> str:
        opening = frames.opening((*(turn.role for turn in self.finished), role))
        start: Mark | None = transcript.mark()
        text = opening.text
        if opening.layout is not None:
            start = None
            text = self._rewrite(opening.layout, transcript, notes)
        else:
            transcript.say(text, special=True)
        self.open = OpenTurn(role, start, transcript.mark(), text)
        return text

    def end(self, transcript: Transcript, frames: Frames, notes: list[str]) -> str:
        turn, self.open = self.open, None
        assert turn is not None, "the author's side checks the order of turns"
        closing = frames.closing((*(t.role for t in self.finished), turn.role))
        said = transcript.since(turn.content)
        content = _stripped(said) if closing.strips and not turn.generated else said
        opening = turn.opening if closing.history is None else closing.history
        self.finished = (*self.finished, Turn(turn.role, content))
        if turn.generated:
            self._note(turn, closing, prompt_text(content), notes)
        elif closing.layout is not None:
            self._rewrite(closing.layout, transcript, notes)
            return closing.text
        elif turn.start is not None and (content != said or opening != turn.opening):
            transcript.cut(turn.start)
            transcript.say(opening, special=True)
            transcript.extend(content)
        transcript.say(closing.text, special=True)
        return closing.text

    def _note(self, turn: OpenTurn, closing: Closing, text: str, notes: list[str]) -> None:
        """Where the prompts to come differ from what the template would make of the finished turns."""
        where = f"turn {len(self.finished) - 1} ({turn.role})"
        if closing.dropped:
            notes.append(f"{where}: the template does not show this turn; it is kept as generated")
        elif closing.layout is not None:
            notes.append(f"{where}: with this answer the template changes earlier turns; they are kept")
        elif closing.history is not None and closing.history.strip() != turn.opening.strip():
            notes.append(f"{where}: the template opens finished turns differently; it is kept as generated")
        elif closing.strips and text != text.strip():
            notes.append(f"{where}: the template strips white space; the answer is kept as generated")

    def _rewrite(self, layout: Layout, transcript: Transcript, notes: list[str]) -> str:
        """The template shows the earlier turns differently from now on: its text is redone, contents stay exact."""
        tail = layout[-1] if layout and isinstance(layout[-1], str) else ""
        where = f"turn {len(self.finished)}"
        if self.loose:
            notes.append(f"{where}: the template rewrites earlier turns; they are kept, there is text between them")
            transcript.say(tail, special=True)
            return tail
        notes.append(f"{where}: the template rewrote the text around earlier turns; the prefix before it is lost")
        transcript.restart()
        for part in layout:
            if isinstance(part, str):
                transcript.say(part, special=True)
            else:
                transcript.extend(self.finished[part].content)
        return tail


def _stripped(content: Prompt) -> Prompt:
    """Without white space at both ends, as far as it is text; exact tokens are left alone."""
    parts = list(content)
    while parts and isinstance(parts[0], Text):
        head = parts[0].value.lstrip()
        if head:
            parts[0] = Text(head, parts[0].special)
            break
        parts.pop(0)
    while parts and isinstance(parts[-1], Text):
        tail = parts[-1].value.rstrip()
        if tail:
            parts[-1] = Text(tail, parts[-1].special)
            break
        parts.pop()
    return tuple(parts)
