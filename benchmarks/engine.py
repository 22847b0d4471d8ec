"""How fast is the engine on this machine, against other ways to run the same model?

    python benchmarks/engine.py                     # everything that is installed; five rounds, serious figures
    python benchmarks/engine.py --quick             # works a, b and e once: does everything run?
    python benchmarks/engine.py --works c,d --weights int8 --only sglite,vLLM
    python benchmarks/engine.py --server NAME=http://127.0.0.1:8000

Each work (see ``lib/works.py``) is done by every contestant in turn, with the same prompts, again and again; medians
count. A try during which other processes used more than a tenth of a core is thrown away and made again. How to
install the peers: ``peers/README.md``. Prints a table; writes ``engine.json`` and ``engine.png`` beside this file.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from lib.contestants import Contestant, FailedError, peak
from lib.lineup import MODEL, Entry, lineup
from lib.report import Report, Score, plot
from lib.watch import Watch
from lib.works import WORKS, Outcome, Prose, Verdict, Work, WrongAnswerError, judge, warm_up
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

HERE = Path(__file__).parent
FOREIGN_LIMIT = 0.1
"""Cores. A spinning barrier that loses one core can be five times slower: a little noise is a lot."""

console = Console(width=None if sys.stdout.isatty() else 160)


@dataclass(frozen=True, slots=True)
class Seat:
    """A contestant that takes part, and its score."""

    contestant: Contestant
    score: Score


@dataclass(frozen=True, slots=True)
class Try:
    values: tuple[float, ...]
    verdicts: tuple[Verdict, ...]
    foreign: float | None

    @property
    def quiet(self) -> bool:
        return self.foreign is None or self.foreign <= FOREIGN_LIMIT


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that contestants are ended, too
    options = parse()
    works = [WORKS[name] for name in options.works]
    prose = Prose(encoder(), options.seed)
    entries = [e for e in lineup(options.weights, options.server, options.peers) if chosen(e, options.only)]
    with ExitStack() as stack, progress_bar() as bar:
        seats = seated(entries, prose, stack, bar)
        report = report_of(works, seats, options)
        for _ in rounds(seats, works, prose, options, bar):  # a run takes long: what is known is written at once
            save(report, seats, options)
    report.show(console)
    if options.json is not None and (notice := plot(report, options.json.with_suffix(".png"))):
        console.print(notice)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", type=names_of(WORKS), help="which works, as a,b (default: all)")
    parser.add_argument("--repeats", type=int, help="rounds that count (default: 5)")
    parser.add_argument("--retries", type=int, help="how often a disturbed try is made again (default: 5)")
    parser.add_argument("--quick", action="store_true", help="works a, b and e, one round, no retries, no files")
    parser.add_argument("--weights", type=listed, default=["int8", "int4", "dense"], help="formats of our weights")
    parser.add_argument("--only", type=listed, default=[], help="contestants whose name begins with one of these")
    parser.add_argument(
        "--server", action="append", default=[], metavar="[NAME=]URL", help="a server that runs already"
    )
    parser.add_argument("--peers", type=Path, default=HERE / "peers/installed", help="folder of installed peers")
    parser.add_argument("--seed", type=int, default=0, help="another one cuts other prompts")
    parser.add_argument("--json", type=Path, help="where to write JSON; the picture goes beside it")
    options = parser.parse_args()
    if not options.quick:
        options.json = options.json or HERE / "engine.json"
    defaults = {"works": ["a", "b", "e"], "repeats": 1, "retries": 0} if options.quick else FULL
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


FULL = {"works": list(WORKS), "repeats": 5, "retries": 5}


def listed(value: str) -> list[str]:
    return [name.strip() for name in value.split(",") if name.strip()]


def names_of(known):
    def parse_names(value: str) -> list[str]:
        if unknown := [name for name in listed(value) if name not in known]:
            raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; there are {', '.join(known)}")
        return listed(value)

    return parse_names


def chosen(entry: Entry, prefixes: list[str]) -> bool:
    return not prefixes or any(entry.name.lower().startswith(prefix.lower()) for prefix in prefixes)


def encoder():
    from sglite.protocol import Text
    from sglite.runtime.hub import resolve_model
    from sglite.runtime.loading import load_config, load_tokenizer

    source = resolve_model(MODEL)
    tokenizer = load_tokenizer(source, load_config(source))
    return lambda text: tokenizer.encode((Text(text),))


def progress_bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


# --------------------------------------------------------------------------------------------------------- measuring


def seated(entries: list[Entry], prose: Prose, stack: ExitStack, bar: Progress) -> list[Seat]:
    """Start and warm up everybody; who cannot is named and left out."""
    task = bar.add_task("starting", total=len(entries))
    seats = []
    for entry in entries:
        bar.update(task, description=f"starting {entry.name}")
        try:
            seats.append(take_seat(entry, prose, stack))
        except (FailedError, WrongAnswerError) as error:
            console.print(f"{entry.name} takes no part: {error}", style="yellow", markup=False)
        bar.advance(task)
    bar.remove_task(task)
    return seats


def take_seat(entry: Entry, prose: Prose, stack: ExitStack) -> Seat:
    began = time.perf_counter()
    contestant = entry.start()
    loaded = None if contestant.pid is None else time.perf_counter() - began
    with ExitStack() as unless_warm:
        unless_warm.callback(contestant.close)
        for batch in warm_up(prose.cutter("warm-up"), contestant.abilities):
            judge(batch, contestant.run(batch))
        stack.push(unless_warm.pop_all())
    return Seat(contestant, Score(entry.name, entry.ours, loaded))


def rounds(
    seats: list[Seat], works: list[Work], prose: Prose, options: argparse.Namespace, bar: Progress
) -> Iterator[int]:
    """Work by work, everybody in turn; in every round somebody else begins. Yields after each round."""
    task = bar.add_task("measuring", total=options.repeats * len(works) * len(seats))
    for number in range(options.repeats):
        for work in works:
            first = number % max(1, len(seats))
            for seat in seats[first:] + seats[:first]:
                bar.update(task, description=f"round {number + 1}, work {work.name}: {seat.score.name}")
                if work.needs <= seat.contestant.abilities and work.name not in seat.score.failures:
                    measure_one(seat, work, prose, number, options.retries)
                bar.advance(task)
        yield number
    bar.remove_task(task)


def measure_one(seat: Seat, work: Work, prose: Prose, number: int, retries: int) -> None:
    """A disturbed try is made again; when all were disturbed, the least disturbed counts, and is marked."""
    tries: list[Try] = []
    try:
        while len(tries) <= retries and not (tries and tries[-1].quiet):
            tries.append(one_try(seat.contestant, work, prose, (number, len(tries))))
    except (FailedError, WrongAnswerError) as error:
        seat.score.failures[work.name] = str(error)
        return
    note(seat.score, work, min(tries, key=lambda each: each.foreign or 0.0), len(tries) - 1)


def one_try(contestant: Contestant, work: Work, prose: Prose, key: tuple[int, int]) -> Try:
    batches = work.batches(prose.cutter(work.name, *key))
    if "prefix" not in contestant.abilities:
        batches = batches[:1]  # nothing is ever warm
    contestant.flush()
    watch = Watch(contestant.pid)
    outcomes: list[Outcome] = [contestant.run(batch) for batch in batches]
    foreign = None if contestant.pid is None else watch.foreign_cores()
    verdicts = tuple(judge(batch, outcome) for batch, outcome in zip(batches, outcomes, strict=True))
    return Try(work.measure(outcomes), verdicts, foreign)


def note(score: Score, work: Work, taken: Try, discarded: int) -> None:
    for metric, value in zip(work.metrics, taken.values, strict=False):
        series = score.of(metric.name)
        series.values.append(value)
        series.foreign.append(taken.foreign)
        series.discarded += discarded
        for verdict in taken.verdicts:
            series.valid += verdict.valid
            series.checked += verdict.checked
            series.wrong += verdict.wrong


# -------------------------------------------------------------------------------------------------------- publishing


def report_of(works: list[Work], seats: list[Seat], options: argparse.Namespace) -> Report:
    settings = {name: getattr(options, name) for name in ("works", "repeats", "retries", "weights", "seed")}
    metrics = tuple(metric for work in works for metric in work.metrics)
    return Report(metrics, [seat.score for seat in seats], {"model": MODEL, **settings}, FOREIGN_LIMIT)


def save(report: Report, seats: list[Seat], options: argparse.Namespace) -> None:
    for seat in seats:
        seat.score.peak_megabytes = peak(seat.contestant) or seat.score.peak_megabytes
    if options.json is not None:
        report.write(options.json)


if __name__ == "__main__":
    main()
