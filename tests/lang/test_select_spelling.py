"""How many texts a select scores: both spellings of every choice, but behind a space only those that do not add one."""

from __future__ import annotations

import pytest

import sglite as sgl
from sglite.testing import MockBackend


@pytest.mark.parametrize(
    ("before", "choices", "scored"),
    [
        ("It is", ["yes", "no"], {"yes", "no", " yes", " no"}),
        ("It is ", ["yes", "no"], {"yes", "no"}),
        ("It is ", [" yes", " no"], {"yes", "no", " yes", " no"}),  # those that were written are told in the meta info
        ("It is ", ["no", " no"], {"no", " no"}),
        ("It is:\n", ["yes", "no"], {"yes", "no", " yes", " no"}),
    ],
)
def test_what_is_scored(before: str, choices: list[str], scored: set[str]) -> None:
    @sgl.function
    def program(s: sgl.ProgramState) -> None:
        s += before + sgl.select("x", choices)

    backend = MockBackend("no")
    state = program.run(backend=backend)
    assert set(backend.requests[0].candidates) == scored
    assert state["x"] in choices
    assert state["x"].strip() == "no"
    assert state.text() == before + state["x"]
    assert list(state.get_meta_info("x")["scores"]) == choices
