"""From ids to text as they come: only whole characters, and never the whole text again."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Iterable


class Detokenizer:
    """One sample's text. What ``push`` and then ``flush`` return, joined, is ``Tokenizer.decode`` of all the ids.

    ``token_bytes`` gives the bytes a token stands for; ids in ``skipped`` stand for nothing; ``drop_space`` leaves out
    a space at the very beginning. Work per token does not depend on how many came before. ``texts`` is filled with the
    texts of ids that are whole characters: to be shared by all with the same ``token_bytes`` and ``skipped``.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        skipped: Collection[int] = (),
        *,
        drop_space: bool = False,
        texts: dict[int, str] | None = None,
    ) -> None:
        self._token_bytes = token_bytes
        self._texts = {} if texts is None else texts
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

    def whole(self, token: int) -> str | None:
        """What ``push`` of this id would return, where that is known and leaves nothing behind; else None."""
        return None if self.pending or self._drop_space else self._texts.get(token)

    def push_one(self, token: int) -> str:
        """Like ``push``."""
        alone = not self.pending and not self._drop_space
        text = self.push((token,))
        if alone and not self.pending:
            self._texts[token] = text
        return text

    def flush(self) -> str:
        """What is left of an incomplete character, as a replacement character; "" if there is none."""
        self.pending = False
        return self._first(self._decoder.decode(b"", final=True))

    def _first(self, text: str) -> str:
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text
