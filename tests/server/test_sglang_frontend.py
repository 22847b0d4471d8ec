"""The published sglang package's frontend against our server.

It is looked for in this environment and in the one whose interpreter ``SGLITE_SGLANG_PYTHON`` names; benchmarks/peers
says how to install it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.runner import running
from sglite.runtime.testing import scripted_engine

PROGRAMS = Path(__file__).with_name("sglang_programs.py")
PEER = Path(__file__).parents[2] / "benchmarks/peers/installed/sglang/bin/python"


def interpreter() -> str | None:
    given = os.environ.get("SGLITE_SGLANG_PYTHON")
    if given or find_spec("sglang"):
        return given or sys.executable
    return str(PEER) if PEER.exists() else None


def ada(history: list[int]) -> int:
    """The same text after every line's end and every colon."""
    text = "Ada Lovelace. And more"
    start = max((i for i, token in enumerate(history) if token in (10, 58)), default=-1)
    return ord(text[(len(history) - 1 - start) % len(text)])


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    python = interpreter()
    if python is None:
        pytest.skip("the sglang package is not installed: name an interpreter that has it in SGLITE_SGLANG_PYTHON")
    with scripted_engine(ada, context_length=2048) as engine, running(engine, ServerConfig(port=0)) as url:
        done = subprocess.run([python, str(PROGRAMS), url], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    value: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return value


def test_the_server_is_known(found: dict[str, Any]) -> None:
    assert (found["model"], found["info"], found["flush"]) == ("scripted", True, True)


def test_gen_with_logprobs(found: dict[str, Any]) -> None:
    text, finish, count = found["chat"]
    assert (text, finish, count) == ("Ada Lovelace. An", "length", 16)


@pytest.mark.parametrize(
    "method", ["token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"]
)
def test_select(found: dict[str, Any], method: str) -> None:
    chosen, meta = found["select"][method]
    assert chosen in (" Paris", " Rome in Italy")
    assert "input_token_logprobs" in meta


def test_constraints(found: dict[str, Any]) -> None:
    gens = found["gens"]
    assert set(json.loads(gens["json"])) >= {"city"}
    assert len(gens["regex"]) == 3 and set(gens["regex"]) <= set("abc")
    assert gens["int"].strip().lstrip("+-").isdecimal()
    assert gens["choice"] in ("x", "yes")


def test_stops(found: dict[str, Any]) -> None:
    assert found["gens"]["pattern"] == "Ada Lovelace"
    assert found["gens"]["stops"] == "Ada Lovelace"


def test_fork_and_join(found: dict[str, Any]) -> None:
    assert found["forks"][0] == "Lov"
    assert found["forks"][1].startswith("List:end:Ada Lov")


def test_streams(found: dict[str, Any]) -> None:
    assert found["stream"] == found["async stream"] == "Ada Lovelace. An"


def test_run_batch(found: dict[str, Any]) -> None:
    assert found["batch"] == ["Ada Lovelace. An"] * 4
