"""benchmarks/gpu_check.py without a GPU: its sections in Triton's interpreter, and what it does when one breaks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SCRIPT = BENCHMARKS / "gpu_check.py"

OPTIONAL = (
    "fastapi gguf httpx idna interegular jinja2 jsonschema llguidance outlines_core prometheus_client pydantic ray "
    "rich starlette uvicorn"
)

WITHOUT_THEM = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL.split()!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
sys.path.insert(0, {str(BENCHMARKS)!r})
from gpu_check import SECTIONS
from importlib import import_module
for module, _ in SECTIONS.values():
    import_module(module)
import sglite.runtime.engine, sglite.runtime.gpu.building
from sglite.runtime.testing import scripted_engine
with scripted_engine() as engine:
    print(engine.config.grammar)
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_needs_little_more_than_torch_triton_and_transformers() -> None:
    run = subprocess.run([sys.executable, "-c", WITHOUT_THEM], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "llguidance"


KERNELS = "elementwise", "attention", "linear", "sampling", "speed"
MODELS = "engine", "qwen3-0.6b"
"""The other model's section is the same in the interpreter."""


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "sections",
    [
        pytest.param(
            KERNELS,
            marks=pytest.mark.skipif(os.environ.get("SGLITE_KERNELS") != "all", reason="part of make kernels"),
            id="kernels",
        ),
        pytest.param(MODELS, id="models"),
    ],
)
def test_the_sections_run_in_the_interpreter(sections: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--seed", "1", "--only", ",".join(sections)]
    command += ["--out", str(out)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    log = out.with_suffix(".log").read_text() if out.with_suffix(".log").exists() else ""
    assert run.returncode == 0, run.stdout + log
    report = json.loads(out.read_text())
    assert report["complete"] and report["wrong"] == []
    assert list(report["sections"]) == ["card", *sections]
    for section, records in report["sections"].items():
        for record in records:
            assert record.get("ok", True), (section, record)
            assert "us" in record or "ok" in record, (section, record)
    if "engine" in sections:
        greedy = report["sections"]["engine"][0]
        assert greedy["tokens"] > 0 and greedy["best_of_reference"] > 0.9


# ---------------------------------------------------------------------------------------------------- what breaks alone


def settings(tmp_path: Path) -> Namespace:
    return Namespace(device="cpu", quick=True, seed=None, log=tmp_path / "log")


def test_a_process_that_dies_loses_one_line(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a", "b", "c", "d"]
    asked: list[int] = []

    def run(
        section: str, arguments: Namespace, report: object, skip: int, deadline: float
    ) -> tuple[int, list[str], str]:
        asked.append(skip)
        done = {0: ["a"], 2: ["c", "d"]}[skip]  # "b" takes the first process with it
        for name in done:
            report.add(section, {"name": name, "ok": True})  # type: ignore[attr-defined]
        return len(done), names, "status -11"

    monkeypatch.setattr(script, "_run_child", run)
    report = script.Report(tmp_path / "r.json", {})
    script.run_section("speed", settings(tmp_path), report, 10)
    found = json.loads((tmp_path / "r.json").read_text())["sections"]["speed"]
    assert asked == [0, 2]
    assert [(r["name"], r["ok"]) for r in found] == [("a", True), ("b", False), ("c", True), ("d", True)]
    assert report.wrong == ["speed / b"]


def test_a_section_that_does_not_start_says_so_once(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "_run_child", lambda *rest: (0, [], "status 1"))
    report = script.Report(tmp_path / "r.json", {})
    script.run_section("linear", settings(tmp_path), report, 10)
    (record,) = report.data["sections"]["linear"]
    assert record["ok"] is False and "did not start" in record["error"]


def test_a_section_out_of_time_is_not_called_wrong(script: ModuleType, tmp_path: Path) -> None:
    report = script.Report(tmp_path / "r.json", {})
    script.run_section("card", settings(tmp_path), report, 0.05)
    (record,) = report.data["sections"]["card"]
    assert record["ok"] is not True and report.roof == {}


def test_only_takes_names_and_brings_the_card(script: ModuleType) -> None:
    assert script.chosen("speed,attention") == ["card", "attention", "speed"]
    assert script.chosen(None) == list(script.SECTIONS)
    with pytest.raises(SystemExit, match="unknown section nothing"):
        script.chosen("nothing")


def test_the_limits_leave_the_whole_under_eight_minutes(script: ModuleType) -> None:
    assert script.TOTAL_SECONDS < 480 and all(limit <= 120 for _, limit in script.SECTIONS.values())


def test_wrong_numbers_are_named(script: ModuleType) -> None:
    import torch
    from gpu.common import compared, poisoned

    exact = torch.ones(4, 5, dtype=torch.float64)
    assert compared(exact.float(), exact, 1e-3)["ok"]
    found = exact.clone()
    found[2, 1] = torch.nan
    record = compared(found, exact, 1e-3)
    assert not record["ok"] and "1 of 20" in record["error"] and "index 11" in record["error"]
    assert not compared(exact[:2], exact, 1e-3)["ok"]
    with poisoned():
        assert bool(torch.empty(3).isnan().all()) and torch.empty(2, dtype=torch.int32).tolist() == [77, 77]
    assert torch.empty_like(exact).shape == exact.shape
