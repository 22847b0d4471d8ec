"""Pages that are not full: whoever goes on from where another ended, within a page too, finds every token."""

from __future__ import annotations

import pytest

from sglite.protocol import ProgramInfo
from sglite.runtime.ledger import PagesError
from sglite.runtime.pages import PageBook
from sglite.runtime.radix import PrefixCache
from tests.runtime.fake_engine import FakeEngine

SPACE = ("", "")


def engine(**options: object) -> FakeEngine:
    return FakeEngine(page_size=16, pages=64, tails=True, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [3, 15, 16, 17, 37])
@pytest.mark.parametrize("new", [1, 9, 40])
def test_the_next_turn_computes_only_what_is_new(length: int, new: int) -> None:
    """The last sampled token was never computed; it is the first to be."""
    here = engine()
    first = here.submit([1] * length, new)
    here.run()
    second = here.submit([*first.tokens, 2, 3], 1)
    here.run()
    assert second.cached == len(first.tokens) - 1


def test_branches_go_on_from_one_tail_and_leave_their_own() -> None:
    here = engine()
    parent = here.submit([1] * 20, 7)
    here.run()
    branches = [here.submit([*parent.tokens, branch, 5], 4) for branch in (2, 3, 4)]
    here.run()
    assert [branch.cached for branch in branches] == [26] * 3
    leaves = [here.submit([*branch.tokens, 9], 1) for branch in branches]
    here.run()
    assert [leaf.cached for leaf in leaves] == [len(branch.tokens) - 1 for branch in branches]


def test_a_page_that_begins_alike_is_copied_as_far_as_it_does() -> None:
    here = engine()
    here.submit([1] * 16 + [2] * 10 + [3] * 6, 1)
    here.run()
    other = here.submit([1] * 16 + [2] * 10 + [4] * 20, 1)
    here.run()
    assert other.cached == 26


def test_a_prompt_asked_again_computes_one_position() -> None:
    here = engine()
    for _ in range(2):
        again = here.submit([1] * 40, 0)
        here.run()
    assert again.cached == 39


def test_logits_that_are_wanted_are_computed() -> None:
    here = engine()
    here.submit([1] * 40, 0)
    here.run()
    scored = here.submit([1] * 40, 0, score_from=36)
    here.run()
    assert scored.cached == 36
    assert here.logits[scored] == [36, 37, 38, 39]


def test_a_tail_takes_the_place_of_its_beginning() -> None:
    here = engine()
    tokens = [1] * 4
    for _ in range(5):
        one = here.submit(tokens, 2)
        here.run()
        tokens = one.tokens
    here.scheduler.check()
    assert here.scheduler.stats.pages_cached == 1


def test_tails_are_evicted_before_what_they_hang_on() -> None:
    book = PageBook(4)
    cache = PrefixCache(book, 4, tails=True)
    lease = cache.match(SPACE, [1] * 8)
    cache.insert(lease, [1] * 8, book.allocate(2))
    for n in (2, 3):
        assert cache.add_tail(lease, [n] * n, book.allocate(1)[0])
    cache.release(lease)
    for left in (3, 2, 1, 0):
        assert cache.evict(1) == 1
        assert len(cache.check()) == left
    assert cache.stats.namespaces == 0


def test_what_a_fork_added_is_gone_when_it_ends_and_a_program_may_be_asked_again() -> None:
    here = engine()
    root = here.submit([1] * 20, 4, program=ProgramInfo("p"))
    here.run()
    before = here.scheduler.stats.pages_cached
    here.submit([*root.tokens, *[2] * 40], 4, program=ProgramInfo("p", "0", last=True))
    here.run()
    here.scheduler.check()
    assert here.scheduler.stats.pages_cached == before
    here.scheduler.end_program("", "p")
    again = here.submit([*root.tokens, 7], 1)
    here.run()
    assert again.cached == len(root.tokens) - 1


def test_a_copy_is_forgotten_where_the_plan_that_wanted_it_fails() -> None:
    """The second admission finds no pages; before the first one runs, its source goes to somebody else."""
    here = engine()
    parent = here.submit([1] * 20, 4)
    here.run()
    first = here.submit([*parent.tokens, 2], 2)
    second = here.submit([3] * 40, 2)
    allocate = here.book.allocate

    def scarce(n: int) -> list[int]:
        assert n < 3, "no more than two pages at once"
        return allocate(n)

    here.book.allocate = scarce  # type: ignore[method-assign]
    with pytest.raises(PagesError) as caught:
        here.scheduler.plan()
    assert caught.value.sequence is second
    here.scheduler.release(second)
    here.book.allocate = allocate  # type: ignore[method-assign]
    assert (first.copied, first.computed) == (-1, 16)
    here.run()
    assert first in here.finished
    here.scheduler.check()
