"""Keeps an answer within its budget of tokens: at every place it knows that there is a way out, or how to find one.

Finding the way out of every place would cost more than the mask. So what a token can add to it at most is estimated
(``growth``), and the way is looked for only when that estimate comes near what is left. It is only an estimate: where
it was wrong, the token that went too far is taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglite.runtime.grammar.base import MaskGrammar, MaskMatcher
from sglite.runtime.grammar.sizes import Sizes
from sglite.runtime.grammar.tokens import TokenTable
from sglite.runtime.grammar.way_out import Brackets, ByteMatcher, Effort, Judged, Leads, Way, fewest_tokens, way_out

START = Effort(5_000, 0.3)
"""For the fewest tokens of a grammar: enough for an answer of 2,000 characters."""
STEP = Effort(1_000, 0.1)
"""For the way out of one place, on the engine's thread."""
MARGIN = 16
"""From so many tokens before the estimate on, every place is looked at: an escape or half a character adds a few."""


@dataclass(frozen=True)
class Exits:
    """What a grammar knows of its ways out. ``is_json`` says that brackets tell something; ``sizes`` estimates;
    ``leads`` says what to try."""

    masks: MaskGrammar
    tokens: TokenTable
    is_json: bool
    sizes: Sizes
    leads: Leads

    def shortest(self, judged: Judged | None, enough: int = 0) -> list[int] | None:
        """The fewest tokens of a complete answer, as far as the search goes; or the first that are no more than
        ``enough``."""

        def fits(path: bytes) -> bool:
            ids = self._counted(path)
            return ids is not None and len(ids) <= enough

        found = self.search(self.masks.byte_matcher(), b"", START, fits, judged).path
        return None if found is None else self._counted(found)

    def _counted(self, path: bytes) -> list[int] | None:
        return fewest_tokens(self.tokens, path, lambda ids: _ends(self.masks.matcher(), ids))

    def search(
        self,
        place: ByteMatcher,
        text: bytes | bytearray,
        effort: Effort,
        enough: Callable[[bytes], bool],
        judged: Judged | None,
    ) -> Way:
        """The way out of ``place``, where ``text`` has led."""
        brackets = Brackets().after(text) if self.is_json else None
        return way_out(place, brackets, effort, enough, judged, self.leads)

    def grown_by(self, ids: Sequence[int]) -> int:
        """What ``ids`` add to the way out, at most."""
        return self.sizes.growth * sum(len(self.tokens.bytes_of[id].translate(None, _INERT)) for id in ids)


_INERT = bytes(byte for byte in range(256) if byte not in b'{[",')


UNKNOWN: tuple[list[int] | None, int] = (None, 1 << 30)
"""Way and estimate of a place nobody has looked at."""


class Budget:
    """One sequence's budget. ``way`` is a way out of this place where one is known; ``left`` counts tokens."""

    def __init__(self, exits: Exits, left: int, way: list[int] | None) -> None:
        self._exits = exits
        self.left = left
        self.way = way
        self.hopeless = False
        """The last look showed that nothing right can follow, whatever the budget."""
        self._spare: list[int] = way or []
        self._bound = len(way) if way is not None else exits.sizes.whole
        self._before: list[tuple[list[int] | None, int]] = []
        """Way and estimate before each token."""
        self._bytes: ByteMatcher | None = None
        self._read = 0
        """Bytes of the text that ``_bytes`` has read."""

    @property
    def is_tight(self) -> bool:
        """Nothing may follow but the way out."""
        return self.way is not None and len(self.way) >= self.left

    def spend(self, ids: Sequence[int]) -> None:
        self.left -= len(ids)
        self._before += [(self.way, self._bound), *[UNKNOWN] * (len(ids) - 1)][: len(ids)]
        if self.way is not None and self.way[: len(ids)] == list(ids):
            self.way = self.way[len(ids) :]
            self._bound = len(self.way)
        else:
            self.way = None
            self._bound += self._exits.grown_by(ids)

    def fits(self, masks: MaskMatcher, text: bytes | bytearray, judged: Judged | None) -> bool:
        """Whether the text can still be completed with what is left."""
        if self.way is None and self._bound + MARGIN >= self.left:
            self.way, self._bound = self._look(masks, text, judged)
        return self._bound <= self.left

    def leads_out(self, masks: MaskMatcher, text: bytes | bytearray, judged: Judged | None) -> bool:
        """Whether there is a way out that fits; ``way`` is one then."""
        if self.way is None:
            found, self.hopeless = self._search(text, judged)
            self.way = self._counted(masks, found)
            self._bound = len(self.way) if self.way is not None else self._bound
        return self.way is not None and len(self.way) <= self.left

    def _when_not_found(self) -> int:
        """A search that was cut short proves nothing: while enough is left, go by the estimate."""
        enough = self._exits.sizes.whole + self._exits.sizes.growth
        return self._exits.sizes.whole if self.left > enough and not self.hopeless else self.left + 1

    def allows(self, ids: Sequence[int]) -> bool:
        """Whether ``ids`` can be taken without a look at the ways out."""
        return self._bound + self._exits.grown_by(ids) + len(ids) + MARGIN < self.left

    def give_back(self, n: int, length: int) -> None:
        """``n`` tokens are taken back; ``length`` bytes of text are left."""
        self.left += n
        self.way, self._bound = self._before[-n]
        del self._before[-n:]
        if self._read > length:
            self._bytes, self._read = None, 0

    def forget(self) -> None:
        """The way leads through what was refused since it was found."""
        self.way, self._bound = UNKNOWN

    def clone(self) -> Budget:
        twin = Budget(self._exits, self.left, self.way)
        twin._spare, twin._bound, twin._before = self._spare, self._bound, list(self._before)
        return twin

    def _look(self, masks: MaskMatcher, text: bytes | bytearray, judged: Judged | None) -> tuple[list[int] | None, int]:
        """A way out of this place where its tokens matter, and how long it is at most."""
        self.hopeless = False
        spare = self._spare
        if len(spare) <= self.left and _ends(masks.clone(), spare) and _holds(judged, self._exits.tokens.text(spare)):
            return spare, len(spare)
        found, self.hopeless = self._search(text, judged)
        if found is not None and 2 * len(found) < self.left:
            return None, len(found)  # a byte is a token at worst, so they need not be counted
        ids = self._counted(masks, found)
        return ids, len(ids) if ids is not None else self._when_not_found()

    def _search(self, text: bytes | bytearray, judged: Judged | None) -> Way:
        effort = STEP if text else START
        return self._exits.search(self._place(text), text, effort, lambda path: len(path) <= self.left, judged)

    def _counted(self, masks: MaskMatcher, found: bytes | None) -> list[int] | None:
        """What was found, in tokens."""
        ids = None if found is None else fewest_tokens(self._exits.tokens, found, lambda ids: _ends(masks.clone(), ids))
        self._spare = ids if ids is not None else self._spare
        return ids

    def _place(self, text: bytes | bytearray) -> ByteMatcher:
        if self._bytes is None:
            self._bytes = self._exits.masks.byte_matcher()
        fine = self._read == len(text) or self._bytes.accept(bytes(text[self._read :]))
        assert fine, "the bytes of accepted tokens are in the grammar"
        self._read = len(text)
        return self._bytes


def _holds(judged: Judged | None, text: bytes) -> bool:
    return judged is None or judged.valid(text)


def _ends(matcher: MaskMatcher, ids: list[int]) -> bool:
    return matcher.accept(ids) and matcher.accepting
