"""Row 38: random lives of the scheduler against plain dictionaries. The long form is ``make soak``."""

from __future__ import annotations

import pytest
from fuzz import spread
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from world import World

STEPS = 100_000


class Lives(RuleBasedStateMachine):
    """Hypothesis decides what happens; a failure shrinks to the shortest story that shows it."""

    @initialize(random=st.randoms(use_true_random=False))
    def begin(self, random) -> None:
        self.world = World(random.randrange)

    @rule(count=st.integers(1, 4))
    def submit(self, count: int) -> None:
        for _ in range(count):
            self.world.submit()

    @rule(count=st.integers(1, 15))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    @rule()
    def abort(self) -> None:
        self.world.abort()

    @rule()
    def flush(self) -> None:
        self.world.flush()

    @rule()
    def end_program(self) -> None:
        self.world.end_program()

    @rule()
    def kill(self) -> None:
        self.world.kill()

    @invariant()
    def pages_are_accounted_for(self) -> None:
        if hasattr(self, "world"):
            self.world.engine.scheduler.check()
            self.world.reference.check(self.world.engine)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


Lives.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLives = Lives.TestCase


@pytest.mark.timeout(300)
def test_a_hundred_thousand_steps() -> None:
    """A quarter of a minute on two cores; after two minutes it gives up."""
    total, _ = spread(STEPS, minutes=2.0, first_seed=0, jobs=2)
    assert total["finished"] > 1_000 and total["aborted"] > 1_000 and total["kills"] > 5
    assert total["steps"] >= STEPS
