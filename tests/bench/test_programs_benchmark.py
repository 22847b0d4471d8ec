"""The benchmark of programs without a model: its workloads run, its inputs are fair, its arithmetic is right."""

from __future__ import annotations

import asyncio
import importlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from rich.console import Console

from sglite.chat import CHATML
from sglite.protocol import Text
from sglite.testing import MockBackend

FOLDER = Path(__file__).parents[2] / "benchmarks"
ONE_CALL = ["mmlu", "hellaswag", "dspy-rag", "json", "shared-prefix"]
NAMES = [*ONE_CALL, "react", "agents", "tot", "sot", "judge", "chat-short", "chat-long"]


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """The benchmark's modules, importable only here."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    names = (
        "workloads",
        "workloads.base",
        "lib.hits",
        "lib.standings",
        "lib.works",
        "lib.tries",
        "lib.sides",
        "programs",
    )
    yield SimpleNamespace(**{name.rpartition(".")[2]: importlib.import_module(name) for name in names})
    sys.path.remove(str(FOLDER))
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("workloads", "lib", "programs"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def prose(bench: SimpleNamespace) -> Any:
    return bench.base.Prose(lambda text: len(text) // 5 + 1)


def test_the_workloads_are_those_of_the_paper(bench: SimpleNamespace) -> None:
    assert sorted(bench.workloads.WORKLOADS) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_workload_runs(name: str, bench: SimpleNamespace, prose: Any) -> None:
    work = bench.workloads.WORKLOADS[name]
    backend = MockBackend(None, chat_template=CHATML)
    states = work.program.run_batch(work.inputs(bench.base.Writer(prose, "a key"), 3), backend=backend)
    assert [state.error() for state in states] == [None] * 3
    for state in states:
        valid, checked = work.valid(state)
        assert valid == checked == len(work.schemas or {})
    free = [request for request in backend.requests if request.constraint is None and request.sampling.max_new_tokens]
    assert all(request.sampling.ignore_eos and request.sampling.temperature == 0 for request in free)


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_a_function_of_their_key(name: str, bench: SimpleNamespace, prose: Any) -> None:
    work, writer = bench.workloads.WORKLOADS[name], bench.base.Writer
    first = work.inputs(writer(prose, "a"), 2)
    assert first == work.inputs(writer(prose, "a"), 2)
    assert first != work.inputs(writer(prose, "b"), 2)
    assert len(first) == 2


def test_texts_have_the_length_that_was_asked_for(bench: SimpleNamespace, prose: Any) -> None:
    writer = bench.base.Writer(prose, "lengths")
    for tokens in (4, 64, 512):
        words = writer.text(tokens).split()
        size = sum(prose.count(" " + word) for word in words)
        assert tokens <= size < tokens + max(prose.count(" " + word) for word in words)


def test_a_broken_answer_is_not_valid(bench: SimpleNamespace) -> None:
    work = bench.workloads.WORKLOADS["json"]
    assert work.valid({"character": '{"name": "x"}'}) == (0, 1)
    assert work.valid({"character": "{"}) == (0, 1)


# ---------------------------------------------------------------------------------------------------- the arithmetic


def test_the_best_cache_finds_every_position_but_the_last(bench: SimpleNamespace) -> None:
    seen = [
        bench.hits.Seen((1, 2, 3, 4), (5, 6), 0),  # the key of 6 is never computed
        bench.hits.Seen((1, 2, 3, 4, 5, 6, 7), (8,), 4),  # found: 1 to 5
        bench.hits.Seen((1, 2, 9), (), 1),  # found: 1 and 2
        bench.hits.Seen((1, 2, 9), (), 2),  # all is there, but its last position has to be computed
    ]
    assert bench.hits.hits(seen, lambda prompt: prompt) == bench.hits.Hits(17, 7, best=0 + 5 + 2 + 2)


def test_the_recorder_changes_nothing_and_notes_everything(bench: SimpleNamespace, prose: Any) -> None:
    work = bench.workloads.WORKLOADS["react"]
    inputs = work.inputs(bench.base.Writer(prose, "x"), 1)
    plain, inner = (MockBackend("so it goes", chat_template=CHATML) for _ in range(2))
    recorder = bench.hits.Recorder(inner)
    (expected,) = work.program.run_batch(inputs, backend=plain)
    (state,) = work.program.run_batch(inputs, backend=recorder)
    assert state.text() == expected.text()
    assert len(recorder.seen) == len(inner.requests)
    assert all(isinstance(segment, Text) or segment.ids for one in recorder.seen for segment in one.prompt)


def test_standings_compare_with_the_best_peer(bench: SimpleNamespace) -> None:
    standings = bench.standings.Standings(["ours", "slow", "fast"], ["ours"], {})
    for name, rate, alone in (("ours", 6.0, 1.0), ("slow", 1.0, 8.0), ("fast", 2.0, 4.0)):
        cell = standings.cell("tot", name)
        for factor in (1.0, 1.5, 0.5):  # medians count
            hits = bench.hits.Hits(100, 45, 50)
            cell.take(bench.standings.Taken(1.0, 4, rate * factor, alone * factor, 0.0, hits, 1, 1, 10), 0, 0.1)
    assert standings.speedup("tot") == 3.0
    assert standings.speedup("tot", "slow") == 6.0
    assert standings.slowdown("tot") == 0.25
    assert standings.cell("tot", "ours").of_best == 0.9
    value = standings.value()
    assert value["speedup"] == {"tot": 3.0, "geometric mean": pytest.approx(3.0)}
    assert value["workloads"]["tot"]["ours"]["valid"] == 3


def test_a_side_without_a_figure_is_not_compared(bench: SimpleNamespace) -> None:
    standings = bench.standings.Standings(["ours", "peer"], ["ours"], {})
    standings.cell("tot", "peer").failure = "no"
    assert standings.speedup("tot") is None
    assert standings.value()["speedup"]["geometric mean"] is None


def test_who_is_best_is_said_of_every_row(bench: SimpleNamespace, tmp_path: Path) -> None:
    standings = bench.standings.Standings(["ours", "busy", "brisk"], ["ours"], {"repeats": 3})
    for name, rate, alone in (("ours", 6.0, 1.0), ("busy", 3.0, 8.0), ("brisk", 2.0, 4.0)):
        cell = standings.cell("tot", name)
        cell.all = 8
        cell.take(bench.standings.Taken(1.0, 4, rate, alone, 0.0, bench.hits.Hits(0, 0, 0), 0, 0, 1), 0, 0.1)
    assert (standings.fastest("tot"), standings.quickest("tot")) == ("busy", "brisk")
    assert standings.behind("tot", "brisk") == 1.5
    shown = Console(record=True, width=120, file=io.StringIO())
    standings.show(shown)
    assert "3.00 (4 of 8)†" in (text := shown.export_text())
    assert "2.00x" in text and "busy" in text
    standings.write(tmp_path / "x.json")
    value = json.loads((tmp_path / "x.json").read_text())
    assert value["best_peer"] == {"tot": "busy"} and value["workloads"]["tot"]["busy"]["programs"] == [4]
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


# -------------------------------------------------------------------------------------------------------- its time


@pytest.fixture
def terms(bench: SimpleNamespace, prose: Any) -> Any:
    return bench.tries.Terms(
        prose, lambda prompt: (), quick=False, scale=1.0, seed=0, retries=0, budget=40.0, limit=0.3
    )


def test_who_is_slow_gets_fewer_programs(bench: SimpleNamespace, terms: Any) -> None:
    mmlu, tot = bench.workloads.WORKLOADS["mmlu"], bench.workloads.WORKLOADS["tot"]
    assert terms.share(mmlu, None) == terms.share(mmlu, 0.5) == mmlu.count.full == 64
    assert terms.share(mmlu, 1.25) == 32
    assert terms.share(mmlu, 100.0) == 16
    assert terms.share(tot, 20.0) == 2
    assert terms.share(tot, 100.0) == 1
    assert terms.share(tot, 10.0) == tot.count.full == 4


class Silent(MockBackend):
    """Never answers, and forgets nothing."""

    async def generate(self, request: Any) -> Any:
        await asyncio.Event().wait()
        yield

    async def flush_cache(self) -> None:
        return


def side_of(bench: SimpleNamespace, backend: MockBackend, flush: Any = lambda: None, *, peer: bool = True) -> Any:
    return bench.sides.Side("x", not peer, backend, flush, lambda: None, peer=peer)


def test_what_does_not_end_is_cut_off_and_named(bench: SimpleNamespace, terms: Any) -> None:
    cell, work = bench.standings.Cell(), bench.workloads.WORKLOADS["tot"]
    bench.tries.measure(side_of(bench, Silent(None, chat_template=CHATML)), work, 2, 0, terms, cell)
    assert cell.failure == "cut off after 0.3 s, when 0 of 2 were done"
    assert cell.rate is None


def test_a_side_that_died_fails_its_rows_and_no_others(bench: SimpleNamespace, terms: Any) -> None:
    def flush() -> None:
        raise httpx.ConnectError("nobody is there")

    cell, work = bench.standings.Cell(), bench.workloads.WORKLOADS["mmlu"]
    bench.tries.measure(side_of(bench, MockBackend("x", chat_template=CHATML), flush), work, 2, 0, terms, cell)
    assert cell.failure == "ConnectError: nobody is there"


def test_what_can_change_nothing_is_not_asked_again(bench: SimpleNamespace) -> None:
    standings = bench.standings.Standings(["ours", "good", "bad"], ["ours"], {})
    mock = MockBackend("x")
    for name, rate in (("ours", 1.0), ("good", 3.0), ("bad", 1.0)):
        hits = bench.hits.Hits(0, 0, 0)
        standings.cell("tot", name).take(bench.standings.Taken(9.0, 4, rate, 1.0, 0.0, hits, 0, 0, 1), 0, 0.1)

    def wanted(name: str, *, peer: bool = True) -> bool:
        side = bench.sides.Side(name, not peer, mock, lambda: None, lambda: None, peer=peer)
        return bool(bench.programs.wanted(1, "tot", side, standings))

    assert wanted("good") and wanted("ours", peer=False) and not wanted("bad")
    standings.cell("tot", "good").seconds = 31.0
    assert not wanted("good")
