"""The matcher the engine holds: a mask engine's matcher, guarded by what a mask cannot express."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from sglite.errors import GrammarError
from sglite.protocol import Constraint
from sglite.runtime.grammar.base import MaskBackend, MaskBatch, MaskGrammar, MaskMatcher, MaskRow
from sglite.runtime.grammar.budget import Budget, Exits
from sglite.runtime.grammar.endings import Endings
from sglite.runtime.grammar.judge import check_text
from sglite.runtime.grammar.llguidance_backend import LLGuidanceMatcher, allow, fill_rows, forbid
from sglite.runtime.grammar.schema import SchemaPlan, plan_schema
from sglite.runtime.grammar.search import PATIENCE, Ahead, Search
from sglite.runtime.grammar.sizes import Sizes
from sglite.runtime.grammar.stream import Violation
from sglite.runtime.grammar.tags import lowered_tags
from sglite.runtime.grammar.way_out import Leads

MAX_RETREATS = 200
"""Rollbacks of one answer; after that it is a typed error."""
HURRY = 3
"""After so many returns for want of budget the way out is followed to its end, not for a step."""


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
        if constraint.kind == "structural_tag":
            constraint = Constraint(constraint.kind, lowered_tags(constraint.source))
        if constraint.kind != "json_schema":
            return GuardedGrammar(self.masks, self.masks.compile(constraint), constraint.kind, None)
        plan = plan_schema(constraint.source, lambda mask: self.masks.compile(replace(constraint, source=mask)))
        return GuardedGrammar(self.masks, plan.masks, constraint.kind, plan)


COMPLETE = frozenset({"json_schema", "json_object", "choices"})
"""The kinds whose answers are complete whatever the budget is."""


class GuardedGrammar:
    """``plan`` is there for JSON schemas."""

    def __init__(self, backend: MaskBackend, masks: MaskGrammar, kind: str, plan: SchemaPlan | None) -> None:
        self.backend = backend
        self.masks = masks
        self.kind = kind
        self.plan = plan
        self.nbytes = masks.nbytes
        self._known: list[int] | None = None
        """A complete answer: one that was short enough for a budget, or the shortest that was found."""
        self._searched = False
        """There is none shorter, as far as the search goes."""

    @property
    def min_tokens(self) -> int | None:
        answer = self._answer(0)
        return len(answer) if answer is not None else None

    def is_ready(self, budget: int | None) -> bool:
        return (
            budget is None
            or self.kind not in COMPLETE
            or self._exits.sizes.whole < budget
            or self._searched
            or self._knows(budget)
        )

    def matcher(self, budget: int | None = None) -> GuardedMatcher:
        judge = self.plan.judge if self.plan is not None else None
        search = Search(judge, self.backend.tokens) if judge is not None else None
        limit = self._budget(budget) if budget is not None and self.kind in COMPLETE else None
        return GuardedMatcher(self, self.masks.matcher(), search, limit)

    def _budget(self, tokens: int) -> Budget:
        if self._exits.sizes.whole < tokens:
            return Budget(self._exits, tokens, None)
        answer = self._answer(tokens)
        if answer is not None and tokens < len(answer):
            raise GrammarError(
                f"{tokens} new tokens are too few for this {self.kind}: its shortest answer has {len(answer)}",
                kind="limit",
                param="max_tokens",
            )
        return Budget(self._exits, tokens, answer)

    def _knows(self, tokens: int) -> bool:
        return self._known is not None and len(self._known) <= tokens

    def _answer(self, enough: int) -> list[int] | None:
        """An answer of no more than ``enough`` tokens, or else the shortest that is known."""
        if not self._searched and not self._knows(enough):
            self._known = self._exits.shortest(self._ahead, enough) or self._known
            self._searched = not self._knows(enough)
        return self._known

    def wrong(self, text: bytes) -> str | None:
        """What is wrong with a finished text that the mask accepts."""
        return check_text(self.plan.validation, text) if self.plan is not None else None

    @cached_property
    def _exits(self) -> Exits:
        if self.plan is None:
            return Exits(self.masks, self.backend.tokens, self.kind != "choices", Sizes(None), Leads(Endings(()).of))
        leads = Leads(Endings(self.plan.patterns).of, self.plan.hints)
        return Exits(self.masks, self.backend.tokens, True, Sizes(self.plan.mask_schema), leads)

    @property
    def _ahead(self) -> Ahead | None:
        judge = self.plan.judge if self.plan is not None else None
        return Search(judge, self.backend.tokens).ahead(b"", self.wrong) if judge is not None else None


class GuardedMatcher:
    """See base.Matcher. ``retreats`` counts how often it took tokens back."""

    def __init__(
        self, grammar: GuardedGrammar, masks: MaskMatcher, search: Search | None, budget: Budget | None
    ) -> None:
        self.masks = masks
        self.shortened = False
        self.retreats = 0
        self.settled = 0
        self._grammar = grammar
        self._search = search
        self._budget = budget
        self._leave = False
        """The last token went too far: take the way out for one step."""
        self._returns = 0
        """How often it went back for want of budget."""
        self._violation: Violation | None = None
        self._text = bytearray()
        self._ends = [0]
        """Length of the text before the first token and after each."""

    @property
    def accepting(self) -> bool:
        return self.masks.accepting and self._wrong_if_ended() is None

    @property
    def terminated(self) -> bool:
        return self.masks.terminated

    def fill(self, row: MaskRow) -> None:
        self.masks.fill(row)
        self.restrict(row)

    def restrict(self, row: MaskRow) -> None:
        """Take out of the mask engine's row what must not follow here."""
        if self._budget is not None and self._budget.way and (self._leave or self._budget.is_tight):
            self.shortened = True
            row.fill(0)
            allow(row, self._budget.way[:1])
        if self._search is not None:
            self._restrict(row)
            if not row.any():
                raise self._dead_end("nothing is left to try")

    def _restrict(self, row: MaskRow) -> None:
        if self._search is not None:
            self._search.restrict(row, self._text)
            if self.masks.accepting and not self.accepting:
                forbid(row, self._grammar.backend.vocabulary.eos_ids)

    def accept(self, ids: Sequence[int]) -> bool:
        if not self.masks.accept(ids):
            return False
        for id in ids:
            self._text += self._grammar.backend.tokens.bytes_of[id]
            self._ends.append(len(self._text))
            if self._search is not None:
                self._violation = self._search.advance(self._text) or self._violation
        if self._budget is not None:
            self._budget.spend(ids)
        self._leave = self._returns > HURRY
        return True

    def retreat(self) -> int:
        violation = self.fault()
        if violation is not None:
            return self._go_back(violation)
        if not self.masks.terminated and not self._fits():
            length = len(self._text)
            if self._search is not None and self._budget is not None and self._budget.hopeless:
                return self._go_back(Violation(length, (length, length), "nothing right can follow"))
            return self._stay_within_budget()
        self.settled = self._settled_now()
        return 0

    def _fits(self) -> bool:
        return self._budget is None or self._budget.fits(self.masks, self._text, self._ahead())

    def _ahead(self) -> Ahead | None:
        return self._search.ahead(self._text, self._grammar.wrong) if self._search is not None else None

    def _stay_within_budget(self) -> int:
        """Take the last tokens back, more and more of them, to a place that has a way out, and leave by it for one
        step."""
        before, step = len(self._ends), 1
        self._returns += 1
        while len(self._ends) - 1 > self.settled and self._returns <= MAX_RETREATS:
            self.rollback(min(step, len(self._ends) - 1 - self.settled))
            step *= 2
            if self._budget is not None and self._budget.leads_out(self.masks, self._text, self._ahead()):
                self._leave = True
                return before - len(self._ends)
        raise self._dead_end("the budget is too small for what was begun", "limit")

    def fault(self) -> Violation | None:
        """What is wrong with the text so far, whatever follows it."""
        return self._violation or self._stuck() or self._invalid()

    def wrong_if_ended(self) -> str | None:
        """What is wrong with the text as a whole answer."""
        return self._grammar.wrong(bytes(self._text)) if self.masks.accepting else "the text is not complete"

    def rollback(self, n: int) -> None:
        assert n < len(self._ends)
        if not n:
            return
        self.masks.rollback(n)
        del self._ends[-n:]
        del self._text[self._ends[-1] :]
        self._violation = None
        self.settled = min(self.settled, len(self._ends) - 1)
        if self._search is not None:
            self._search.rollback(n, len(self._text))
        if self._budget is not None:
            self._budget.give_back(n, len(self._text))
            if self._is_refused(self._budget.way):
                self._budget.forget()

    def _is_refused(self, way: list[int] | None) -> bool:
        if not way or self._search is None:
            return False
        return self._search.forbids(self._text, self._grammar.backend.tokens.text(way))

    def forced(self) -> list[int]:
        forced = self.masks.forced()
        if self._leave or (self._budget is not None and not self._budget.allows(forced)):
            return []
        if forced and self._search is not None:
            more = self._grammar.backend.tokens.text(forced)
            return [] if self._search.forbids(self._text, more) else forced
        return forced

    def clone(self) -> GuardedMatcher:
        search = self._search.clone() if self._search is not None else None
        budget = self._budget.clone() if self._budget is not None else None
        twin = GuardedMatcher(self._grammar, self.masks.clone(), search, budget)
        twin.shortened, twin.retreats, twin.settled = self.shortened, self.retreats, self.settled
        twin._leave, twin._returns = self._leave, self._returns
        twin._violation, twin._text, twin._ends = self._violation, bytearray(self._text), list(self._ends)
        return twin

    # ------------------------------------------------------------------------------------------------ what is wrong

    def _wrong_if_ended(self) -> Violation | None:
        return self._search.at_end(self._text, len(self._ends) - 1) if self._search is not None else None

    def _stuck(self) -> Violation | None:
        """Nothing can follow: what would was refused before, or the text may end here, must, and should not."""
        if self._search is None or self.masks.terminated:
            return None
        may_not_end = self.masks.accepting and not self.accepting
        if not (may_not_end or self._search.remembers(self._text)) or self._can_go_on(self.masks, len(self._ends) - 1):
            return None
        length = len(self._text)
        wrong = self._wrong_if_ended() if may_not_end else None
        return wrong or Violation(length, (length, length), "nothing is left to try")

    def _invalid(self) -> Violation | None:
        """Every finished answer is validated as a whole before it counts as finished."""
        if not self.masks.terminated or self.settled == len(self._ends) - 1:
            return None
        wrong = self._grammar.wrong(bytes(self._text))
        return None if wrong is None else Violation(0, (len(self._text),), wrong)

    def _settled_now(self) -> int:
        tokens = len(self._ends) - 1
        if self._search is None or self.masks.terminated:
            return tokens
        offset = self._search.settled_before()
        return max(self.settled, min(tokens, bisect_left(self._ends, offset + 1) - 1))

    # -------------------------------------------------------------------------------------------------- going back

    def _go_back(self, violation: Violation) -> int:
        self.retreats += 1
        if self.retreats > MAX_RETREATS:
            raise self._dead_end(f"gave up after {MAX_RETREATS} rollbacks, the last for {violation.message}", "limit")
        for _ in range(len(violation.ends) + PATIENCE if self._search is not None else 0):
            keep = self._place_to_resume(self._search.give_up(violation, self._text)) if self._search else None
            if keep is not None:
                taken_back = len(self._ends) - 1 - keep
                self.rollback(taken_back)
                return taken_back
            if self._search is not None:
                self._search.forgive()
        raise self._dead_end(violation.message)

    def _place_to_resume(self, length: int) -> int | None:
        """How many tokens to keep: the last token boundary before ``length`` from where something else can follow;
        None where that lies before what is settled. A boundary from where nothing can is refused, too."""
        masks, at = self.masks.clone(), len(self._ends) - 1
        while (keep := bisect_left(self._ends, length) - 1) >= self.settled:
            masks.rollback(at - keep)
            at, length = keep, self._ends[keep]
            if self._can_go_on(masks, keep):
                return keep
            assert self._search is not None
            self._search.refuse(bytes(self._text[:length]))
        return None

    def _can_go_on(self, masks: MaskMatcher, tokens: int) -> bool:
        """Whether anything may follow the first ``tokens`` tokens, where ``masks`` is."""
        row = np.zeros(self._grammar.backend.vocabulary.words, np.int32)
        try:
            masks.fill(row)
        except GrammarError as error:
            if error.kind != "unsatisfiable":
                raise
            return False
        if self._search is not None:
            text = self._text[: self._ends[tokens]]
            self._search.restrict(row, text)
            if masks.accepting and self._search.at_end(text, tokens) is not None:
                forbid(row, self._grammar.backend.vocabulary.eos_ids)
        return bool(row.any())

    def _dead_end(self, why: str, kind: str = "unsatisfiable") -> GrammarError:
        return GrammarError(f"no valid answer was found: {why}", kind=kind, param="json_schema")


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
            _try(failed, i, matcher.masks.fill, mask[i])
    failed |= fill_rows(native, mask)
    for i, matcher in enumerate(matchers):
        if matcher is not None and i not in failed:
            _try(failed, i, matcher.restrict, mask[i])
    return failed


def _try(failed: dict[int, GrammarError], i: int, fill: Callable[[MaskRow], None], row: MaskRow) -> None:
    try:
        fill(row)
    except GrammarError as error:
        failed[i] = error
