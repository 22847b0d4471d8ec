"""How fast do whole programs run, against other ways to run the same programs on the same model?

    python benchmarks/programs.py                            # everything that is installed; three rounds
    python benchmarks/programs.py --quick                    # a few programs of each, one round, no peers: do they run?
    python benchmarks/programs.py --works tot,sot --only sglite,vLLM
    python benchmarks/programs.py --ablations                # sglite against itself with one idea taken away

The workloads are those of the SGLang paper (``workloads/``). Every side runs the same DSL programs on the same inputs,
temperature 0, answers of fixed length; all programs of a workload start at once. Everybody is warmed up, caches are
emptied before each try, inputs are new in every round, sides take turns and somebody else begins in each round. A try
begins when the machine is idle, and is made again when other processes used more than a tenth of a core meanwhile.
"alone" is the mean time of one program while nothing else runs.

So that slow sides do not keep the run from ending: who would need more than ``--budget`` seconds for a workload, by
the quarter of it that warmed it up, gets only the first of its programs (a quarter at least), and the table says how
many; who needs more than half a minute for a workload, or is a peer less than half as fast as the best one, does it in
the first round only (†). Nothing begins that would end after ``--minutes``. Prints tables, also when it is stopped
early; writes ``programs.json`` after each try, and ``programs.png``.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
from lib.contestants import FailedError
from lib.sides import Entry, Side, sides, tokenizer
from lib.standings import Standings, plot
from lib.tries import Terms, measure, warm_up
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from workloads import WORKLOADS, Workload
from workloads.base import Prose

from sglite.errors import SgliteError
from sglite.protocol import Prompt, Text

HERE = Path(__file__).parent
SETTINGS = ("works", "repeats", "retries", "scale", "seed", "budget", "limit", "minutes")
SLOW_SECONDS = 30.0
OUT_OF_REACH = 2.0
"""Times slower than the best peer."""

console = Console(width=None if sys.stdout.isatty() else 160)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are ended, too
    options = parse()
    deadline = time.monotonic() + 60 * options.minutes
    works = [WORKLOADS[name] for name in options.works]
    terms = terms_of(options)
    standings = Standings([], [], {name: getattr(options, name) for name in SETTINGS})
    try:
        with ExitStack() as stack, progress_bar() as bar:
            taking_part = started(entries(options), works, terms, stack, bar)
            standings.names = [each.side.name for each in taking_part]
            standings.ours = [each.side.name for each in taking_part if each.side.ours]
            for _ in tries(taking_part, works, options.repeats, deadline, terms, standings, bar):
                if options.json is not None:  # a run takes long: what is known is written at once
                    standings.write(options.json)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
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
    parser.add_argument("--budget", type=float, default=40.0, help="seconds that a workload may take (default: 40)")
    parser.add_argument(
        "--limit", type=float, default=180.0, help="seconds after which they are cut off (default: 180)"
    )
    parser.add_argument("--minutes", type=float, default=39.0, help="nothing begins that would end later (default: 39)")
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


@dataclass(frozen=True, slots=True)
class Contestant:
    """A side that takes part, with the seconds that a program of each workload took it when it was warmed up."""

    side: Side
    seconds_each: Mapping[str, float]


def terms_of(options: argparse.Namespace) -> Terms:
    model = tokenizer()

    def encode(prompt: Prompt) -> tuple[int, ...]:
        return tuple(model.encode(prompt))

    prose = Prose(lambda text: len(encode((Text(text),))))
    same = {name: getattr(options, name) for name in ("quick", "scale", "seed", "retries", "budget", "limit")}
    return Terms(prose, encode, **same)


def started(
    found: Sequence[Entry], works: list[Workload], terms: Terms, stack: ExitStack, bar: Progress
) -> list[Contestant]:
    """Everybody who can, warmed up; who cannot is named and left out."""
    task = bar.add_task("starting", total=len(found))
    taking_part = []
    for entry in found:
        bar.update(task, description=f"starting {entry.name}")
        try:
            side = entry.start()
        except (FailedError, SgliteError, httpx.HTTPError, OSError) as error:
            console.print(f"{entry.name} takes no part: {error}", style="yellow", markup=False)
        else:
            stack.callback(side.close)
            bar.update(task, description=f"warming up {entry.name}")
            taking_part.append(Contestant(side, warm_up(side, works, terms)))
        bar.advance(task)
    bar.remove_task(task)
    return taking_part


def tries(
    taking_part: list[Contestant],
    works: list[Workload],
    repeats: int,
    deadline: float,
    terms: Terms,
    standings: Standings,
    bar: Progress,
) -> Iterator[None]:
    """Work by work, everybody in turn; in every round somebody else begins. Yields after each try."""
    task = bar.add_task("measuring", total=repeats * len(works) * len(taking_part))
    for number in range(repeats):
        first = number % max(1, len(taking_part))
        for work in works:
            for each in taking_part[first:] + taking_part[:first]:
                bar.update(task, description=f"round {number + 1}, {work.name}: {each.side.name}")
                cell = standings.cell(work.name, each.side.name)
                if wanted(number, work.name, each.side, standings) and time.monotonic() + cell.seconds < deadline:
                    cell.all = terms.count(work)
                    programs = terms.share(work, each.seconds_each.get(work.name))
                    measure(each.side, work, programs, number, terms, cell)
                    yield
                bar.advance(task)
    bar.remove_task(task)


def wanted(number: int, work: str, side: Side, standings: Standings) -> bool:
    """Whether another try can change anything, at a bearable price."""
    cell = standings.cell(work, side.name)
    if number == 0 or cell.failure is not None:
        return number == 0
    out_of_reach = side.peer and (standings.behind(work, side.name) or 0) > OUT_OF_REACH
    return cell.seconds <= SLOW_SECONDS and not out_of_reach


if __name__ == "__main__":
    main()
