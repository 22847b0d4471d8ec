"""The bytes of every token, and which tokens begin with given bytes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


class TokenTable:
    """``bytes_of[id]`` is what token ``id`` adds to the text; special tokens and unused ids add nothing."""

    def __init__(self, bytes_of: Sequence[bytes]) -> None:
        self.bytes_of = bytes_of

    def text(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.bytes_of[id] for id in ids)

    def starting_with(self, prefix: bytes) -> Ids:
        """Ids of the tokens whose bytes begin with ``prefix``, which must not be empty."""
        assert prefix
        words, ids = self._sorted
        low = bisect_left(words, prefix)
        high = bisect_left(words, prefix + b"\xff" * 2) if prefix[-1:] != b"\xff" else len(words)
        found = ids[low:high]
        return found[[words[i].startswith(prefix) for i in range(low, high)]]

    def fewest(self, text: bytes) -> list[int] | None:
        """The fewest tokens that spell ``text``; None where a byte has no token."""
        best: list[tuple[int, int]] = [(0, -1)]  # for each length: number of tokens, last token
        for end in range(1, len(text) + 1):
            options = [
                (best[start][0] + 1, id)
                for start in range(max(0, end - self._longest), end)
                if best[start][0] >= 0 and (id := self._id_of.get(text[start:end], -1)) >= 0
            ]
            best.append(min(options, default=(-1, -1)))
        ids: list[int] = []
        at = len(text)
        while at > 0:
            if best[at][0] < 0:
                return None
            ids.append(best[at][1])
            at -= len(self.bytes_of[best[at][1]])
        return ids[::-1]

    @cached_property
    def _sorted(self) -> tuple[list[bytes], Ids]:
        order = sorted((word, id) for id, word in enumerate(self.bytes_of) if word)
        return [word for word, _ in order], np.array([id for _, id in order], np.int64)

    @cached_property
    def _id_of(self) -> dict[bytes, int]:
        return {word: id for id, word in reversed(list(enumerate(self.bytes_of))) if word}

    @cached_property
    def _longest(self) -> int:
        return min(64, max(map(len, self.bytes_of)))
