"""Programs instead of requests: their order, and the prefixes they come back to."""

from __future__ import annotations

import pytest
from fake_engine import FakeEngine, sequence

from sglite.errors import CapacityError
from sglite.protocol import ProgramInfo
from sglite.runtime.policy import PATIENCE, QUANTUM, Standing, least_attained
from sglite.runtime.scheduler import MEMORY
from sglite.runtime.sequence import Sequence, Status

SHORTEST = int(MEMORY)


def call(engine: FakeEngine, program: str, tokens: list[int], new: int = 2, *, branch: str = "", last: bool = False):
    return engine.submit(tokens, new, program=ProgramInfo(program, branch, last))


def order_of_start(engine: FakeEngine, *calls: Sequence) -> list[Sequence]:
    started: list[Sequence] = []
    while not engine.scheduler.idle:
        engine.step()
        started += [one for one in calls if one.computed and one not in started]
    return started


def flood(engine: FakeEngine, n: int = 10) -> None:
    """Requests of nobody's, each new, that fill the pool more than once."""
    for i in range(n):
        engine.submit([4, i, *[3] * (4 * engine.book.total // 2)], 1)
        engine.run()


# -------------------------------------------------------------------------------------------------------------- order


def test_rank_prefers_priority_then_residents_then_little_service_then_age():
    standings = [
        Standing(1, resident=False, arrival=9, attained=99 * QUANTUM),
        Standing(0, resident=True, arrival=7, attained=99 * QUANTUM),
        Standing(0, resident=False, arrival=8, attained=QUANTUM - 1),
        Standing(0, resident=False, arrival=1, attained=QUANTUM),
        Standing(0, resident=False, arrival=5, attained=QUANTUM),
    ]
    assert sorted(standings, key=least_attained) == standings


def test_a_programs_next_call_overtakes_later_programs():
    engine = FakeEngine(max_running=1, policy="program")
    call(engine, "first", [1] * 5)
    engine.run()
    blocker = call(engine, "other", [2] * 5, 4)
    engine.step()
    late = [call(engine, f"late{i}", [3, i]) for i in range(3)]
    back = call(engine, "first", [1] * 9)
    assert order_of_start(engine, blocker, *late, back) == [blocker, back, *late]


def test_siblings_start_one_after_the_other():
    engine = FakeEngine(max_running=1, policy="program")
    blocker = call(engine, "z", [2] * 5, 4)
    engine.step()
    calls = [call(engine, name, [ord(name), i], branch=str(i)) for i, name in enumerate("abcabc")]
    assert order_of_start(engine, blocker, *calls)[1:] == [calls[i] for i in (0, 3, 1, 4, 2, 5)]


def test_of_two_residents_the_one_with_fewer_calls_ahead_goes_first():
    engine = FakeEngine(max_running=1, policy="program")
    for name in "ab":
        call(engine, name, [ord(name)] * 5)
        engine.run()
    blocker = call(engine, "z", [2] * 5, 4)
    engine.step()
    ahead = {"a": 2, "b": 1}
    a, b = (engine.submit([ord(n)] * 9, 2, program=ProgramInfo(n, ahead=ahead[n])) for n in "ab")
    assert order_of_start(engine, blocker, a, b) == [blocker, b, a]


def test_without_the_policy_programs_are_just_requests():
    engine = FakeEngine(max_running=1, policy="fcfs")
    call(engine, "first", [1] * 5)
    engine.run()
    calls = [call(engine, "other", [2]), call(engine, "first", [1])]
    assert order_of_start(engine, *calls) == calls
    assert engine.cache.protected == 0


# ---------------------------------------------------------------------------------------------------------- retention


@pytest.mark.parametrize(("policy", "kept"), [("program", 20), ("fcfs", 0)])
def test_a_program_finds_its_prefix_after_a_flood(policy: str, kept: int):
    engine = FakeEngine(pages=20, policy=policy)
    first = call(engine, "mine", [1] * 20, 3)
    engine.run()
    flood(engine)
    again = call(engine, "mine", [*first.tokens, 2], 1)
    engine.run()
    assert again.cached == kept


def test_an_ended_branch_keeps_nothing_and_an_ended_program_is_forgotten():
    engine = FakeEngine(policy="program")
    call(engine, "mine", [1] * 20, branch="a")
    call(engine, "mine", [2] * 20, branch="b", last=True)
    engine.run()
    assert engine.cache.protected == 5
    call(engine, "mine", [1] * 20, branch="a", last=True)
    engine.run()
    assert engine.cache.protected == 0
    assert len(engine.scheduler.programs) == 0


def test_kept_prefixes_give_way_before_anyone_is_retracted():
    engine = FakeEngine(pages=20, policy="program")
    for name in "abc":
        call(engine, name, [ord(name)] * 20)
        engine.run()
    assert engine.cache.protected == 15
    whole = engine.submit([1] * 40, 40)
    engine.run()
    engine.scheduler.check()
    assert whole.retractions == 0 and whole.output_length == 40


def test_the_last_in_line_gives_way_first():
    engine = FakeEngine(pages=20, policy="program")
    for name in "abc":
        call(engine, name, [ord(name)] * 20)
        engine.run()
    engine.submit([1] * 40, 1)
    engine.run()
    assert [engine.cache.probe(("", ""), [ord(name)] * 20) for name in "abc"] == [20, 20, 0]


def test_a_newcomer_waits_while_older_programs_need_the_pool():
    engine = FakeEngine(pages=20, policy="program")
    call(engine, "a", [1] * 32)
    engine.run()
    running = call(engine, "b", [2] * 16, 12)
    engine.step()
    newcomer = call(engine, "c", [3] * 30)
    engine.step()
    assert engine.scheduler.waiting == 1
    engine.run()
    assert running.retractions == 0
    assert newcomer.output_length == 2  # alone, it could make them give way


def others(engine: FakeEngine, steps: int) -> None:
    for _ in range(steps):
        engine.submit([2], 0)
        engine.step()


def test_a_program_nobody_hears_of_is_forgotten():
    engine = FakeEngine(policy="program")
    call(engine, "mine", [1] * 20)
    engine.run()
    others(engine, SHORTEST)
    assert (engine.cache.protected, len(engine.scheduler.programs)) == (5, 1)
    others(engine, 2)
    assert (engine.cache.protected, len(engine.scheduler.programs)) == (0, 0)


def test_memory_grows_with_the_gaps_seen():
    engine = FakeEngine(policy="program")
    for _ in range(6):
        call(engine, "mine", [1] * 20)
        engine.run()
        others(engine, SHORTEST // 2)
    others(engine, SHORTEST // 2 + 2)
    assert len(engine.scheduler.programs) == 1


def test_calls_that_end_in_the_queue_are_not_counted():
    engine = FakeEngine(policy="program")
    mine = sequence([1] * 20, program=ProgramInfo("mine", last=True))
    engine.scheduler.submit(mine)
    engine.scheduler.release(mine)
    assert len(engine.scheduler.programs) == 0


def test_a_call_that_never_ran_leaves_the_kept_prefix():
    engine = FakeEngine(policy="program")
    call(engine, "mine", [1] * 20)
    engine.run()
    engine.scheduler.release(call(engine, "mine", [1] * 24))
    assert engine.cache.protected == 5
    engine.scheduler.release(call(engine, "mine", [1] * 24, last=True))
    assert engine.cache.protected == 0


def test_a_flush_takes_what_programs_keep():
    engine = FakeEngine(policy="program")
    call(engine, "mine", [1] * 20)
    engine.run()
    engine.scheduler.flush()
    assert engine.book.available == engine.book.total
    assert len(engine.scheduler.programs) == 1


# --------------------------------------------------------------------------------------------------------------- pins


def test_a_pin_outlives_a_flood_and_ends_with_its_last_step():
    engine = FakeEngine(pages=20)
    engine.submit([1] * 20, 1)
    engine.run()
    assert engine.scheduler.pin(("", ""), [1] * 30, ttl=50) == 20
    flood(engine, 20)
    assert engine.cache.probe(("", ""), [1] * 20) == 20
    others(engine, 50)
    flood(engine, 4)
    assert engine.cache.probe(("", ""), [1] * 20) == 0


def test_pins_are_bounded_and_what_is_not_cached_is_not_pinned():
    engine = FakeEngine(pages=20)
    assert engine.scheduler.pin(("", ""), [1] * 30, ttl=50) == 0
    engine.submit([1] * 60, 1)
    engine.run()
    with pytest.raises(CapacityError, match="half of the KV pool, 40 tokens") as caught:
        engine.scheduler.pin(("", ""), [1] * 60, ttl=50)
    assert caught.value.param == "pin"
    engine.scheduler.check()


def test_a_lone_sequence_breaks_pins_that_it_cannot_live_with():
    engine = FakeEngine(pages=20, max_step_tokens=16)
    for i in range(2):
        engine.submit([i] * 16, 1)
        engine.run()
        engine.scheduler.pin(("", ""), [i] * 16, ttl=500 + i)
    whole, other = engine.submit([3] * 50, 10), engine.submit([4] * 20, 2)
    engine.run()
    assert (whole.output_length, other.output_length) == (10, 2)
    assert [engine.cache.probe(("", ""), [i] * 16) for i in range(2)] == [0, 16]
    engine.submit([3] * 70, 10)
    engine.run()
    assert len(engine.scheduler.pins) == 0


def test_a_flush_takes_pins_too():
    engine = FakeEngine()
    engine.submit([1] * 20, 1)
    engine.run()
    engine.scheduler.pin(("", ""), [1] * 20, ttl=50)
    engine.scheduler.flush()
    assert engine.book.available == engine.book.total


def test_a_newcomer_starts_within_the_bound_under_residents_calls():
    engine = FakeEngine(pages=400, max_running=1, policy="program")
    call(engine, "resident", [1] * 20)
    engine.run()
    admissions, newcomer = engine.scheduler.stats.admissions, call(engine, "new", [2] * 20)
    while newcomer.status is Status.WAITING:
        while engine.scheduler.waiting < 3:
            call(engine, "resident", [1] * 20)
        engine.step()
    assert PATIENCE <= engine.scheduler.stats.admissions - admissions <= PATIENCE + 4
