"""Which token ids an answer was made of, so that it stands in the next turn's prompt exactly as it was generated.

A client sends an answer back as text, and text has more than one encoding: the model's own need not be the one that the
tokenizer would choose. With its own ids, the next turn finds everything in the prefix cache that this one computed.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass

from sglite.protocol import Prompt, Segment, Text, Tokens

Key = bytes

TOKENS_KEPT = 2_000_000
"""Ids that are remembered at most, oldest answers forgotten first: about as many bytes times eight."""


@dataclass(frozen=True, slots=True)
class Recalled:
    """``rewritten`` counts answers that we gave, but not after this prefix: the client, or the model's template, shows
    the turns before them differently now."""

    prompt: Prompt
    exact: int = 0
    rewritten: int = 0


class AnswerMemo:
    """Bounded; used from one event loop."""

    def __init__(self, tokens_kept: int = TOKENS_KEPT) -> None:
        self._room = tokens_kept
        self._spans: OrderedDict[Key, tuple[Key, Prompt, int]] = OrderedDict()
        self._texts: dict[Key, int] = {}
        """How many answers of this text there are, after any prefix."""

    def remember(self, namespace: str, prompt: Prompt, text: str, ids: tuple[int, ...], uncovered: int) -> None:
        """An answer to ``prompt``: all of ``text`` but the last ``uncovered`` characters is made of ``ids``."""
        if not text or not ids:
            return
        covered = len(text) - uncovered
        rest = (Text(text[covered:]),) if uncovered else ()
        prefix = _Prefix(namespace)
        for segment in prompt:
            prefix.add(segment)
        self._put(prefix.key(text), _key(namespace, text), (Tokens(ids, text[:covered]), *rest), len(ids))

    def recall(self, namespace: str, prompt: Prompt, answers: Container[str]) -> Recalled:
        """The prompt with those texts among ``answers`` as the ids they were generated as, where we did."""
        prefix, shown = _Prefix(namespace), list[Segment]()
        exact = rewritten = 0
        for segment in prompt:
            span: Prompt = (segment,)
            if isinstance(segment, Text) and not segment.special and segment.value in answers:
                found = self._get(prefix.key(segment.value))
                span = found or span
                exact += found is not None
                rewritten += found is None and _key(namespace, segment.value) in self._texts
            shown += span
            prefix.add(segment)
        return Recalled(tuple(shown), exact, rewritten)

    def _get(self, key: Key) -> Prompt | None:
        if key not in self._spans:
            return None
        self._spans.move_to_end(key)
        return self._spans[key][1]

    def _put(self, key: Key, text: Key, span: Prompt, size: int) -> None:
        self._drop(key)
        self._spans[key] = text, span, size
        self._texts[text] = self._texts.get(text, 0) + 1
        self._room -= size
        while self._room < 0:
            self._drop(next(iter(self._spans)))

    def _drop(self, key: Key) -> None:
        text, _, size = self._spans.pop(key, (b"", (), 0))
        self._room += size
        if size and self._texts[text] == 1:
            del self._texts[text]
        elif size:
            self._texts[text] -= 1


class _Prefix:
    """A running digest of a prompt as it reads: how it is cut into segments does not count, what is special does."""

    def __init__(self, namespace: str) -> None:
        self._digest = hashlib.blake2b(namespace.encode() + b"\0", digest_size=16)
        self._special = False

    def add(self, segment: Segment) -> None:
        special = isinstance(segment, Text) and segment.special
        if special is not self._special:
            self._digest.update(b"\0")
            self._special = special
        self._digest.update((segment.value if isinstance(segment, Text) else segment.text).encode(errors="replace"))

    def key(self, text: str) -> Key:
        digest = self._digest.copy()
        digest.update(b"\0answer\0" + text.encode(errors="replace"))
        return digest.digest()


def _key(namespace: str, text: str) -> Key:
    return hashlib.blake2b(f"{namespace}\0{text}".encode(errors="replace"), digest_size=16).digest()
