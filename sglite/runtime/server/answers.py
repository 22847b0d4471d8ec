"""Which token ids an answer was made of, so that it stands in the next turn's prompt exactly as it was generated.

A client sends an answer back as it was told it: what was said, thought and called, apart. The model's template writes
these down in its own way, and text has more than one encoding: neither need be what the model wrote. With its own ids
the next turn finds everything in the prefix cache that this one computed.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import TypeVar

from sglite.protocol import Prompt, Segment, Text, Tokens, prompt_text

T = TypeVar("T")
Key = bytes

TOKENS_KEPT = 2_000_000
"""Ids that are remembered at most, oldest answers forgotten first: about as many bytes times eight."""

HEAD = 16
"""Of the text before an answer, how many characters say where in a prompt others may begin: those of a turn's head."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a client is told of an answer, and sends back. ``calls``: names, and arguments as ``json.dumps`` writes."""

    content: str
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()

    def key(self, namespace: str) -> Key:
        text = json.dumps((namespace, self.content, self.reasoning, self.calls))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Recalled:
    """``rewritten`` counts answers that we gave, but that stand elsewhere or otherwise now: the client, or the model's
    template, shows them or the turns before them differently."""

    prompt: Prompt
    exact: int = 0
    rewritten: int = 0


@dataclass(frozen=True, slots=True)
class _Answer:
    said: Key
    written: Prompt
    head: str
    size: int


class AnswerMemo:
    """Bounded; used from one event loop."""

    def __init__(self, tokens_kept: int = TOKENS_KEPT) -> None:
        self._room = tokens_kept
        self._answers: OrderedDict[tuple[Key, Key], _Answer] = OrderedDict()
        """By what was before it, and by what was said."""
        self._given: dict[Key, set[Key]] = {}
        """What was said after each."""
        self._said: Counter[Key] = Counter()
        self._heads: Counter[str] = Counter()

    def remember(self, namespace: str, prompt: Prompt, said: Said, written: Prompt) -> None:
        """An answer to ``prompt``: told as ``said``, ``written`` by the model and, in tool calls, for it."""
        size = sum(len(part.ids) for part in written if isinstance(part, Tokens))
        if not size:
            return
        last = prompt[-1] if prompt else Text("")
        head = last.value[-HEAD:] if isinstance(last, Text) and last.special else ""
        prefix = _Prefix(namespace)
        prefix.add(*prompt)
        self._put(prefix.key, _Answer(said.key(namespace), written, head, size))

    def recall(self, namespace: str, prompt: Prompt, answers: Collection[Said]) -> Recalled:
        """The prompt with those ``answers`` as they were generated that follow what they were given to."""
        wanted = {said.key(namespace) for said in answers}
        prefix, shown, exact = _Prefix(namespace), list[Segment](), 0
        pieces = [piece for segment in prompt for piece in self._cut(segment)]
        at = 0
        while at < len(pieces):
            answer, after = self._found(prefix.key, wanted, pieces, at)
            step: Sequence[Segment] = answer.written if answer else pieces[at:after]
            at = after
            exact += answer is not None
            shown += step
            prefix.add(*step)
        known = sum(said.key(namespace) in self._said for said in answers)
        return Recalled(_joined(shown), exact, max(0, known - exact))

    def _cut(self, segment: Segment) -> Iterator[Segment]:
        """A segment in pieces, each up to where an answer may begin."""
        if not isinstance(segment, Text) or not segment.special:
            yield segment
            return
        text, start = segment.value, 0
        for end in sorted({end for head in self._heads if head for end in _ends(text, head)}):
            yield Text(text[start:end], special=True)
            start = end
        if start < len(text):
            yield Text(text[start:], special=True)

    def _found(self, prefix: Key, wanted: set[Key], pieces: list[Segment], at: int) -> tuple[_Answer | None, int]:
        """The answer that begins here, if one does, and with which piece the prompt goes on: what the answer leaves of
        one takes its place."""
        for said in wanted & self._given.get(prefix, set()):
            answer = self._answers[prefix, said]
            end = end_of(prompt_text(answer.written), pieces, at)
            if end is not None:
                self._answers.move_to_end((prefix, said))
                after, chars = end
                if chars:
                    pieces[after] = _tail(pieces[after], chars)
                return answer, after
        return None, at + 1

    def _put(self, prefix: Key, answer: _Answer) -> None:
        self._drop((prefix, answer.said))
        self._answers[prefix, answer.said] = answer
        self._given.setdefault(prefix, set()).add(answer.said)
        self._said[answer.said] += 1
        self._heads[answer.head] += 1
        self._room -= answer.size
        while self._room < 0:
            self._drop(next(iter(self._answers)))

    def _drop(self, key: tuple[Key, Key]) -> None:
        answer = self._answers.pop(key, None)
        if answer is None:
            return
        self._room += answer.size
        self._given[key[0]].discard(key[1])
        if not self._given[key[0]]:
            del self._given[key[0]]
        _uncount(self._said, answer.said)
        _uncount(self._heads, answer.head)


class _Prefix:
    """A running digest of a prompt as it reads: how it is cut into segments does not count, what is special does."""

    def __init__(self, namespace: str) -> None:
        self._digest = hashlib.blake2b(namespace.encode() + b"\0", digest_size=16)
        self._special = False

    def add(self, *segments: Segment) -> None:
        for segment in segments:
            text = prompt_text((segment,))
            if not text:
                continue
            special = isinstance(segment, Text) and segment.special
            if special is not self._special:
                self._digest.update(b"\0")
                self._special = special
            self._digest.update(text.encode(errors="replace"))

    @property
    def key(self) -> Key:
        return self._digest.copy().digest()


def _uncount(counts: Counter[T], name: T) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]


def end_of(written: str, pieces: Sequence[Segment], at: int) -> tuple[int, int] | None:
    """Where the pieces from ``at`` on have shown all of a text: a piece, and how many of its characters belong to it.

    White space does not count, since templates put their own around what is said, thought and called; None if they show
    something else.
    """
    wanted, shown = _dense(written), 0
    while at < len(pieces):
        text = prompt_text((pieces[at],))
        dense = _dense(text)
        if not wanted.startswith(dense, shown) or shown + len(dense) == len(wanted):
            break
        shown += len(dense)
        at += 1
    else:
        return None
    if not wanted or not dense.startswith(wanted[shown:]):
        return None
    end = _nth_character(text, len(wanted) - shown)
    trailing = written[len(written.rstrip()) :]
    return at, end + _shared(text[end:], trailing)


def _dense(text: str) -> str:
    return "".join(text.split())


def _nth_character(text: str, n: int) -> int:
    """Behind so many characters that are no white space."""
    places = (i for i, character in enumerate(text, 1) if not character.isspace())
    return next(islice(places, n - 1, None)) if n else 0


def _tail(segment: Segment, start: int) -> Segment:
    assert isinstance(segment, Text), "a rendered prompt is text"
    return replace(segment, value=segment.value[start:])


def _shared(a: str, b: str) -> int:
    """Length of the common beginning; for short ones."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _ends(text: str, head: str) -> Iterator[int]:
    """Where each ``head`` in a text ends."""
    at = text.find(head)
    while at >= 0:
        yield at + len(head)
        at = text.find(head, at + 1)


def _joined(segments: Sequence[Segment]) -> Prompt:
    """Neighbours that were one text are one again; empty ones are gone."""
    joined: list[Segment] = []
    for segment in segments:
        last = joined[-1] if joined else None
        if isinstance(segment, Text) and isinstance(last, Text) and segment.special == last.special:
            joined[-1] = replace(last, value=last.value + segment.value)
        elif not isinstance(segment, Text) or segment.value:
            joined.append(segment)
    return tuple(joined)
