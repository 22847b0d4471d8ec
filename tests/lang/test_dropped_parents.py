"""A state that nobody holds any more still matters to the branches that were forked from it."""

from __future__ import annotations

import gc

import sglite as sgl
from sglite.testing import MockBackend


def test_branches_outlive_the_states_they_were_forked_from() -> None:
    """As in a tree of which only the leaves are kept, while the inner nodes are still being generated."""

    @sgl.function
    def grow(s: sgl.ProgramState) -> list[str]:
        states = [s]
        for depth in range(3):
            states = [branch for state in states for branch in state.fork(2)]
            for state in states:
                state += f" {depth}:" + sgl.gen(f"word{depth}")
            gc.collect()
        return [leaf.text() for leaf in states]

    backend = MockBackend("x", latency=0.01)
    texts = grow.run(backend=backend).ret_value
    assert texts == [" 0:x 1:x 2:x"] * 8
    assert not backend.aborted


def test_a_leaf_that_is_dropped_is_aborted() -> None:
    @sgl.function
    def drop(s: sgl.ProgramState) -> None:
        (only,) = s.fork(1)
        only += "a" + sgl.gen("word")
        del only
        gc.collect()
        s += "b" + sgl.gen("end")
        s["end"]

    backend = MockBackend("x", latency=0.05)
    drop.run(backend=backend)
    assert sum(text.endswith("a") for text in backend.prompts) == len(backend.aborted)
