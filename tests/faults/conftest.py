"""The fault bench: a real server over the scripted engine, and what must be true after every case."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "runtime"))  # fake_engine

from bench import Bench  # noqa: E402


@pytest.fixture(scope="module")
def server() -> Iterator[Bench]:
    """One server for a file's cases: what one case leaves behind, the next ones notice."""
    with Bench.started() as bench:
        yield bench


@pytest.fixture
def bench(server: Bench) -> Iterator[Bench]:
    yield server
    server.check_after()
