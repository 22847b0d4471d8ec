"""Ended programs and branches, gaps, preemption, the walk through prefixes, and KV from elsewhere."""

from __future__ import annotations

import math
import random

import pytest
from fake_engine import FakeEngine, answer, digests, sequence
from hypothesis import given
from hypothesis import strategies as st

from sglite.protocol import ProgramInfo
from sglite.runtime.gaps import REMEMBERED, Gaps
from sglite.runtime.policy import Candidate, dfs_weight, longest_prefix
from sglite.runtime.sequence import Sequence, Status
from sglite.runtime.waiting import WaitingQueue, shared_bytes

EVERYONE = ("", "")


def call(engine: FakeEngine, program: str, tokens: list[int], branch: str = "", *, last: bool = False) -> Sequence:
    one = engine.submit(tokens, 1, program=ProgramInfo(program, branch, last))
    engine.run()
    return one


def cached(engine: FakeEngine, tokens: list[int]) -> int:
    assert engine.cache is not None
    return engine.cache.probe(EVERYONE, tokens)


# ------------------------------------------------------------------------------------------------------------- the end


def test_a_branch_that_ends_gives_up_what_it_kept_and_those_below_it():
    engine = FakeEngine()
    for branch in ("", "0", "0.1", "01", "1"):
        call(engine, "mine", [ord(c) for c in "root" * 2 + branch * 4], branch)
    assert engine.cache is not None
    protected = engine.cache.protected
    engine.scheduler.end_program("", "mine", "0")
    assert engine.cache.protected < protected
    assert len(engine.scheduler.programs) == 1
    engine.scheduler.end_program("", "mine")
    assert engine.cache.protected == 0
    assert len(engine.scheduler.programs) == 0
    engine.scheduler.end_program("", "nobody")


def test_a_call_of_an_ended_branch_keeps_nothing_when_it_leaves():
    engine = FakeEngine()
    running = engine.submit([1] * 20, 4, program=ProgramInfo("mine", "0.1"))
    engine.step()
    engine.scheduler.end_program("", "mine", "0")
    engine.run()
    assert engine.cache is not None and running.output_length == 4
    assert (engine.cache.protected, len(engine.scheduler.programs)) == (0, 0)


def test_an_ended_programs_own_tail_goes_before_older_prefixes():
    engine = FakeEngine(pages=20)
    engine.submit([1] * 20, 1)
    engine.run()
    shared = [2] * 8
    call(engine, "first", [*shared, *[3] * 12])
    ended = call(engine, "second", [*shared, *[4] * 12], last=True)
    assert ended.cached == 8
    engine.submit([5] * 32, 1)
    engine.run()
    assert cached(engine, [1] * 20) == 20
    assert 8 <= cached(engine, [*shared, *[4] * 12]) < 20


def test_what_an_ended_program_added_to_a_whole_older_prefix_goes_first_to_the_page():
    engine = FakeEngine(pages=20)
    stem = [2] * 20
    engine.submit(stem, 1)
    engine.run()
    engine.submit([1] * 20, 1)
    engine.run()
    ended = call(engine, "mine", [*stem, *[4] * 20], last=True)
    assert ended.cached == 20 and engine.cache is not None
    engine.cache.evict(5)
    assert (cached(engine, [1] * 20), cached(engine, [*stem, *[4] * 20])) == (20, 20)
    engine.cache.evict(1)
    assert cached(engine, [1] * 20) + cached(engine, stem) < 40


@pytest.mark.parametrize("order", [("", "0", "0.1"), ("0.1", "", "0")])
def test_all_that_an_ended_program_and_its_branches_added_goes_before_older_prefixes(order: tuple[str, ...]):
    engine = FakeEngine(pages=40)
    engine.submit([1] * 20, 1)
    engine.run()
    prompts = {"": [2] * 20, "0": [*[2] * 20, *[3] * 12], "0.1": [*[2] * 20, *[3] * 12, *[4] * 12]}
    for branch in sorted(order):
        call(engine, "mine", prompts[branch], branch)
    for branch in order:  # the last calls of each, in any order
        call(engine, "mine", prompts[branch], branch)
    engine.scheduler.end_program("", "mine")
    assert engine.cache is not None
    assert cached(engine, prompts["0.1"]) <= 20, "what forks added is gone at once"
    engine.cache.evict(5)
    assert (cached(engine, prompts[""]), cached(engine, [1] * 20)) == (0, 20)


def test_what_an_ended_program_shares_stays_in_its_place():
    engine = FakeEngine(pages=20)
    shared = [2] * 8
    engine.submit([*shared, 9], 1)
    engine.run()
    call(engine, "mine", [*shared, *[4] * 12], last=True)
    assert engine.cache is not None
    engine.cache.evict(3)
    assert cached(engine, [*shared, *[4] * 12]) == 8


# ---------------------------------------------------------------------------------------------------------------- gaps


def test_nothing_known_is_soon_and_longer_than_ever_is_never():
    gaps = Gaps(5.0)
    assert (gaps.usual, gaps.remaining(3.0)) == (5.0, 0.0)
    gaps.observe(2.0)
    assert (gaps.usual, gaps.remaining(0.5), gaps.remaining(2.0)) == (2.0, 1.5, math.inf)


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=3 * REMEMBERED), st.floats(0, 1e6))
def test_what_remains_is_the_mean_over_those_that_stayed_as_long(observed: list[float], away: float):
    gaps = Gaps(1.0)
    for gap in observed:
        gaps.observe(gap)
    recent = observed[-REMEMBERED:]
    later = [gap - away for gap in recent if gap > away]
    assert math.isclose(gaps.usual, sum(recent) / len(recent), rel_tol=1e-9)
    assert math.isclose(
        gaps.remaining(away), sum(later) / len(later) if later else math.inf, rel_tol=1e-6, abs_tol=1e-3
    )


def test_who_is_expected_back_last_gives_way_first():
    now = [0.0]
    engine = FakeEngine(pages=20, clock=lambda: now[0], memory=100.0)
    for gap in (4.0, 6.0, 40.0):
        call(engine, "teacher", [9] * 4)
        now[0] += gap
    call(engine, "teacher", [9] * 4, last=True)
    call(engine, "old", [1] * 20)
    now[0] += 10.0  # of those that stay away for 10, the gap is 40
    call(engine, "new", [2] * 20)
    engine.submit([3] * 48, 1, program=ProgramInfo("resident"))
    engine.run()
    assert cached(engine, [2] * 20) == 20
    assert cached(engine, [1] * 20) < 20


# ---------------------------------------------------------------------------------------------------------- preemption


@pytest.mark.parametrize(("policy", "preempts"), [("program", True), ("priority", True), ("fcfs", False)])
def test_a_higher_priority_takes_the_last_ones_slot(policy: str, preempts: bool):
    engine = FakeEngine(max_running=2, policy=policy)
    low = [engine.submit([i] * 20, 8) for i in range(2)]
    for _ in range(3):
        engine.step()
    high = engine.submit([7] * 8, 4, priority=1)
    engine.step()
    assert (high.status is Status.RUNNING) == preempts
    assert [one.retractions for one in low] == [0, int(preempts)]
    engine.run()
    engine.scheduler.check()
    assert engine.scheduler.stats.preemptions == int(preempts)
    assert all(one.tokens == answer(one.namespace, [i] * 20, 8) for i, one in enumerate(low))
    recomputed = engine.scheduler.stats.computed_tokens - (2 * 27 + 11)
    assert recomputed < 8, "computed pages were kept"


def test_a_higher_priority_takes_the_last_ones_pages():
    engine = FakeEngine(pages=10, max_running=4)
    low = engine.submit([1] * 24, 8)
    engine.step()
    high = engine.submit([2] * 30, 2, priority=1)
    engine.run()
    assert low.retractions == 1 and high.retractions == 0
    assert (low.output_length, high.output_length) == (8, 2)


def test_whoever_waited_too_long_is_not_preempted():
    engine = FakeEngine(max_running=1, pages=400)
    low = engine.submit([1] * 8, 30)
    while low.status is Status.WAITING or low.remaining:
        while engine.scheduler.waiting < 4 and low.status is Status.WAITING:
            engine.submit([2] * 8, 1, priority=1)
        engine.step()
        if low.output_length == 30:
            break
    assert low.late and low.retractions == 0


# --------------------------------------------------------------------------------------------------- order of prefixes


def test_longest_prefix_and_heaviest_branch():
    front = [
        Candidate(0, (1, 2), 8),
        Candidate(0, (1, 3), 12),
        Candidate(0, (4,), 16),
        Candidate(0, (1, 3), 12),
        Candidate(0, (), 0),
        Candidate(1, (4,), 4),
    ]
    assert longest_prefix(front) == [5, 2, 1, 3, 0, 4]
    assert dfs_weight(front) == [5, 1, 3, 0, 2, 4]


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_shared_bytes(a: bytes, b: bytes):
    n = shared_bytes(a, b)
    assert a[:n] == b[:n] and (n == min(len(a), len(b)) or a[n] != b[n])


def test_a_burst_is_taken_in_one_walk_through_its_tree():
    rng = random.Random(5)
    engine = FakeEngine(pages=36, max_running=3, max_step_tokens=64)
    prompts = [[a] * 16 + [b] * 16 + [a + b, i] for a in range(6) for b in range(3) for i in range(4)]
    rng.shuffle(prompts)
    for i, prompt in enumerate(prompts):
        engine.submit(prompt, 1, program=ProgramInfo(str(i), last=True))
    engine.run()
    distinct = {tuple(prompt[:n]) for prompt in prompts for n in range(4, 33, 4)}
    best = sum(32 for _ in prompts) - 4 * len(distinct)
    assert engine.scheduler.stats.hit_tokens >= 0.95 * best


def test_the_queue_gives_out_everyone_nearest_first():
    queue = WaitingQueue()
    rng = random.Random(1)
    waiting = []
    for i in range(40):
        one = sequence([rng.randrange(3) for _ in range(4)])
        one.arrival, one.place = i, ((0,), one.prefix(), i)
        queue.add(one)
        waiting.append(one)
    queue.settle(9)
    queue.check()
    queue.admitted(waiting[7])
    order = list(queue.front())
    assert set(order) == set(waiting) - {waiting[7]}
    shared = [shared_bytes(one.place[1], waiting[7].place[1]) for one in order]
    assert shared == sorted(shared, reverse=True)
    assert queue.overdue(8) == [] and len(queue.overdue(9)) == 39


# ------------------------------------------------------------------------------------------------------ from elsewhere


def test_adopted_kv_is_an_ordinary_hit():
    engine = FakeEngine(pages=20)
    prompt = list(range(30))

    def write(start: int, pages: list[int]) -> None:
        for i, page in enumerate(pages):
            first = start + 4 * i
            engine.cells[page] = digests(EVERYONE, prompt)[first : first + 4]

    assert engine.scheduler.adopt(EVERYONE, prompt[:8], write) == 8
    assert engine.scheduler.adopt(EVERYONE, prompt, write) == 20
    one = engine.submit(prompt, 3)
    engine.run()
    assert one.cached == 28
    assert engine.scheduler.adopt(EVERYONE, [5] * 400, write) == 0, "there is no room for that"
    engine.scheduler.check()
    assert FakeEngine(cached=False).scheduler.adopt(EVERYONE, prompt, write) == 0
