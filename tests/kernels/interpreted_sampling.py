"""The sampling kernels in Triton's interpreter against their plain twin. Run by test_triton.py."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from checked_memory import INTERPRETED, guard, poison
from torch import Tensor

from sglite.kernels import sampling, triton_sampling
from sglite.kernels.sampling import NOT_FINITE, NOTHING_ALLOWED, OK, Chosen, Edits, SampleRows

assert INTERPRETED, "needs TRITON_INTERPRET=1"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # lanes that are thrown away compute inf - inf

CANDIDATES = 16
"""A small sort keeps the interpreter quick, and sends rows through every path."""


@pytest.fixture(autouse=True)
def _no_access_outside_and_nothing_depends_on_what_was_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    guard(monkeypatch)
    poison(monkeypatch)


@dataclass(frozen=True)
class Case:
    """``step``: logits are multiples of it, so that many are equal. ``padding``: columns of garbage behind each row."""

    rows: int
    vocabulary: int
    filtered: bool = True
    masked: bool = False
    edited: bool = False
    scale: float = 3.0
    step: float = 0.0
    padding: int = 0
    first: int = 0
    """Where in the mixture of parameters the rows begin."""

    def logits(self) -> Tensor:
        wide = torch.randn(self.rows, self.vocabulary + self.padding, generator=random(1)) * self.scale
        if self.step:
            wide = (wide / self.step).round() * self.step
        wide[:, self.vocabulary :] = math.nan
        return wide[:, : self.vocabulary]

    def parameters(self) -> SampleRows:
        """Greedy and warm rows; with ``filtered`` every mixture of the filters."""
        n, limit = self.rows, self.vocabulary
        free = SampleRows(
            torch.randint(-(2**62), 2**62, (n,), generator=random(2)),
            self.some([0.0, 1.0, 0.7, 2.0]),
            self.some([limit], torch.int32),
            self.some([1.0]),
            self.some([0.0]),
        )
        if not self.filtered:
            return free
        top_k = self.some([limit, 5, limit, 3, 1, limit, 20, limit, 100], torch.int32).clamp(max=limit)
        top_p, min_p = self.some([1.0, 0.9, 0.5, 1.0, 0.95]), self.some([0, 0, 0.1, 0.05, 0, 0, 0.2])
        return replace(free, top_k=top_k, top_p=top_p, min_p=min_p)

    def some(self, values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
        """One for each row, again and again."""
        at = range(self.first, self.first + self.rows)
        return torch.tensor([values[i % len(values)] for i in at], dtype=dtype)

    def mask(self) -> Tensor | None:
        """Random words, with the bits behind the vocabulary set."""
        if not self.masked:
            return None
        words = torch.randint(-(2**31), 2**31, (self.rows, -(-self.vocabulary // 32)), generator=random(3))
        if self.vocabulary % 32:
            words[:, -1] |= -1 << (self.vocabulary % 32)
        words[0] = 1 << 7 if self.vocabulary > 7 else 1
        return words.to(torch.int32)

    def edits(self) -> Edits | None:
        if not self.edited:
            return None
        few = min(5, self.vocabulary - 1)
        tokens = torch.cat([torch.randperm(self.vocabulary, generator=random(9 + i))[:few] for i in range(self.rows)])
        rows = torch.arange(self.rows).repeat_interleave(few)
        factor, shift = torch.rand(len(rows), generator=random(4)) + 0.8, torch.randn(len(rows), generator=random(5))
        shift[:: few + 1] = -math.inf
        return Edits(torch.stack([rows, tokens]).to(torch.int32), torch.stack([factor, shift]))


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


CASES = {
    "one row": Case(1, 70),
    "no filters": Case(4, 70, filtered=False),
    "no filters, all else": Case(4, 1500, filtered=False, masked=True, edited=True),
    "two tokens": Case(9, 2, masked=True),
    "a word and one": Case(5, 33, masked=True, edited=True, padding=3),
    "several splits": Case(2, 2101, masked=True, edited=True, padding=7, first=5),
    "flat": Case(4, 2100, scale=0.1, first=6),
    "peaked": Case(9, 1100, scale=20.0),
    "ties": Case(5, 1100, step=2.0, edited=True, first=4),
    "all equal": Case(4, 300, step=1000.0, first=1),
    "two blocks of a split": Case(2, 2049, masked=True),
}


def both(case: Case, *, logprobs: bool = True) -> tuple[Chosen, Chosen]:
    rows, mask, edits = case.parameters(), case.mask(), case.edits()
    plain = sampling.choose(case.logits(), rows, mask, edits, filtered=case.filtered, logprobs=logprobs)
    fast = triton_sampling.choose(
        case.logits(), rows, mask, edits, filtered=case.filtered, logprobs=logprobs, candidates=CANDIDATES
    )
    return plain, fast


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_same_answer_as_in_plain_torch(case: Case) -> None:
    plain, fast = both(case)
    assert fast.token.tolist() == plain.token.tolist()
    assert fast.status.tolist() == plain.status.tolist()
    torch.testing.assert_close(fast.logprob, plain.logprob, rtol=1e-5, atol=1e-5)


def test_logprobs_that_nobody_asked_for_are_zero() -> None:
    _, fast = both(Case(3, 70), logprobs=False)
    assert fast.logprob.tolist() == [0.0] * 3


def test_the_number_of_candidates_changes_nothing() -> None:
    case = Case(3, 300, masked=True, scale=1.0)
    answers = [
        triton_sampling.choose(case.logits(), case.parameters(), case.mask(), None, candidates=n).token.tolist()
        for n in (8, 32)
    ]
    assert answers[0] == answers[1]


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    case = Case(4, 600, masked=True)
    rows, mask, logits = case.parameters(), case.mask(), case.logits()
    assert mask is not None

    def drawn(order: list[int]) -> list[int]:
        part = SampleRows(
            rows.key[order], rows.temperature[order], rows.top_k[order], rows.top_p[order], rows.min_p[order]
        )
        return triton_sampling.choose(logits[order], part, mask[order], None, candidates=CANDIDATES).token.tolist()

    together = drawn([0, 1, 2, 3])
    assert drawn([3, 2, 1, 0]) == together[::-1]
    assert [drawn([i])[0] for i in range(4)] == together


def test_bad_rows_are_told_apart_and_the_others_are_served() -> None:
    case = Case(5, 1100, filtered=True)
    logits, mask = case.logits(), torch.full((5, -(-1100 // 32)), -1, dtype=torch.int32)
    expected = sampling.choose(logits.clone(), case.parameters(), mask, None)
    logits[0, 1099] = math.nan
    logits[1] = -math.inf
    mask[2] = 0
    logits[3, 5] = math.inf
    fast = triton_sampling.choose(logits, case.parameters(), mask, None, candidates=CANDIDATES)
    assert fast.status.tolist() == [NOT_FINITE, NOTHING_ALLOWED, NOTHING_ALLOWED, NOTHING_ALLOWED, OK]
    assert fast.token.tolist() == [0, 0, 0, 0, int(expected.token[4])]


def test_nan_that_the_mask_forbids_is_nobodys() -> None:
    case = Case(2, 64, filtered=False)
    logits, mask = case.logits(), torch.full((2, 2), -1, dtype=torch.int32)
    logits[:, 40] = math.nan
    mask[:, 1] &= ~(1 << 8)
    fast = triton_sampling.choose(logits, case.parameters(), mask, None, filtered=False)
    assert fast.status.tolist() == [OK, OK] and 40 not in fast.token.tolist()
