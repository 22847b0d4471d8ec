"""What was found about programs, for people and machines: one table, JSON, a picture."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lib.hits import Hits
from lib.report import machine

BUSY = "*"
ONCE = "†"
LEAST_SHARED = 0.05
"""Of the prompts: below it there is nothing to find, and a share of it says nothing."""


@dataclass(frozen=True, slots=True)
class Taken:
    """One try: the seconds it took, how many programs ran together, how many of them per second, seconds of one alone,
    cores that others used meanwhile."""

    seconds: float
    programs: int
    rate: float
    alone: float
    foreign: float
    hits: Hits
    valid: int
    checked: int
    tokens: int


@dataclass(slots=True)
class Cell:
    """A workload on a side, over all rounds. ``programs`` of ``all`` ran together in each. ``failure``: why none."""

    all: int = 0
    programs: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    foreign: list[float] = field(default_factory=list)
    seconds: float = 0.0
    discarded: int = 0
    noisy: bool = False
    prompt: int = 0
    cached: int = 0
    best: int = 0
    valid: int = 0
    checked: int = 0
    tokens: int = 0
    failure: str | None = None

    def take(self, taken: Taken, discarded: int, limit: float) -> None:
        self.programs.append(taken.programs)
        self.rates.append(taken.rate)
        self.alone.append(taken.alone)
        self.foreign.append(taken.foreign)
        self.seconds = max(self.seconds, taken.seconds)
        self.discarded += discarded
        self.noisy = self.noisy or taken.foreign > limit
        self.prompt, self.cached = self.prompt + taken.hits.prompt, self.cached + taken.hits.cached
        self.best += taken.hits.best
        self.valid, self.checked = self.valid + taken.valid, self.checked + taken.checked
        self.tokens += taken.tokens

    @property
    def rate(self) -> float | None:
        return statistics.median(self.rates) if self.rates else None

    @property
    def latency(self) -> float | None:
        return statistics.median(self.alone) if self.alone else None

    @property
    def of_best(self) -> float | None:
        """Share of the possible hits that were made; None where next to nothing could be found."""
        return self.cached / self.best if self.best > LEAST_SHARED * self.prompt else None


@dataclass(slots=True)
class Standings:
    """``ours`` are the names of our sides; the first of them is the one that is compared."""

    names: Sequence[str]
    ours: Sequence[str]
    settings: dict[str, Any]
    cells: dict[str, dict[str, Cell]] = field(default_factory=dict)

    def cell(self, work: str, side: str) -> Cell:
        return self.cells.setdefault(work, {}).setdefault(side, Cell())

    @property
    def peers(self) -> list[str]:
        return [name for name in self.names if name not in self.ours]

    def fastest(self, work: str) -> str | None:
        """The peer with most programs per second."""
        return self._best(work, lambda cell: cell.rate and 1 / cell.rate)

    def quickest(self, work: str) -> str | None:
        """The peer that needs least for one program alone."""
        return self._best(work, lambda cell: cell.latency)

    def speedup(self, work: str, side: str | None = None) -> float | None:
        """Our programs/s over the best peer's (or over ``side``'s)."""
        mine, theirs = self._mine(work).rate, self._cell(work, side or self.fastest(work)).rate
        return mine / theirs if mine and theirs else None

    def slowdown(self, work: str) -> float | None:
        """Our seconds for one program alone over the best peer's."""
        mine, theirs = self._mine(work).latency, self._cell(work, self.quickest(work)).latency
        return mine / theirs if mine and theirs else None

    def behind(self, work: str, peer: str) -> float | None:
        """How many times as fast the fastest peer is."""
        best, mine = self._cell(work, self.fastest(work)).rate, self._cell(work, peer).rate
        return best / mine if best and mine else None

    def _best(self, work: str, cost: Callable[[Cell], float | None]) -> str | None:
        costs = {name: each for name in self.peers if (each := cost(self._cell(work, name)))}
        return min(costs, key=lambda name: costs[name], default=None)

    def _mine(self, work: str) -> Cell:
        return self._cell(work, self.ours[0] if self.ours else None)

    def _cell(self, work: str, side: str | None) -> Cell:
        return self.cells.get(work, {}).get(side or "", Cell())

    # ---- for people --------------------------------------------------------------------------------------------

    def show(self, console: Console) -> None:
        all_at_once, alone = "programs/s, all at once (more is better)", "seconds of one program alone (less is better)"
        console.print(self._table(all_at_once, lambda cell: cell.rate, self.speedup, self.fastest))
        console.print(self._table(alone, lambda cell: cell.latency, self.slowdown, self.quickest))
        console.print(self._quality())
        every = [cell for cells in self.cells.values() for cell in cells.values()]
        if any(cell.noisy for cell in every):
            console.print(f"{BUSY} other processes used the machine meanwhile")
        if any(self._once(cell) for cell in every):
            console.print(f"{ONCE} one round only: too slow, a peer out of the best one's reach, or no time was left")
        for work, cells in self.cells.items():
            for name, cell in cells.items():
                if cell.failure:
                    console.print(f"{work}, {name}: {cell.failure}", style="yellow", markup=False)

    def _table(self, title: str, value: Any, ratio: Any, best: Any) -> Table:
        table = Table("workload", title=title)
        for name in self.names:
            table.add_column(name, justify="right")
        compared = bool(self.peers and self.ours)
        if compared:
            table.add_column("ours / best peer", justify="right")
            table.add_column("best peer")
        for work, cells in self.cells.items():
            found = [cells.get(name, Cell()) for name in self.names]
            row = [_number(value(cell)) + self._marks(cell) for cell in found]
            table.add_row(work, *row, *([_times(ratio(work)), best(work) or "-"] if compared else []))
        if compared:
            table.add_section()
            mean = geometric_mean([r for work in self.cells if (r := ratio(work))])
            table.add_row("geometric mean", *[""] * len(self.names), _times(mean))
        return table

    def _marks(self, cell: Cell) -> str:
        part = f" ({min(cell.programs)} of {cell.all})" if cell.programs and min(cell.programs) < cell.all else ""
        return part + (BUSY if cell.noisy else "") + (ONCE if self._once(cell) else "")

    def _once(self, cell: Cell) -> bool:
        return len(cell.rates) == 1 and self.settings.get("repeats", 1) > 1

    def _quality(self) -> Table:
        table = Table("workload", title="of what could be found cached, found / answers valid")
        for name in self.names:
            table.add_column(name, justify="right")
        for work, cells in self.cells.items():
            table.add_row(work, *[_quality(cells.get(name, Cell())) for name in self.names])
        return table

    # ---- for machines ------------------------------------------------------------------------------------------

    def write(self, path: Path) -> None:
        """Whole or not at all: whoever is killed meanwhile leaves what was there before."""
        half = path.with_suffix(".part")
        half.write_text(json.dumps(self.value(), indent=1) + "\n")
        half.replace(path)

    def value(self) -> dict[str, Any]:
        speedups = {work: self.speedup(work) for work in self.cells}
        slowdowns = {work: self.slowdown(work) for work in self.cells}
        return {
            "kind": "programs",
            "machine": machine(),
            "settings": self.settings,
            "speedup": {**speedups, "geometric mean": geometric_mean([r for r in speedups.values() if r])},
            "alone": {**slowdowns, "geometric mean": geometric_mean([r for r in slowdowns.values() if r])},
            "best_peer": {work: self.fastest(work) for work in self.cells},
            "workloads": {
                work: {
                    name: {
                        **asdict(cell),
                        "programs_per_second": cell.rate,
                        "seconds_alone": cell.latency,
                        "hits_of_best": cell.of_best,
                    }
                    for name, cell in cells.items()
                }
                for work, cells in self.cells.items()
            },
        }


def geometric_mean(values: Sequence[float]) -> float | None:
    return math.exp(statistics.fmean(map(math.log, values))) if values else None


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.1f}" if value >= 10 else f"{value:.2f}"


def _times(value: float | None) -> str:
    return f"{value:.2f}x" if value else "-"


def _quality(cell: Cell) -> str:
    found = "-" if cell.of_best is None else f"{cell.of_best:.1%}"
    return f"{found} / {cell.valid} of {cell.checked}" if cell.checked else found


def plot(standings: Standings, path: Path) -> str | None:
    """Programs/s of every side, relative to ours. What kept it from being drawn, if anything did."""
    if find_spec("matplotlib") is None:
        return f"no picture: matplotlib is not installed (pip install matplotlib draws {path.name})"
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    works, names = list(standings.cells), list(standings.names)
    figure, axis = pyplot.subplots(figsize=(1.1 * len(works) + 3, 4.5))
    width = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        shares = [1 / ratio if (ratio := standings.speedup(work, name)) else 0 for work in works]
        axis.bar([x + (i - len(names) / 2 + 0.5) * width for x in range(len(works))], shares, width, label=name)
    axis.axhline(1, color="black", linewidth=0.5)
    axis.set_xticks(range(len(works)), works, rotation=30, ha="right", fontsize=8)
    axis.set_ylabel(f"programs/s, {standings.ours[0] if standings.ours else 'ours'} = 1")
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return None
