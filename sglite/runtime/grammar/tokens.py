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

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token."""
        return max(map(len, self.bytes_of), default=0)

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
        ids, size, (words, _) = self._id_of, len(text), self._sorted
        cost, last = [0] + [size + 1] * size, [-1] * (size + 1)  # of each beginning: how many tokens, which is last
        for start in range(size):
            if cost[start] > size:
                continue
            for end in range(start + 1, size + 1):
                word = text[start:end]
                if cost[start] + 1 < cost[end] and word in ids:
                    cost[end], last[end] = cost[start] + 1, ids[word]
                at = bisect_left(words, word)
                if at == len(words) or not words[at].startswith(word):
                    break  # no longer token begins so
        return self._back(last, size) if cost[size] <= size else None

    def _back(self, last: Sequence[int], at: int) -> list[int]:
        """The tokens that lead to ``at``, where ``last[i]`` leads to ``i``."""
        ids = []
        while at > 0:
            ids.append(last[at])
            at -= len(self.bytes_of[last[at]])
        return ids[::-1]

    @cached_property
    def _sorted(self) -> tuple[list[bytes], Ids]:
        order = sorted((word, id) for id, word in enumerate(self.bytes_of) if word)
        return [word for word, _ in order], np.array([id for _, id in order], np.int64)

    @cached_property
    def _id_of(self) -> dict[bytes, int]:
        return {word: id for id, word in reversed(list(enumerate(self.bytes_of))) if word}
