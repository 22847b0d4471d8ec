"""What was found, for people and machines: one table, JSON, a picture."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lib.works import Metric

BUSY = "*"


@dataclass(slots=True)
class Series:
    """One contestant's values of one metric. ``foreign``: cores that other processes used during each, None where
    nobody knows. ``discarded``: tries that were measured again. ``valid``/``checked``: answers of the right form."""

    values: list[float] = field(default_factory=list)
    foreign: list[float | None] = field(default_factory=list)
    discarded: int = 0
    valid: int = 0
    checked: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """Half the range, as a share of the median."""
        return (max(self.values) - min(self.values)) / 2 / self.median


@dataclass(slots=True)
class Score:
    """Everything known of one contestant. ``failures``: work and reason."""

    name: str
    ours: bool
    load_seconds: float | None = None
    peak_megabytes: float | None = None
    series: dict[str, Series] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def of(self, metric: str) -> Series:
        return self.series.setdefault(metric, Series())


@dataclass(frozen=True, slots=True)
class Report:
    metrics: tuple[Metric, ...]
    scores: Sequence[Score]
    settings: dict[str, Any]
    foreign_limit: float

    def best(self, metric: Metric, *, ours: bool) -> Score | None:
        found = [score for score in self.scores if score.ours is ours and metric.name in score.series]
        if not found:
            return None
        pick = max if metric.more_is_better else min
        return pick(found, key=lambda score: score.series[metric.name].median)

    def ratio(self, metric: Metric) -> float | None:
        """Our best over the best peer."""
        ours, theirs = self.best(metric, ours=True), self.best(metric, ours=False)
        if ours is None or theirs is None:
            return None
        return ours.series[metric.name].median / theirs.series[metric.name].median

    def noisy(self, series: Series) -> bool:
        return any(foreign is not None and foreign > self.foreign_limit for foreign in series.foreign)

    # ---- for people --------------------------------------------------------------------------------------------

    def show(self, console: Console) -> None:
        console.print(self._table())
        for metric in self.metrics:
            console.print(f"[bold]{metric.name}[/]  {metric.title}, {metric.unit}{_arrow(metric)}", highlight=False)
        if any(self.noisy(series) for score in self.scores for series in score.series.values()):
            console.print(f"{BUSY} other processes used more than {self.foreign_limit:g} of a core meanwhile")
        for score in self.scores:
            for work, reason in score.failures.items():
                console.print(f"{score.name}, {work}: {reason}", style="yellow", markup=False)

    def _table(self) -> Table:
        table = Table("contestant", "load s", "peak MB", title="median ± half the range")
        for metric in self.metrics:
            table.add_column(f"{metric.name}\n{metric.unit}", justify="right")
        for score in self.scores:
            row = [self._cell(score, metric) for metric in self.metrics]
            table.add_row(score.name, _number(score.load_seconds), _number(score.peak_megabytes), *row)
        ratios = [self.ratio(metric) for metric in self.metrics]
        if any(ratios):
            table.add_section()
            table.add_row("ours / best peer", "", "", *[f"{ratio:.2f}x" if ratio else "-" for ratio in ratios])
        return table

    def _cell(self, score: Score, metric: Metric) -> str:
        if metric.name not in score.series:
            return "-"
        series = score.series[metric.name]
        first = self.best(metric, ours=score.ours) is score
        text = f"[bold]{_number(series.median)}[/]" if first else _number(series.median)
        spread = f" ±{series.spread:.0%}" if len(series.values) > 1 else ""
        valid = "" if series.valid == series.checked else f" ({series.valid}/{series.checked} valid)"
        return f"{text}{spread}{BUSY if self.noisy(series) else ''}{valid}"

    # ---- for machines ------------------------------------------------------------------------------------------

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self._value(), indent=1) + "\n")

    def _value(self) -> dict[str, Any]:
        return {
            "machine": machine(),
            "settings": self.settings,
            "metrics": {metric.name: asdict(metric) for metric in self.metrics},
            "ratios": {metric.name: self._compared(metric) for metric in self.metrics},
            "contestants": [self._scored(score) for score in self.scores],
        }

    def _compared(self, metric: Metric) -> dict[str, Any]:
        ours, theirs = self.best(metric, ours=True), self.best(metric, ours=False)
        return {"ours": ours and ours.name, "best peer": theirs and theirs.name, "ratio": self.ratio(metric)}

    def _scored(self, score: Score) -> dict[str, Any]:
        value = asdict(score)
        for name, series in score.series.items():
            value["series"][name] |= {"median": series.median, "spread": series.spread, "noisy": self.noisy(series)}
        return value


def machine() -> dict[str, Any]:
    return {"cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _arrow(metric: Metric) -> str:
    return "" if metric.more_is_better else " (less is better)"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


# ----------------------------------------------------------------------------------------------------------- picture


def plot(report: Report, path: Path) -> str | None:
    """One panel of bars per metric. What kept it from being drawn, if anything did."""
    if find_spec("matplotlib") is None:
        return f"no picture: matplotlib is not installed (pip install matplotlib draws {path.name})"
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(4, len(report.metrics))
    rows = -(-len(report.metrics) // columns)
    height = 1 + 0.3 * len(report.scores)
    figure, axes = pyplot.subplots(rows, columns, figsize=(4 * columns, height * rows), squeeze=False, sharey=True)
    for axis, metric in zip(axes.flat, report.metrics, strict=False):
        _panel(axis, report, metric)
    axes[0][0].invert_yaxis()  # for all: they share it
    for axis in axes.flat[len(report.metrics) :]:
        axis.set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return None


def _panel(axis: Any, report: Report, metric: Metric) -> None:
    names = [score.name for score in report.scores]
    series = [score.series.get(metric.name) for score in report.scores]
    medians = [0 if each is None else each.median for each in series]
    below = [0 if each is None else each.median - min(each.values) for each in series]
    above = [0 if each is None else max(each.values) - each.median for each in series]
    colours = ["tab:blue" if score.ours else "tab:gray" for score in report.scores]
    axis.barh(names, medians, xerr=[below, above], color=colours)
    axis.set_title(f"{metric.name}: {metric.unit}{_arrow(metric)}", fontsize=10)
    axis.tick_params(labelsize=8)
