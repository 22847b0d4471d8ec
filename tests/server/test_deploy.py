"""What lies in deploy/ fits the server: the dashboard's metrics are in a scrape, the files' options exist."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sglite.cli import parser
from sglite.runtime.config import EngineConfig
from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.runner import running
from sglite.runtime.testing import answering, scripted_engine

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "deploy/grafana-dashboard.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
NAME = re.compile(r"\bsglite_[a-z_]+")


class Supervised:
    """An engine that also tells what a supervisor of its process would."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def stats(self) -> Mapping[str, Any]:
        return {**await self._engine.stats(), "worker_restarts": 0, "worker_silence": 0.0}


@pytest.fixture(scope="module")
def scrape() -> Iterator[dict[str, set[str]]]:
    """The label names of every sample, after each kind of work was done once."""
    with scripted_engine(answering('{"a": 1}')) as engine, running(Supervised(engine), ServerConfig(port=0)) as url:
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
        body = {"prompt": "what?", "max_tokens": 40, "response_format": schema}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
        program = {"id": "r", "prompt": [{"value": "x"}], "program": {"program": "p"}}
        assert httpx.post(f"{url}/v1/sglite/generate", json=program).status_code == 200
        text = httpx.get(f"{url}/metrics").text
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    yield found


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_of_the_dashboard_finds_something(query: str, scrape: dict[str, set[str]]) -> None:
    names = NAME.findall(query)
    assert names
    for name in names:
        assert name in scrape, f"{name} is in no scrape"
    labels = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")}
    labels |= {label for group in re.findall(r"\{([^}]*)\}", query) for label in re.findall(r"(\w+)=", group)}
    assert labels <= set().union(*(scrape[name] for name in names))


def test_the_dashboard_is_whole() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    wanted = (
        "time_to_first_token",
        "inter_token_latency",
        "time_per_output_token",
        "request_duration",
        "queue_seconds",
    )
    more = ("running", "waiting", "kv_usage", "cached_tokens", "evicted_pages", "retractions", "constrained_requests")
    for part in (*wanted, *more, "rollbacks", "tool_calls", "program_branches"):
        assert any(part in query for query in QUERIES), part


def test_the_example_configuration_has_only_known_options() -> None:
    given = tomllib.loads((ROOT / "deploy/server.toml").read_text())
    known = {field.name for config in (ServerConfig, EngineConfig) for field in fields(config)}
    assert set(given) <= known
    ServerConfig(**{name: given[name] for name in given if name in ServerConfig.__dataclass_fields__})


def test_the_image_starts_the_server_with_options_it_knows() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    words = [json.loads(line.partition(" ")[2]) for line in lines if line.startswith(("ENTRYPOINT", "CMD"))]
    program, *arguments = [word for part in words for word in part]
    assert program == "sglite"
    options = parser().parse_args(arguments)
    assert (options.host, options.port) == ("0.0.0.0", 30000)
    users = [line for line in lines if line.startswith("USER")]
    assert users == ["USER sglite"]
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert all((ROOT / name).exists() for name in copied)


def test_the_unit_starts_the_server_with_options_it_knows() -> None:
    unit = (ROOT / "deploy/sglite.service").read_text()
    (command,) = re.findall(r"^ExecStart=\S+/sglite (.*)$", unit, re.MULTILINE)
    assert parser().parse_args(command.split()).config == Path("/etc/sglite/server.toml")
    stop = int(re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[0])
    assert stop > tomllib.loads((ROOT / "deploy/server.toml").read_text())["drain_timeout"]
