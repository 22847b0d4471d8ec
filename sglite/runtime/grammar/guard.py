"""The matcher the engine holds: a mask engine's matcher, guarded by what a mask cannot express."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglite.errors import GrammarError
from sglite.protocol import Constraint
from sglite.runtime.grammar.base import MaskBackend, MaskBatch, MaskGrammar, MaskMatcher, MaskRow
from sglite.runtime.grammar.llguidance_backend import LLGuidanceMatcher, fill_rows


class GuardedBackend:
    """Compiles constraints for the engine with the mask engine it is given."""

    def __init__(self, masks: MaskBackend) -> None:
        self.masks = masks
        self.name = masks.name
        self.kinds = masks.kinds

    def compile(self, constraint: Constraint) -> GuardedGrammar:
        if constraint.kind not in self.kinds:
            raise GrammarError(
                f"{constraint.kind} is not supported by grammar={self.name}; it can do {', '.join(sorted(self.kinds))}",
                kind="unsupported",
                param=constraint.kind,
            )
        return GuardedGrammar(self.masks.compile(constraint))


class GuardedGrammar:
    def __init__(self, masks: MaskGrammar) -> None:
        self._masks = masks
        self.nbytes = masks.nbytes
        self.min_tokens: int | None = None

    def matcher(self, budget: int | None = None) -> GuardedMatcher:
        return GuardedMatcher(self._masks.matcher())


class GuardedMatcher:
    """See base.Matcher."""

    def __init__(self, masks: MaskMatcher, accepted: int = 0) -> None:
        self.masks = masks
        self._accepted = accepted
        self.shortened = False

    @property
    def accepting(self) -> bool:
        return self.masks.accepting

    @property
    def terminated(self) -> bool:
        return self.masks.terminated

    @property
    def settled(self) -> int:
        return self._accepted

    def fill(self, row: MaskRow) -> None:
        self.masks.fill(row)

    def accept(self, ids: Sequence[int]) -> bool:
        if not self.masks.accept(ids):
            return False
        self._accepted += len(ids)
        return True

    def retreat(self) -> int:
        return 0

    def rollback(self, n: int) -> None:
        assert n <= self._accepted
        self.masks.rollback(n)
        self._accepted -= n

    def forced(self) -> list[int]:
        return self.masks.forced()

    def clone(self) -> GuardedMatcher:
        return GuardedMatcher(self.masks.clone(), self._accepted)


def fill_batch(matchers: Sequence[GuardedMatcher | None], mask: MaskBatch) -> dict[int, GrammarError]:
    """Write row i of ``mask`` (int32 [B, ceil(V / 32)], C-contiguous) for every matcher i; None allows everything.

    Runs on threads and without the GIL where the mask engine can. Returns the rows that failed with their errors:
    fail those requests, the other rows are right.
    """
    native: list[tuple[int, LLGuidanceMatcher]] = []
    failed: dict[int, GrammarError] = {}
    for i, matcher in enumerate(matchers):
        if matcher is None:
            mask[i].fill(np.int32(-1))
        elif isinstance(matcher.masks, LLGuidanceMatcher):
            native.append((i, matcher.masks))
        else:
            try:
                matcher.fill(mask[i])
            except GrammarError as error:
                failed[i] = error
    return failed | fill_rows(native, mask)
