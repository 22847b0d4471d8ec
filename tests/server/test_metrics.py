"""What /metrics tells, and that its labels stay bounded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sglite.errors import RequestError

Call = Callable[..., httpx.Response]


def scrape(call: Call) -> dict[str, float]:
    response = call("GET", "/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_requests_are_measured(call: Call) -> None:
    body = {"prompt": ["aaaa", "bbbb"], "max_tokens": 3, "n": 2}
    assert call("POST", "/v1/completions", json=body).status_code == 200
    found = scrape(call)
    assert found["sglite_requests_total{outcome=ok}"] == 2
    assert found["sglite_prompt_tokens_total"] == 8
    assert found["sglite_cached_tokens_total"] == 4
    assert found["sglite_generation_tokens_total"] == 12
    assert found["sglite_time_to_first_token_seconds_count"] == 2
    assert found["sglite_inter_token_latency_seconds_count"] == 0, "nobody looked between two tokens"
    assert found["sglite_time_per_output_token_seconds_count"] == 4
    assert found["sglite_request_duration_seconds_count"] == 2
    assert found["sglite_requests_in_flight"] == 0
    assert found["sglite_http_responses_total{route=/v1/completions,status=200}"] == 1


def test_only_streams_have_times_between_tokens(call: Call) -> None:
    body = {"prompt": ["aaaa", "bbbb"], "max_tokens": 3, "n": 2, "stream": True}
    assert call("POST", "/v1/completions", json=body).status_code == 200
    assert scrape(call)["sglite_inter_token_latency_seconds_count"] == 8


def test_outcomes_are_told_apart(call: Call, backend: Any) -> None:
    call("POST", "/generate", json={"text": "a" * 5000})
    backend.fail_after = (1, RequestError("broke"))
    call("POST", "/generate", json={"text": "a", "sampling_params": {"regex": "a"}})
    found = scrape(call)
    assert found["sglite_requests_total{outcome=refused}"] == 1
    assert found["sglite_requests_total{outcome=failed}"] == 1
    assert found["sglite_constrained_requests_total{outcome=failed}"] == 1
    assert found["sglite_http_responses_total{route=/generate,status=500}"] == 1


def test_programs_and_branches_are_counted(call: Call) -> None:
    for i, branch in enumerate(["a", "b", "b"]):
        body = {"id": f"r{i}", "prompt": [{"value": "x"}], "program": {"program": "p", "branch": branch}}
        assert call("POST", "/v1/sglite/generate", json=body).status_code == 200
    found = scrape(call)
    assert (found["sglite_programs_total"], found["sglite_program_branches_total"]) == (1, 2)


def test_labels_are_bounded_and_scrapes_quick(call: Call) -> None:
    for i in range(200):
        call("GET", f"/nope/{i}")
        call("POST", "/generate", json={"text": "a", "rid": f"r{i}", "sampling_params": {"max_new_tokens": 1}})
    began = time.perf_counter()
    found = scrape(call)
    assert time.perf_counter() - began < 0.5
    assert len(found) < 300
    assert found["sglite_http_responses_total{route=other,status=404}"] == 200


def test_an_engines_own_gauges(call: Call, backend: Any) -> None:
    async def stats() -> dict[str, Any]:
        return {"running": 3, "waiting": 2, "steps": 7, "unknown": 1, "pages_free": "x"}

    backend.stats = stats
    found = scrape(call)
    assert (found["sglite_running"], found["sglite_waiting"], found["sglite_steps_total"]) == (3, 2, 7)
    assert "sglite_pages_free" not in found  # what the engine does not tell is not 0


def test_an_engine_that_hangs_does_not_hang_the_scrape(call: Call, backend: Any) -> None:
    async def stats() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    backend.stats = stats
    found = scrape(call)
    assert "sglite_requests_in_flight" in found
    assert "sglite_running" not in found


@pytest.mark.parametrize("text", ["a b", 'x"y', "{}"])
def test_nothing_a_client_writes_becomes_a_label(call: Call, text: str) -> None:
    call("GET", f"/{text}")
    call("POST", "/v1/completions", json={"prompt": "a", "model": text, "user": text})
    assert not any(text in name for name in scrape(call))
