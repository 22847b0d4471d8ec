"""In Triton's interpreter every test of this folder runs with checked addresses and poisoned memory."""

from __future__ import annotations

import pytest
from checked_memory import INTERPRETED, guard, poison


@pytest.fixture(autouse=True)
def _nothing_outside_and_nothing_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        guard(monkeypatch)
        poison(monkeypatch)
