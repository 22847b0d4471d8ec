"""What is read out of a server's metrics, and of the benchmark of programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglite.bench.report import Line, Samples, of_metrics, parse, read

METRICS = """
# TYPE sglite_generation_tokens counter
sglite_generation_tokens_total {tokens}
# TYPE sglite_prompt_tokens counter
sglite_prompt_tokens_total 1000.0
# TYPE sglite_cached_tokens counter
sglite_cached_tokens_total 400.0
# TYPE sglite_requests counter
sglite_requests_total{{outcome="ok"}} 20.0
sglite_requests_total{{outcome="failed"}} 5.0
# TYPE sglite_constrained_requests counter
sglite_constrained_requests_total{{outcome="ok"}} 3.0
sglite_constrained_requests_total{{outcome="failed"}} 1.0
# TYPE sglite_pages_total gauge
sglite_pages_total 100.0
# TYPE sglite_pages_free gauge
sglite_pages_free 25.0
# TYPE sglite_time_to_first_token_seconds histogram
sglite_time_to_first_token_seconds_bucket{{le="0.1"}} 10.0
sglite_time_to_first_token_seconds_bucket{{le="0.2"}} 20.0
sglite_time_to_first_token_seconds_bucket{{le="+Inf"}} 20.0
sglite_time_to_first_token_seconds_count 20.0
sglite_time_to_first_token_seconds_sum 2.0
"""


def samples(tokens: float, uptime: float) -> Samples:
    return Samples(parse(METRICS.format(tokens=tokens)), uptime)


def by_name(lines: object) -> dict[str, Line]:
    return {line.name: line for line in lines}  # type: ignore[attr-defined]


def test_figures_since_the_start() -> None:
    lines = by_name(of_metrics(samples(500.0, 50.0), None, price=0.5))
    assert lines["tokens"].value == 10.0
    assert lines["tokens per money"].value == 72_000
    assert lines["requests"].value == 0.4
    assert lines["hit rate"].value == 0.4
    assert lines["schema success"].value == 0.75
    assert lines["KV in use"].value == 0.75
    assert lines["ttft P50"].value == pytest.approx(100.0)
    assert lines["ttft P99/P50"].value == pytest.approx(1.98)


def test_figures_of_an_interval_count_only_what_was_added() -> None:
    lines = by_name(of_metrics(samples(560.0, 53.0), samples(500.0, 50.0), price=None))
    assert lines["tokens"].value == 20.0
    assert lines["hit rate"].value is None  # no prompt came meanwhile
    assert lines["ttft P50"].value is None
    assert lines["KV in use"].value == 0.75  # gauges are what they are
    assert "tokens per money" not in lines


def test_a_server_that_tells_nothing_gives_no_numbers() -> None:
    lines = by_name(of_metrics(Samples({}, 10.0), None, price=1.0))
    assert {line.value for line in lines.values()} == {None}


def test_programs(tmp_path: Path) -> None:
    cell = {"hits_of_best": 0.98, "valid": 7, "checked": 7}
    value = {
        "kind": "programs",
        "speedup": {"json": 2.5, "geometric mean": 2.5},
        "alone": {"json": 0.5, "geometric mean": 0.5},
        "workloads": {"json": {"sglite": cell, "peer": {**cell, "hits_of_best": None}}},
    }
    (tmp_path / "programs.json").write_text(json.dumps(value), encoding="utf-8")
    lines = by_name(read(str(tmp_path / "programs.json"), 0, None))
    assert lines["json speed"].value == 2.5
    assert lines["json alone"].value == 0.5
    assert lines["json hits, sglite"].value == 0.98
    assert lines["json schema, peer"].value == 1.0
    assert "json hits, peer" not in lines
