"""``sglite report``: the figures of a server or of a benchmark's JSON, each with what it means."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglite.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from rich.console import Console

EXAMPLES = """examples:
  sglite report http://127.0.0.1:30000                    a server's figures since its start
  sglite report http://127.0.0.1:30000 --seconds 10       those of the next ten seconds
  sglite report run.json --price 0.35                     of `sglite bench ... --json run.json`
  sglite report benchmarks/programs.json                  of the benchmark of programs

--price is what the machine costs per hour; then there are tokens per unit of that money.
"""


@dataclass(frozen=True, slots=True)
class Line:
    """``value`` is None where the source does not tell."""

    name: str
    value: float | None
    unit: str
    reading: str


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a server's address, or a JSON file of a benchmark")
    parser.add_argument("--price", type=float, metavar="X", help="what the machine costs per hour, in any money")
    parser.add_argument("--seconds", type=float, default=0, metavar="S", help="of a server: look at the next S seconds")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(options: argparse.Namespace) -> int:
    if options.price is not None and not options.price > 0:
        raise ConfigError(f"--price must be greater than 0, not {options.price:g}")
    if not 0 <= options.seconds <= 3600:
        raise ConfigError(f"--seconds must be from 0 to 3600, not {options.seconds:g}")
    lines = read(options.source, options.seconds, options.price)
    if options.json:
        print(as_json(lines))
        return 0
    from rich.console import Console

    show(lines, Console())
    return 0


def read(source: str, seconds: float, price: float | None) -> list[Line]:
    """Raises ConfigError for what is no source, UnavailableError where no server answers."""
    if source.startswith(("http://", "https://")):
        server = source.rstrip("/").removesuffix("/metrics").removesuffix("/v1")
        return list(of_metrics(*look_twice(server, seconds), price))
    try:
        value = json.loads(Path(source).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {source}: {(error.strerror or str(error)).lower()}") from None
    except ValueError as error:
        raise ConfigError(f"{source} is not JSON: {error}") from None
    kind = value.get("kind") if isinstance(value, dict) else None
    if kind == "load":
        return list(of_load(value, price))
    if kind == "programs":
        return list(of_programs(value))
    raise ConfigError(f"{source} holds neither a run of sglite bench nor one of benchmarks/programs.py")


# -------------------------------------------------------------------------------------------------------------- a run


def of_load(value: Mapping[str, Any], price: float | None) -> Iterator[Line]:
    found = value["figures"]
    yield from _speed(found["tokens_per_second"], price)
    yield Line("requests", found["requests_per_second"], "1/s", "answers per second, over the whole run")
    for name, text in (
        ("ttft", "until the first text"),
        ("tpot", "per token after the first"),
        ("e2e", "until the end"),
    ):
        yield from _tail(name, found["times"][name], text)
    yield _hit_rate(found["hit_rate"])
    if found["goodput"] is not None:
        yield Line("goodput", found["goodput"], "1/s", "requests per second that kept every limit of the SLO")
    yield Line("failed", found["failed"] / found["requests"], "share", "requests without an answer")


def of_programs(value: Mapping[str, Any]) -> Iterator[Line]:
    for work, ratio in value["speedup"].items():
        reading = "our programs per second over the best peer's: above 1 we are faster"
        yield Line(f"{work} speed", ratio, "x", reading)
    for work, ratio in value["alone"].items():
        yield Line(f"{work} alone", ratio, "x", "our time for one program over the best peer's: below 1 we are faster")
    for work, cells in value["workloads"].items():
        for side, cell in cells.items():
            if (share := cell["hits_of_best"]) is not None:
                yield Line(
                    f"{work} hits, {side}", share, "share", "of the prompt tokens the best cache would have found"
                )
            if cell["checked"]:
                share = cell["valid"] / cell["checked"]
                yield Line(f"{work} schema, {side}", share, "share", "answers that are valid under their JSON schema")


# ------------------------------------------------------------------------------------------------------------ a server


@dataclass(frozen=True, slots=True)
class Samples:
    """A look at /metrics: a value per name and labels, and the seconds that the server has been up."""

    values: Mapping[tuple[str, tuple[tuple[str, str], ...]], float]
    uptime: float

    def sum(self, name: str, **labels: str) -> float | None:
        """Over all samples of a name that have these labels; None where there is none."""
        wanted = labels.items()
        found = [v for (key, have), v in self.values.items() if key == name and wanted <= dict(have).items()]
        return math.fsum(found) if found else None

    def since(self, earlier: Samples | None) -> Samples:
        """What was counted after ``earlier``; gauges stay as they are."""
        if earlier is None:
            return self
        counted = {
            key: value - earlier.values.get(key, 0.0) if key[0].endswith(_COUNTED) else value
            for key, value in self.values.items()
        }
        return Samples(counted, self.uptime - earlier.uptime)

    def quantile(self, name: str, share: float) -> float | None:
        """Of a histogram, by straight lines within its buckets."""
        buckets = sorted(
            (float(dict(have)["le"]), value) for (key, have), value in self.values.items() if key == f"{name}_bucket"
        )
        if not buckets or not buckets[-1][1]:
            return None
        rank, low, before = share * buckets[-1][1], 0.0, 0.0
        for high, count in buckets:
            if count >= rank:
                inside = (rank - before) / (count - before) if count > before else 1.0
                return low if math.isinf(high) else low + (high - low) * inside
            low, before = high, count
        raise AssertionError("the last bucket holds everything")


_COUNTED = ("_total", "_bucket", "_sum", "_count")


def look_twice(url: str, seconds: float) -> tuple[Samples, Samples | None]:
    """The server's counters now, and where ``seconds`` > 0 those before that time."""
    import time

    if not seconds:
        return look(url), None
    earlier = look(url)
    time.sleep(seconds)
    return look(url), earlier


def look(url: str) -> Samples:
    import httpx

    try:
        text = httpx.get(f"{url}/metrics", timeout=10).raise_for_status().text
        info = httpx.get(f"{url}/server_info", timeout=10).raise_for_status().json()
    except (httpx.HTTPError, ValueError) as error:
        raise UnavailableError(
            f"cannot read the metrics of {url}: {str(error).splitlines()[0]}; is it an sglite server?"
        ) from None
    return Samples(parse(text), float(info["uptime_seconds"]))


def parse(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    from prometheus_client.parser import text_string_to_metric_families

    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of_metrics(now: Samples, earlier: Samples | None, price: float | None) -> Iterator[Line]:
    seen = now.since(earlier)
    yield from _speed(_share(seen.sum("sglite_generation_tokens_total"), seen.uptime), price)
    answers = seen.sum("sglite_requests_total", outcome="ok")
    yield Line("requests", _share(answers, seen.uptime), "1/s", "answers per second, idle time included")
    for name, metric, text in _HISTOGRAMS:
        quantiles = {
            key: seen.quantile(f"sglite_{metric}_seconds", share) for key, share in (("p50", 0.5), ("p99", 0.99))
        }
        yield from _tail(name, None if None in quantiles.values() else quantiles, text)
    yield _hit_rate(_share(seen.sum("sglite_cached_tokens_total"), seen.sum("sglite_prompt_tokens_total")))
    constrained = seen.sum("sglite_constrained_requests_total")
    kept = seen.sum("sglite_constrained_requests_total", outcome="ok") or 0.0
    yield Line("schema success", _share(kept, constrained), "share", "constrained requests that got a valid answer")
    total, free = now.sum("sglite_pages_total"), now.sum("sglite_pages_free")
    used = None if total is None or free is None else total - free
    yield Line("KV in use", _share(used, total), "share", "of the KV pool: running sequences and cached prefixes")
    cached = _share(now.sum("sglite_pages_cached"), total)
    yield Line(
        "KV cached", cached, "share", "of the KV pool: prefixes that wait to be hit, and go first when room is short"
    )


_HISTOGRAMS = (
    ("ttft", "time_to_first_token", "until the first text"),
    ("tpot", "time_per_output_token", "per token after the first"),
    ("e2e", "request_duration", "until the end"),
)


# --------------------------------------------------------------------------------------------------------------- lines


def _speed(rate: float | None, price: float | None) -> Iterator[Line]:
    yield Line("tokens", rate, "1/s", "generated tokens per second, of all requests together")
    if price is not None:
        worth = None if rate is None else rate * 3600 / price
        yield Line(
            "tokens per money", worth, "1", f"generated for one unit, at {price:g} an hour; idle time costs, too"
        )


def _tail(name: str, times: Mapping[str, Any] | None, text: str) -> Iterator[Line]:
    p50, p99 = (None, None) if times is None else (times["p50"], times["p99"])
    yield Line(f"{name} P50", None if p50 is None else p50 * 1000, "ms", f"half of all requests wait no longer {text}")
    yield Line(f"{name} P99/P50", _share(p99, p50), "x", "how much longer the slowest hundredth waits: near 1 is even")


def _hit_rate(rate: float | None) -> Line:
    return Line("hit rate", rate, "share", "of all prompt tokens: found in the prefix cache instead of computed")


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def show(lines: list[Line], console: Console) -> None:
    from rich.table import Table

    table = Table("figure", "value", "what it says")
    for line in lines:
        table.add_row(line.name, _written(line), line.reading)
    console.print(table)


def as_json(lines: list[Line]) -> str:
    return json.dumps([asdict(line) for line in lines], indent=1)


def _written(line: Line) -> str:
    if line.value is None:
        return "-"
    if line.unit == "share":
        return f"{line.value:.1%}"
    number = f"{line.value:,.0f}" if line.value >= 1000 else f"{line.value:.3g}"
    return {"x": f"{number}x", "ms": f"{number} ms", "1/s": f"{number}/s"}.get(line.unit, number)
