"""Is sglite right and fast on this GPU? One command, at most eight minutes, nothing to download.

    python benchmarks/gpu_check.py                       # everything; writes gpu_check.json beside this file
    python benchmarks/gpu_check.py --quick               # fewer shapes, about two minutes
    python benchmarks/gpu_check.py --only attention,speed
    python benchmarks/gpu_check.py --device cpu          # the check's own logic in Triton's interpreter, tiny shapes

Needs torch, triton, transformers and this repository (``PYTHONPATH=.`` if it is not installed). Every section runs in
a process of its own with a limit on its time: a kernel that crashes takes only its own line along, and the section goes
on behind it. The JSON is rewritten after every line. The exit status is 1 where a result was wrong; a speed below its
goal is told and is no error.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue

ROOT = Path(__file__).resolve().parents[1]

SECTIONS = {
    "card": ("gpu.card", 25),
    "elementwise": ("gpu.check_elementwise", 40),
    "attention": ("gpu.check_attention", 90),
    "linear": ("gpu.check_linear", 50),
    "sampling": ("gpu.check_sampling", 35),
    "engine": ("gpu.check_engine", 50),
    "speed": ("gpu.speed", 90),
    "qwen3-0.6b": ("gpu.end_to_end_qwen", 40),
    "llama-3.1-8b": ("gpu.end_to_end_llama", 100),
}
"""Module, and seconds it may take: 520 in all, of which starts and compiling leave some unused."""
TOTAL_SECONDS = 470
RESTARTS = 3


# ----------------------------------------------------------------------------------------------------------- a section


def child(arguments) -> None:
    """Run one section's items, a JSON line for each on standard output."""
    import torch
    from gpu.common import Context

    tell = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print goes elsewhere
    device = torch.device("cpu" if arguments.device == "cpu" else "cuda:0")
    context = Context(device, arguments.device == "cpu", arguments.quick, _json(arguments.roof))
    torch.manual_seed(time.time_ns() % 2**31 if arguments.seed is None else arguments.seed)
    items = importlib.import_module(SECTIONS[arguments.section][0]).items(context)
    tell.write(json.dumps({"items": [name for name, _ in items], "seed": torch.initial_seed()}) + "\n")
    for name, work in items[arguments.skip :]:
        began = time.perf_counter()
        try:
            record, lost = work(), False
        except Exception as error:
            traceback.print_exc()
            record = {"ok": False, "error": f"{type(error).__name__}: {error}"[:600]}
            lost = _device_lost(torch, context)
        tell.write(json.dumps({"name": name, "seconds": round(time.perf_counter() - began, 3), **record}) + "\n")
        if lost:
            os._exit(3)  # the next process goes on behind this item


def _device_lost(torch, context) -> bool:
    if context.tiny:
        return False
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device=context.device).item()
        torch.cuda.empty_cache()
    except Exception:
        return True
    return False


def _json(text: str):
    return json.loads(text) if text else {}


# ---------------------------------------------------------------------------------------------------------- all of them


class Report:
    """Everything found so far; on disk after every line."""

    def __init__(self, path: Path, settings: dict) -> None:
        self._path = path
        self.data = {"settings": settings, "sections": {}, "complete": False}
        self.roof: dict[str, float] = {}

    def add(self, section: str, record: dict) -> None:
        self.roof |= record.get("roof", {})
        self.data["sections"].setdefault(section, []).append(record)
        self.save()

    def save(self) -> None:
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")
        part.replace(self._path)

    @property
    def wrong(self) -> list[str]:
        records = ((s, r) for s, found in self.data["sections"].items() for r in found)
        return [f"{section} / {record['name']}" for section, record in records if record.get("ok") is False]


def run_section(section: str, arguments, report: Report, limit: float) -> None:
    """Until every item is done, the time is up, or too many processes were lost."""
    deadline, done = time.monotonic() + limit, 0
    for _ in range(RESTARTS + 1):
        found, names, ended = _run_child(section, arguments, report, done, deadline)
        done += found
        if names and done >= len(names):
            return
        if ended == "time" or not names:
            name = names[done] if names else section
            ok, why = (None, f"not done in {limit:.0f} s, nor what follows") if ended == "time" else (False, ended)
            report.add(section, {"name": name, "ok": ok, "error": why if names else f"did not start: {why}"})
            show(report.data["sections"][section][-1])
            return
        if ended != "lost":  # it died without a word about this item
            report.add(section, {"name": names[done], "ok": False, "error": f"the process ended: {ended}"})
            show(report.data["sections"][section][-1])
            done += 1


def _run_child(section, arguments, report, skip, deadline) -> tuple[int, list[str], str]:
    """(items told of, names of all items, how it ended)"""
    command = [sys.executable, __file__, "--section", section, "--skip", str(skip), "--device", arguments.device]
    command += ["--roof", json.dumps(report.roof)] + ["--quick"] * arguments.quick
    command += [] if arguments.seed is None else ["--seed", str(arguments.seed)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])}
    if arguments.device == "cpu":
        environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    with (
        arguments.log.open("a", encoding="utf-8") as log,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        lines: Queue[str | None] = Queue()
        threading.Thread(target=_pump, args=(process.stdout, lines), daemon=True).start()
        found, names = 0, []
        while True:
            try:
                line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                process.kill()
                return found, names, "time"
            if line is None:
                break
            record = json.loads(line)
            if "items" in record:
                names = record["items"]
                continue
            found += 1
            report.add(section, record)
            show(record)
        code = process.wait()
    return found, names, "lost" if code == 3 else f"status {code}, see {arguments.log}"


def _pump(stream, lines) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def show(record: dict) -> None:
    mark = {True: "right", False: "WRONG", None: "-"}[record.get("ok")]
    parts = [f"  {record['name']:<58}"]
    if "us" in record:
        parts.append(f"{record['us']:>12,.1f} us")
    if record.get("share") is not None:
        parts.append(f"{record['share']:>7.1%} of {record['of']}")
    parts += [f"(goal {goal})" if record["met"] else f"(goal {goal}, MISSED)" for goal in _goals(record)]
    if "ok" in record:
        parts.append(mark)
    known = {"name", "us", "share", "of", *GOALS, "met", "ok", "seconds", "error", "roof", "limit"}
    parts += [f"{key} {_short(value)}" for key, value in record.items() if key not in known and value is not None]
    if record.get("error"):
        parts.append("\n      " + record["error"])
    print(" ".join(parts), flush=True)


GOALS = {"goal": "{:.0%}", "goal_us": "{:g} us", "goal_times": "{:g} times"}


def _goals(record: dict) -> list[str]:
    return [form.format(record[name]) for name, form in GOALS.items() if name in record and "met" in record]


def _short(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def chosen(only: str | None) -> list[str]:
    if only is None:
        return list(SECTIONS)
    names = [name.strip() for name in only.split(",")]
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise SystemExit(f"unknown section {', '.join(unknown)}; known are {', '.join(SECTIONS)}")
    return [name for name in SECTIONS if name in names or name == "card"]


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--quick", action="store_true", help="fewer shapes, shorter runs")
    options.add_argument("--only", help=f"sections, with commas between: {', '.join(SECTIONS)}")
    options.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options.add_argument("--log", type=Path, help="what the sections print (default: beside the JSON)")
    options.add_argument("--seed", type=int, help="of the random data (default: another one each time)")
    for hidden in ("--section", "--skip", "--roof"):
        options.add_argument(hidden, help=argparse.SUPPRESS, type=int if hidden == "--skip" else str)
    return options


def main() -> int:
    arguments = parser().parse_args()
    if arguments.section:
        child(arguments)
        return 0
    arguments.log = arguments.log or arguments.out.with_suffix(".log")
    with suppress(FileNotFoundError):
        arguments.log.unlink()
    settings = {"device": arguments.device, "quick": arguments.quick, "command": sys.argv}
    report, began = Report(arguments.out, settings), time.monotonic()
    patience = 4 if arguments.device == "cpu" else 1  # nobody waits for the interpreter's times
    for section in chosen(arguments.only):
        left = patience * TOTAL_SECONDS - (time.monotonic() - began)
        print(f"\n{section}", flush=True)
        if left < 10:
            report.add(section, {"name": section, "ok": None, "error": "no time left"})
            continue
        run_section(section, arguments, report, min(left, patience * SECTIONS[section][1]))
    report.data |= {"complete": True, "wrong": report.wrong, "seconds": round(time.monotonic() - began, 1)}
    report.save()
    print(f"\n{len(report.wrong)} wrong; {report.data['seconds']:.0f} s; {arguments.out}")
    for name in report.wrong:
        print(f"  WRONG: {name}")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
