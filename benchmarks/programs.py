"""How fast do whole programs run, against other ways to run the same programs on the same model?

    python benchmarks/programs.py                            # everything that is installed; three rounds
    python benchmarks/programs.py --quick                    # a few programs of each, one round, no peers: do they run?
    python benchmarks/programs.py --works tot,sot --only sglite,vLLM
    python benchmarks/programs.py --ablations                # sglite against itself with one idea taken away

The workloads are those of the SGLang paper (``workloads/``). Every side runs the same DSL programs on the same inputs,
temperature 0, answers of fixed length; all programs of a workload start at once. Everybody is warmed up, caches are
emptied before each try, inputs are new in every round, sides take turns and somebody else begins in each round. A try
begins when the machine is idle, and is made again when other processes used more than a tenth of a core meanwhile. Who
needs more than half a minute for a workload does it in the first round only. "alone" is the mean time of one program
while nothing else runs. Prints a table; writes ``programs.json`` and ``programs.png`` beside this file.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from lib.contestants import FailedError
from lib.hits import Hits, Recorder, hits
from lib.sides import Entry, Side, sides, tokenizer
from lib.standings import Cell, Standings, Taken, plot
from lib.watch import Watch, settle
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from workloads import WORKLOADS, Workload, Writer
from workloads.base import Prose

from sglite.errors import SgliteError
from sglite.protocol import Text

HERE = Path(__file__).parent
FOREIGN_LIMIT = 0.1
"""Cores."""
SLOW_SECONDS = 30.0
LEAST_SECONDS = 0.5
"""Below this the machine's own ticks are most of what is measured, so the watch says nothing."""

console = Console(width=None if sys.stdout.isatty() else 160)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are ended, too
    options = parse()
    works = [WORKLOADS[name] for name in options.works]
    model = tokenizer()
    prose = Prose(lambda text: len(model.encode((Text(text),))))
    with ExitStack() as stack, progress_bar() as bar:
        taking_part = started(entries(options), prose, options, stack, bar)
        standings = Standings([side.name for side in taking_part], [side.name for side in taking_part if side.ours], {})
        standings.settings = {name: getattr(options, name) for name in ("works", "repeats", "retries", "scale", "seed")}
        for _ in rounds(taking_part, works, prose, model.encode, options, standings, bar):
            if options.json is not None:  # a run takes long: what is known is written at once
                standings.write(options.json)
    standings.show(console)
    if options.json is not None and (notice := plot(standings, options.json.with_suffix(".png"))):
        console.print(notice)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", type=known, help=f"as a,b of {', '.join(WORKLOADS)}")
    parser.add_argument("--only", type=listed, default=[], help="sides whose name begins with one of these")
    parser.add_argument("--repeats", type=int, help="rounds that count (default: 3; with --quick 1)")
    parser.add_argument("--retries", type=int, help="how often a disturbed try is made again (default: 1; quick: 0)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="few programs of each workload, one round, no files, peers only with --only",
    )
    parser.add_argument("--ablations", action="store_true", help="sglite with one idea taken away at a time, no peers")
    parser.add_argument("--scale", type=float, default=1.0, help="times as many programs (default: 1)")
    parser.add_argument("--llama", type=listed, default=["Q4_0"], help="GGUF formats of llama.cpp (default: Q4_0)")
    parser.add_argument("--engine", type=pairs, default={}, metavar="A=B,..", help="options of our engine")
    parser.add_argument("--peers", type=Path, default=HERE / "peers/installed", help="folder of installed peers")
    parser.add_argument("--seed", type=int, default=0, help="another one makes other inputs")
    parser.add_argument("--json", type=Path, help="where to write JSON; the picture goes beside it")
    options = parser.parse_args()
    if not options.quick:
        options.json = options.json or HERE / ("ablations.json" if options.ablations else "programs.json")
    options.works = options.works or [name for name, work in WORKLOADS.items() if work.count.quick or not options.quick]
    options.repeats = options.repeats or (1 if options.quick else 3)
    options.retries = options.retries if options.retries is not None else (0 if options.quick else 1)
    return options


def listed(value: str) -> list[str]:
    return [name.strip() for name in value.split(",") if name.strip()]


def known(value: str) -> list[str]:
    if unknown := [name for name in listed(value) if name not in WORKLOADS]:
        raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    return listed(value)


def pairs(value: str) -> dict[str, object]:
    """``a=1,b=x``: numbers and true or false are read as such."""
    words = (pair.partition("=") for pair in listed(value))
    return {
        name: {"true": True, "false": False}.get(text, int(text) if text.isdigit() else text) for name, _, text in words
    }


def progress_bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


# --------------------------------------------------------------------------------------------------------- measuring


def entries(options: argparse.Namespace) -> list[Entry]:
    if options.ablations:
        from lib.ablations import ablations

        found = list(ablations(options.engine))
    else:
        found = list(sides(options.peers, options.engine, options.llama))
    wanted = [prefix.lower() for prefix in options.only or (["sglite"] if options.quick else [])]
    return [entry for entry in found if not wanted or any(entry.name.lower().startswith(prefix) for prefix in wanted)]


def started(
    found: Sequence[Entry], prose: Prose, options: argparse.Namespace, stack: ExitStack, bar: Progress
) -> list[Side]:
    """Everybody who can, warmed up with every workload; who cannot is named and left out."""
    task = bar.add_task("starting", total=len(found))
    taking_part = []
    for entry in found:
        bar.update(task, description=f"starting {entry.name}")
        try:
            side = entry.start()
        except (FailedError, SgliteError, OSError) as error:
            console.print(f"{entry.name} takes no part: {error}", style="yellow", markup=False)
        else:
            stack.callback(side.close)
            bar.update(task, description=f"warming up {entry.name}")
            warm_up(side, [WORKLOADS[name] for name in options.works], prose)
            taking_part.append(side)
        bar.advance(task)
    bar.remove_task(task)
    return taking_part


def warm_up(side: Side, works: Sequence[Workload], prose: Prose) -> None:
    for work in works:
        batch = work.inputs(Writer(prose, f"warm-up {work.name}"), 1)
        work.program.run_batch(batch, backend=side.backend)


def rounds(
    taking_part: list[Side],
    works: Sequence[Workload],
    prose: Prose,
    encode: object,
    options: argparse.Namespace,
    standings: Standings,
    bar: Progress,
) -> Iterator[int]:
    """Work by work, everybody in turn; in every round somebody else begins. Yields after each round."""
    task = bar.add_task("measuring", total=options.repeats * len(works) * len(taking_part))
    for number in range(options.repeats):
        for work in works:
            first = number % max(1, len(taking_part))
            for side in taking_part[first:] + taking_part[:first]:
                bar.update(task, description=f"round {number + 1}, {work.name}: {side.name}")
                cell = standings.cell(work.name, side.name)
                if cell.failure is None and not (number and cell.seconds > SLOW_SECONDS):
                    measure(side, work, prose, encode, options, number, cell)
                bar.advance(task)
        yield number
    bar.remove_task(task)


def measure(
    side: Side, work: Workload, prose: Prose, encode, options: argparse.Namespace, number: int, cell: Cell
) -> None:
    """A disturbed try is made again; when all were disturbed, the least disturbed counts, and is marked."""
    tries: list[Taken] = []
    while len(tries) <= options.retries and not (tries and tries[-1].foreign <= FOREIGN_LIMIT):
        writer = Writer(prose, f"{options.seed} {work.name} {number} {len(tries)}")
        taken = one_try(side, work, writer, encode, options)
        if isinstance(taken, str):
            cell.failure = taken
            return
        tries.append(taken)
    cell.take(min(tries, key=lambda each: each.foreign), len(tries) - 1, FOREIGN_LIMIT)


def one_try(side: Side, work: Workload, writer: Writer, encode, options: argparse.Namespace) -> Taken | str:
    """What was measured, or why a program failed."""
    count = work.count.quick if options.quick else round(work.count.full * options.scale)
    together, alone = work.inputs(writer, max(1, count)), work.inputs(writer, 1 if options.quick else work.count.alone)
    side.flush()
    settle()
    recorder = Recorder(side.backend)
    watch, began = Watch(side.pid), time.perf_counter()
    states = work.program.run_batch(together, backend=recorder)
    seconds = time.perf_counter() - began
    foreign = watch.foreign_cores() if seconds > LEAST_SECONDS else 0.0
    side.flush()
    walls = [one_alone(side, work, inputs, states) for inputs in alone]
    failed = next((error for state in states if (error := state.error()) is not None), None)
    if failed is not None:
        return f"{type(failed).__name__}: {failed}"
    counted = hits(recorder.seen, encode) if side.ours else Hits(0, 0, 0)
    pairs = [work.valid(state) for state in states]
    valid, checked = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
    tokens = sum(call.new_tokens for state in states for call in state.trace())
    total = seconds + sum(walls)
    return Taken(total, len(together) / seconds, sum(walls) / len(walls), foreign, counted, valid, checked, tokens)


def one_alone(side: Side, work: Workload, inputs: dict[str, object], states: list[object]) -> float:
    """Seconds of one program, which is then judged with the others."""
    began = time.perf_counter()
    (state,) = work.program.run_batch([inputs], backend=side.backend)
    states.append(state)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
