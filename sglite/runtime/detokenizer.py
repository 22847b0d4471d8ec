"""From ids to text as they come: only whole characters, and never the whole text again."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Iterable


class Detokenizer:
    """One sample's text. What ``push`` and then ``flush`` return, joined, is ``Tokenizer.decode`` of all the ids.

    ``token_bytes`` gives the bytes a token stands for; ids in ``skipped`` stand for nothing; ``drop_space`` leaves out
    a space at the very beginning. Work per token does not depend on how many came before.
    """

    def __init__(
        self, token_bytes: Callable[[int], bytes], skipped: Collection[int] = (), *, drop_space: bool = False
    ) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._drop_space = drop_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.pending = False
        """Whether an incomplete character waits for more ids."""

    def push(self, ids: Iterable[int]) -> str:
        """The complete characters that these ids add; invalid bytes become replacement characters."""
        data = b"".join([self._token_bytes(i) for i in ids if i not in self._skipped])
        if data.isascii() and not self.pending:  # as most tokens are
            return self._first(data.decode("ascii")) if self._drop_space else data.decode("ascii")
        text = self._decoder.decode(data)
        self.pending = bool(self._decoder.getstate()[0])
        return self._first(text)

    def flush(self) -> str:
        """What is left of an incomplete character, as a replacement character; "" if there is none."""
        self.pending = False
        return self._first(self._decoder.decode(b"", final=True))

    def _first(self, text: str) -> str:
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text
