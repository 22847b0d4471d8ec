"""benchmarks/gpu_check.py without a GPU: its sections in Triton's interpreter, and what it does when one breaks."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from argparse import Namespace
from contextlib import suppress
from importlib import util
from importlib.metadata import PackageNotFoundError, distribution, metadata
from pathlib import Path
from types import ModuleType
from venv import EnvBuilder

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SCRIPT = BENCHMARKS / "gpu_check.py"

NEEDED = "torch", "triton", "transformers"


def distributions() -> set[str]:
    """What whoever installs NEEDED has: these and what they require, by normalised name."""
    found: set[str] = set()
    asked = list(NEEDED)
    while asked:
        name = canonicalize_name(asked.pop())
        with suppress(PackageNotFoundError):
            if name not in found:
                required = [Requirement(line) for line in metadata(name).get_all("Requires-Dist") or []]
                asked += [r.name for r in required if r.marker is None or r.marker.evaluate({"extra": ""})]
                found.add(name)
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with NEEDED and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    EnvBuilder(symlinks=True).create(folder)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for name in distributions():
        for file in distribution(name).files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (packages / top).exists():
                (packages / top).symlink_to(Path(str(distribution(name).locate_file(top))))
    return folder / "bin/python"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_environment_of_the_check_is_a_bare_one(bare: Path) -> None:
    ask = "import importlib.util as u; print([n for n in ('torch', 'llguidance', 'fastapi', 'gguf') if u.find_spec(n)])"
    run = subprocess.run([bare, "-c", ask], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "['torch']"


def test_all_sections_can_be_imported_with_little_more_than_torch_triton_and_transformers(bare: Path) -> None:
    program = (
        "from importlib import import_module\n"
        "from gpu_check import SECTIONS\n"
        "for module, _ in SECTIONS.values(): import_module(module)\n"
        "import sglite.runtime.engine, sglite.runtime.gpu.building\n"
    )
    paths = os.pathsep.join(map(str, (BENCHMARKS, BENCHMARKS.parent)))
    environment = {**os.environ, "PYTHONPATH": paths}
    run = subprocess.run([bare, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr


REST = "elementwise", "attention", "linear", "sampling", "speed", "qwen3-0.6b"
"""The other model's section is the same in the interpreter."""


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "sections",
    [
        pytest.param(
            REST,
            marks=pytest.mark.skipif(os.environ.get("SGLITE_KERNELS") != "all", reason="part of make kernels"),
            id="rest",
        ),
        pytest.param(("engine",), id="engine"),
    ],
)
def test_the_sections_run_in_the_interpreter(bare: Path, sections: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    command = [str(bare), str(SCRIPT), "--device", "cpu", "--seed", "1", "--only", ",".join(sections)]
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
