"""The grammar seam: a backend compiles a constraint into a Grammar, a Grammar hands out Matchers.

A Grammar is immutable, cached and shared; a Matcher is one sequence's place in it, owned by the engine thread.

What the engine does with a matcher, in a step::

    fill_batch(matchers, mask)          # masks of all rows; rows that failed come back with their error
    matcher.accept([token])             # the sampled token; it was in the mask, so True
    n = matcher.retreat()               # nearly always 0; else drop the last n tokens and sample again from there
    matcher.forced()                    # tokens to append unsampled; accept them, then retreat() again
    matcher.settled                     # how many tokens may be shown to the caller
    matcher.terminated                  # nothing but EOS can follow: finish without sampling it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from sglite.errors import GrammarError
from sglite.protocol import Constraint
from sglite.runtime.grammar.tokens import TokenTable
from sglite.runtime.grammar.vocabulary import Vocabulary
from sglite.runtime.grammar.way_out import ByteMatcher

MaskRow = npt.NDArray[np.int32]
"""int32 [ceil(V / 32)], bit t of word t // 32 set where token t is allowed; V is the width of the logits."""

MaskBatch = npt.NDArray[np.int32]
"""int32 [B, ceil(V / 32)], C-contiguous: one MaskRow per sequence."""


class MaskMatcher(Protocol):
    """What a mask engine offers: one place in its grammar. Everything else is built on it (see guard.py)."""

    @property
    def accepting(self) -> bool:
        """The text so far is in the grammar's language."""
        ...

    @property
    def terminated(self) -> bool:
        """Nothing but EOS can follow, or EOS was accepted."""
        ...

    def fill(self, row: MaskRow) -> None:
        """Write the mask of allowed next tokens; EOS ids are allowed exactly where ``accepting``.

        Raises GrammarError (kind "limit" or "unsatisfiable") when this text cannot go on; only this request fails.
        """
        ...

    def accept(self, ids: Sequence[int]) -> bool:
        """Consume tokens. False, and nothing consumed, when one of them is not allowed."""
        ...

    def rollback(self, n: int) -> None:
        """Take the last ``n`` accepted tokens back."""
        ...

    def forced(self) -> list[int]:
        """Tokens that must come next, canonical and safe to append without sampling; may be empty.

        They are not accepted yet, and never reach past an accepting place.
        """
        ...

    def clone(self) -> Self: ...


class Matcher(MaskMatcher, Protocol):
    """What the engine holds for a sequence: a mask, and the part of the constraint that no mask can express."""

    @property
    def settled(self) -> int:
        """How many of the accepted tokens are final. Only later ones can be taken back by ``retreat``, so only
        the text of these may be streamed. Everything is settled once the text is finished."""
        ...

    @property
    def shortened(self) -> bool:
        """The budget changed what could be said: the answer is complete, its finish reason is "length"."""
        ...

    def retreat(self) -> int:
        """How many of the last accepted tokens break the constraint; the matcher has already taken them back.

        Call it after every ``accept``. For ``n > 0`` the engine drops the last ``n`` tokens of the sequence and
        computes the then last position again (its KV is a prefix hit, or simply still there) to sample anew: the
        masks from now on forbid what led here. It never reaches behind ``settled``. Raises GrammarError when the
        search has used up its rollbacks or nothing is left to try.
        """
        ...


class MaskGrammar(Protocol):
    @property
    def nbytes(self) -> int:
        """About how much memory it holds."""
        ...

    def matcher(self) -> MaskMatcher: ...

    def byte_matcher(self) -> ByteMatcher:
        """The same grammar over single bytes, at the start."""
        ...


class MaskBackend(Protocol):
    """A mask engine for one vocabulary."""

    name: str
    kinds: frozenset[str]
    vocabulary: Vocabulary
    tokens: TokenTable

    def compile(self, constraint: Constraint) -> MaskGrammar:
        """Raises GrammarError naming what is malformed, unsupported or unsatisfiable. Callable from any thread."""
        ...


class Grammar(Protocol):
    @property
    def nbytes(self) -> int:
        """About how much memory it holds."""
        ...

    @property
    def min_tokens(self) -> int | None:
        """The fewest tokens of a complete answer that are known to do (None: not known)."""
        ...

    def is_ready(self, budget: int | None) -> bool:
        """Whether ``matcher`` will answer at once for this budget. Where it will not, a first call on another thread
        than the engine's spares the engine a search of many milliseconds."""
        ...

    def matcher(self, budget: int | None = None) -> Matcher:
        """A matcher at the start. With ``budget`` (in tokens) the text is complete when the budget is used up, for
        every budget >= ``min_tokens``; a smaller one raises GrammarError naming the minimum."""
        ...


class GrammarBackend(Protocol):
    """What the cache compiles with."""

    name: str
    kinds: frozenset[str]
    """The constraint kinds it can compile."""

    def compile(self, constraint: Constraint) -> Grammar:
        """Raises GrammarError naming what is malformed, unsupported or unsatisfiable. Callable from any thread."""
        ...


FillMasks = Callable[[Sequence[Matcher], MaskBatch], Mapping[int, GrammarError]]
"""Write a row of the mask for each matcher; returns the rows that failed, with their errors."""


def fill_one_by_one(matchers: Sequence[Matcher], mask: MaskBatch) -> dict[int, GrammarError]:
    """The plain FillMasks, for any matcher."""
    failed: dict[int, GrammarError] = {}
    for i, matcher in enumerate(matchers):
        try:
            matcher.fill(mask[i])
        except GrammarError as error:
            failed[i] = error
    return failed
