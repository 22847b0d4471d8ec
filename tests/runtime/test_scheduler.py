"""The scheduler through its own seam, with an engine whose cells would show every aliased or stale page."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
from fake_engine import FakeEngine, answer, sequence

from sglite.errors import CapacityError, ConfigError, OverloadedError
from sglite.protocol import ProgramInfo
from sglite.runtime.plan import Plan
from sglite.runtime.policy import PATIENCE, POLICIES
from sglite.runtime.sequence import Sequence, Status


def positions(plan: Plan) -> dict[int, tuple[int, int]]:
    return {row.slot: (row.start, row.stop) for row in plan.rows}


# -------------------------------------------------------------------------------------------------------- single steps


def test_a_sequence_is_computed_then_decoded_token_by_token():
    engine = FakeEngine()
    mine = engine.submit([1, 2, 3], 3)
    plans = engine.run()
    assert [positions(plan) for plan in plans] == [{0: (0, 3)}, {0: (3, 4)}, {0: (4, 5)}]
    assert mine.tokens == answer(mine.namespace, [1, 2, 3], 3)
    assert mine.status is Status.FINISHED
    assert engine.step().rows == ()


def test_pages_are_sent_once_and_as_they_are_needed():
    engine = FakeEngine(page_size=4)
    engine.submit([1] * 7, 3)
    rows = [plan.rows[0] for plan in engine.run()]
    assert [(len(row.new_pages), row.reset) for row in rows] == [(2, True), (0, False), (1, False)]


def test_long_prompts_are_chunked_and_decodes_always_go():
    engine = FakeEngine(pages=100, max_step_tokens=8)
    engine.submit([1, 2, 3], 30)
    engine.step()
    engine.submit([4] * 50, 2)
    plans = [engine.step() for _ in range(8)]
    assert all((0, 1) in {(row.slot, len(row.ids)) for row in plan.rows} for plan in plans)
    assert [plan.tokens for plan in plans] == [8] * 7 + [2]


def test_only_the_chunk_that_reaches_the_end_has_logits():
    engine = FakeEngine(max_step_tokens=4)
    engine.submit([1] * 10, 1)
    assert [plan.rows[0].logits for plan in engine.run()] == [0, 0, 1]


@pytest.mark.parametrize("chunk", [3, 8, 100])
def test_scored_positions_are_given_once_and_never_cached(chunk: int):
    engine = FakeEngine(max_step_tokens=chunk)
    prompt = [1, 2, 3, 4] * 5
    engine.submit(prompt, 1)
    engine.run()
    mine = engine.submit(prompt, 0, score_from=9)
    engine.run()
    assert engine.logits[mine] == list(range(9, 20))
    assert mine.cached == 8


def test_a_retraction_does_not_score_again():
    engine = FakeEngine(pages=10, page_size=1, max_step_tokens=2)
    older = engine.submit([1, 2], 8)
    engine.step()
    younger = engine.submit([3] * 6, 0, score_from=1)
    engine.run()
    assert younger.retractions > 0
    assert engine.logits[younger] == list(range(1, 6))
    assert older.retractions == 0


# ------------------------------------------------------------------------------------------------------------ reuse


def test_the_next_turn_hits_everything_the_last_one_computed():
    engine = FakeEngine(page_size=4)
    first = engine.submit([1, 2, 3], 6)
    engine.run()
    second = engine.submit([*first.tokens, 4, 4], 1)
    engine.run()
    assert second.cached == 8
    assert engine.scheduler.stats.hit_tokens == 8


def test_the_last_position_is_always_computed():
    engine = FakeEngine(page_size=4)
    engine.submit([1] * 8, 1)
    engine.run()
    again = engine.submit([1] * 8, 1)
    engine.run()
    assert again.cached == 4


def test_siblings_hit_the_pages_of_a_parent_that_still_runs():
    engine = FakeEngine(page_size=4)
    engine.submit([1] * 11, 20)
    engine.step()
    children = [engine.submit([1] * 11, 4) for _ in range(3)]
    engine.step()
    assert [child.cached for child in children] == [8, 8, 8]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [2048, 100])
def test_of_many_with_one_new_prefix_one_computes_it(page_size: int, chunk: int):
    engine = FakeEngine(pages=4096 // page_size, page_size=page_size, max_step_tokens=chunk)
    prefix = [random.Random(0).randrange(5) for _ in range(1024)]
    for i in range(32):
        engine.submit([*prefix, *[i % 5] * 3, i], 1)
    engine.run()
    stats = engine.scheduler.stats
    assert stats.held >= 31
    assert stats.computed_tokens <= 1024 + 32 * (4 + page_size)


def test_held_sequences_go_on_when_their_leader_ends_early():
    engine = FakeEngine(max_step_tokens=4)
    leader = engine.submit([1] * 40, 1)
    engine.step()
    others = [engine.submit([1] * 40, 1) for _ in range(3)]
    engine.step()
    assert engine.scheduler.waiting == 3
    engine.scheduler.release(others[0])
    assert engine.scheduler.waiting == 2
    engine.scheduler.release(leader)
    engine.run()
    assert [one.output_length for one in others] == [0, 1, 1]


def test_namespaces_never_share():
    engine = FakeEngine()
    engine.submit([1] * 20, 1, namespace="")
    engine.run()
    other = engine.submit([1] * 20, 1, namespace="x")
    engine.run()
    assert other.cached == 0


def test_a_flush_leaves_the_running_alone():
    engine = FakeEngine()
    mine = engine.submit([1] * 20, 8)
    engine.step()
    engine.scheduler.flush()
    engine.scheduler.check()
    engine.run()
    assert mine.tokens == answer(mine.namespace, [1] * 20, 8)
    assert engine.book.available == engine.book.total


# ------------------------------------------------------------------------------------------------ coming and going


def test_a_full_queue_refuses_and_says_so():
    engine = FakeEngine(max_queue=2)
    engine.scheduler.submit(sequence([1]), sequence([2]))
    with pytest.raises(OverloadedError, match="max_queue=2"):
        engine.scheduler.submit(sequence([3]))
    assert engine.scheduler.waiting == 2


def test_a_group_is_queued_whole_or_not_at_all():
    engine = FakeEngine(max_queue=3)
    engine.scheduler.submit(sequence([1]))
    with pytest.raises(OverloadedError):
        engine.scheduler.submit(*[sequence([1]) for _ in range(3)])
    assert engine.scheduler.waiting == 1
    with pytest.raises(CapacityError) as caught:
        engine.scheduler.submit(*[sequence([1]) for _ in range(4)])
    assert (engine.scheduler.waiting, caught.value.param) == (1, "n")


@pytest.mark.parametrize(("length", "new", "param"), [(41, 1, "prompt"), (30, 11, "max_new_tokens")])
def test_what_can_never_fit_is_refused_at_the_door(length: int, new: int, param: str):
    engine = FakeEngine(pages=10, page_size=4)
    with pytest.raises(CapacityError) as caught:
        engine.submit([1] * length, new)
    assert caught.value.param == param
    engine.submit([1] * 30, 10)
    engine.run()


def test_an_unknown_policy_lists_the_known():
    with pytest.raises(ConfigError, match="unknown policy 'best'; known are fcfs, longest-prefix"):
        FakeEngine(policy="best")


@pytest.mark.parametrize("when", ["waiting", "planned", "running"])
def test_release_works_at_every_status(when: str):
    engine = FakeEngine()
    mine = engine.submit([1] * 10, 8)
    if when == "planned":
        plan = engine.scheduler.plan()
        engine.scheduler.release(mine)
        assert engine.scheduler.sequence(plan.rows[0].slot) is None
        engine.scheduler.commit(plan)
    elif when == "running":
        engine.step()
    engine.scheduler.release(mine)
    engine.scheduler.release(mine)
    engine.scheduler.check()
    assert engine.scheduler.idle
    assert engine.cache.stats.evictable == (2 if when == "running" else 0)


def test_a_failed_step_ends_its_sequences_and_nothing_else():
    engine = FakeEngine(max_step_tokens=8)
    engine.submit([1] * 20, 2)
    engine.submit([2] * 8, 2)
    plan = engine.scheduler.plan()
    failed = engine.scheduler.fail()
    engine.scheduler.check()
    assert len(failed) == len(plan.rows) == 1
    assert engine.scheduler.fail() == []
    engine.run()
    assert [one.output_length for one in engine.finished] == [2]


def test_taken_back_tokens_are_computed_again():
    engine = FakeEngine(page_size=4)
    mine = engine.submit([1] * 8, 12)
    for _ in range(6):
        engine.step()
    whole = list(mine.tokens)
    del mine.tokens[-4:]
    engine.scheduler.rewind(mine)
    assert mine.remaining == 1
    engine.step()
    assert mine.tokens == whole[:-3]
    del mine.tokens[8:]
    engine.scheduler.rewind(mine)  # the prompt's last page is in the tree: back to the queue
    assert mine.status is Status.WAITING
    engine.scheduler.check()
    engine.run()
    assert mine.tokens == answer(mine.namespace, [1] * 8, 12)


def test_tokens_taken_back_just_before_the_end_are_not_kept():
    engine = FakeEngine(page_size=4)
    mine = engine.submit([1] * 8, 12)
    for _ in range(10):
        engine.step()
    del mine.tokens[10:]
    engine.scheduler.release(mine)
    engine.scheduler.check()
    assert engine.cache.probe(mine.namespace, [*mine.tokens, 0, 0]) == 8


# --------------------------------------------------------------------------------------------------- order and fairness


def started(engine: FakeEngine, sequences: list[Sequence]) -> list[int]:
    """Indices in the order of their first row."""
    order: list[int] = []
    while not engine.scheduler.idle:
        plan = engine.scheduler.plan()
        running = [engine.scheduler.sequence(row.slot) for row in plan.rows]
        order += [i for i, one in enumerate(sequences) if one in running and i not in order]
        engine.forward(plan)
        engine.scheduler.commit(plan)
        engine.sample(plan)
    return order


def test_fcfs_is_the_order_of_arrival_within_a_priority():
    engine = FakeEngine(max_running=1, policy="fcfs")
    sequences = [engine.submit([i], 2, priority=p) for i, p in enumerate([0, 0, 5, 0, 5])]
    assert started(engine, sequences) == [2, 4, 0, 1, 3]


def test_longest_prefix_goes_first():
    engine = FakeEngine(max_running=1, policy="longest-prefix")
    engine.submit([1] * 40, 1)
    engine.run()
    lengths = [0, 8, 4, 32]
    sequences = [engine.submit([*[1] * n, *[2] * (40 - n)], 1) for n in lengths]
    assert started(engine, sequences) == [3, 1, 2, 0]


def test_a_cold_request_starts_within_the_bound_under_hot_arrivals():
    engine = FakeEngine(max_running=2, policy="longest-prefix", pages=400)
    engine.submit([1] * 40, 1)
    engine.run()
    before = [engine.submit([1] * 40, 2) for _ in range(10)]
    cold = engine.submit([2] * 40, 2)
    admissions = engine.scheduler.stats.admissions
    while cold.status is Status.WAITING:
        while engine.scheduler.waiting < 12:
            engine.submit([1] * 40, 2)
        engine.step()
    assert PATIENCE < engine.scheduler.stats.admissions - admissions <= PATIENCE + len(before) + 4


def test_the_first_in_line_is_never_retracted_and_everyone_ends():
    engine = FakeEngine(pages=10, page_size=1, max_step_tokens=4)
    sequences = [engine.submit([i], 9) for i in range(4)]
    engine.run(most=200)
    assert sequences[0].retractions == 0
    assert sum(one.retractions for one in sequences) > 0
    assert all(one.tokens == answer(one.namespace, [i], 9) for i, one in enumerate(sequences))


def test_the_reserve_learns_from_outputs():
    engine = FakeEngine(pages=100, page_size=1, cached=False)
    for _ in range(3):
        for i in range(20):
            engine.submit([i % 5], 30)
        engine.run()
        engine.scheduler.check()
    first = engine.scheduler.stats.retractions
    for i in range(20):
        engine.submit([i % 5], 30)
    engine.run()
    assert engine.scheduler.stats.retractions - first <= 2


# -------------------------------------------------------------------------------------------------- random lives


class Life:
    """Random arrivals, aborts, rewinds and failures; every invariant after every step."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pick = self.random.choice
        self.engine = FakeEngine(
            pages=pick([30, 60, 200]),
            page_size=pick([1, 1, 4, 16]),
            cached=pick([True, True, True, False]),
            tails=pick([True, True, False]),
            policy=pick([*POLICIES, "program"]),
            max_running=pick([1, 4, 16]),
            max_step_tokens=pick([5, 16, 64, 512]),
        )
        self.pool = self.engine.book.total * self.engine.page_size
        self.live: list[Sequence] = []
        self.touched: set[Sequence] = set()

    def arrive(self) -> None:
        parents = [[], [1] * 20, [1] * 10 + [2] * 30, *(one.tokens for one in self.engine.finished[-3:])]
        prompt = [*self.random.choice(parents), *[self.random.randrange(2)] * self.random.randrange(1, 20)]
        prompt = prompt[-(self.pool - 1) :]
        new = self.random.randrange(min(40, self.pool - len(prompt)) + 1)
        score_from = self.random.choice([None, None, self.random.randrange(len(prompt))])
        self.live.append(
            self.engine.submit(
                prompt,
                new,
                namespace=self.random.choice(["", "x"]),
                priority=self.random.choice([0, 0, 0, 1]),
                score_from=score_from,
                program=self.program(),
            )
        )

    def program(self) -> ProgramInfo | None:
        names = [None, *"abcdefgh"]
        name, branch, last = self.random.choice(names), self.random.choice("xy"), self.random.random() < 0.2
        return ProgramInfo(name, branch, last) if name else None

    def step(self) -> None:
        if self.random.random() < 0.3 and self.engine.scheduler.waiting < 20:
            self.arrive()
        self.maybe(0.02, self.abort)
        self.maybe(0.02, self.pin)
        plan = self.engine.scheduler.plan()
        self.engine.scheduler.check()
        if plan.rows:
            self.engine.forward(plan)
            self.maybe(0.05, self.abort)
            self.engine.scheduler.check()
            if self.random.random() < 0.01:
                self.touched.update(self.engine.scheduler.fail())
            else:
                self.engine.scheduler.commit(plan)
                self.engine.scheduler.check()
                self.engine.sample(plan)
            self.maybe(0.05, self.take_back)
        else:
            assert self.engine.scheduler.idle
        self.engine.scheduler.check()

    def maybe(self, chance: float, action: object) -> None:
        if self.random.random() < chance:
            action()  # type: ignore[operator]

    def abort(self) -> None:
        if self.live:
            one = self.live.pop(self.random.randrange(len(self.live)))
            self.touched.add(one)
            self.engine.scheduler.release(one, keep=self.random.random() < 0.8)

    def pin(self) -> None:
        if self.engine.finished:
            one = self.random.choice(self.engine.finished)
            with suppress(CapacityError):
                self.engine.scheduler.pin(one.namespace, one.tokens, self.random.randrange(100))

    def take_back(self) -> None:
        running = [one for one in self.engine.scheduler.running if one.output_length and one.remaining == 1]
        if running:
            one = self.random.choice(running)
            n = self.random.randrange(1, one.output_length + 1)
            del one.tokens[-n:]
            self.touched.add(one)
            self.engine.scheduler.rewind(one)

    def drain(self) -> None:
        self.engine.run(most=5_000)
        self.engine.scheduler.check()
        self.engine.scheduler.flush()
        assert self.engine.book.available == self.engine.book.total


@pytest.mark.parametrize("seed", range(40))
def test_random_lives_keep_every_invariant(seed: int):
    life = Life(seed)
    for _ in range(250):
        life.step()
    life.drain()
    for one in life.engine.finished:
        prompt, n = one.tokens[: one.prompt_length], one.output_length
        assert one.tokens == answer(one.namespace, prompt, n)
        if one not in life.touched and one.score_from is not None:
            assert life.engine.logits[one] == list(range(one.score_from, max(one.prompt_length, len(one.tokens) - 1)))


def total_computed(seed: int, cached: bool) -> int:
    life = Life(seed)
    engine = FakeEngine(pages=400, page_size=4, cached=cached, max_step_tokens=64)
    life.engine, life.pool = engine, 1600
    for _ in range(120):
        if life.random.random() < 0.3:
            life.arrive()
        engine.step()
    engine.run()
    return engine.scheduler.stats.computed_tokens


@pytest.mark.parametrize("seed", range(5))
def test_the_cache_only_ever_saves_work(seed: int):
    assert total_computed(seed, cached=True) < total_computed(seed, cached=False)


def test_the_same_calls_give_the_same_plans():
    def plans() -> list[Plan]:
        life = Life(7)
        made: list[Plan] = []
        for _ in range(100):
            if life.random.random() < 0.5:
                life.arrive()
            made.append(life.engine.step())
        return made

    assert plans() == plans()
