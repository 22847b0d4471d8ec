"""OpenTelemetry spans, and log lines."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from sglite.errors import ConfigError
from sglite.runtime.server.app import create_app
from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.logs import JsonLines, request_id
from sglite.runtime.server.spans import Spans, open_spans

Call = Callable[..., httpx.Response]


@pytest.fixture
def exporter() -> Any:
    pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed: pip install 'sglite[dev]'")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    return InMemorySpanExporter()


@pytest.fixture
def spans(exporter: Any) -> Spans:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Spans(provider)


async def requests(backend: Any, spans: Spans, *calls: tuple[str, dict[str, Any], dict[str, str]]) -> None:
    app = create_app(backend, ServerConfig(), spans=spans)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
        for path, body, headers in calls:
            await client.post(path, json=body, headers=headers)
    spans.close()


def run(backend: Any, spans: Spans, *calls: tuple[str, dict[str, Any], dict[str, str]]) -> None:
    import asyncio

    asyncio.run(requests(backend, spans, *calls))


def test_a_request_is_a_span_in_its_clients_trace(backend: Any, spans: Spans, exporter: Any) -> None:
    parent = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
    run(backend, spans, ("/v1/completions", {"prompt": "abcd", "max_tokens": 3}, parent))
    (span,) = exporter.get_finished_spans()
    assert span.name == "sglite.gen"
    assert f"{span.context.trace_id:032x}" == "ab" * 16
    assert span.attributes["gen_ai.usage.input_tokens"] == 4
    assert span.attributes["gen_ai.usage.output_tokens"] == 3
    assert span.attributes["sglite.cached_tokens"] == 2
    assert span.end_time > span.start_time


def test_a_programs_calls_lie_under_its_span(backend: Any, spans: Spans, exporter: Any) -> None:
    calls = [
        ("/v1/sglite/generate", {"id": f"r{i}", "prompt": [{"value": "x"}], "program": {"program": "p", **extra}}, {})
        for i, extra in enumerate([{"branch": "0"}, {"branch": "1"}, {"last": True}])
    ]
    run(backend, spans, *calls)
    *inner, program = exporter.get_finished_spans()
    assert program.name == "sglite.program"
    assert [span.parent.span_id for span in inner] == [program.context.span_id] * 3
    assert program.end_time >= max(span.end_time for span in inner)
    assert sorted(span.attributes["sglite.branch"] for span in inner) == ["", "0", "1"]


def test_a_failure_marks_its_span(backend: Any, spans: Spans, exporter: Any) -> None:
    run(backend, spans, ("/generate", {"text": "a" * 5000}, {}))
    (span,) = exporter.get_finished_spans()
    assert not span.status.is_ok


def test_without_the_library_the_option_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"sglite\[otel\]"):
        open_spans("http://127.0.0.1:4318/v1/traces")
    assert open_spans("") is None


def test_a_json_log_line_names_its_request(call: Call) -> None:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(JsonLines())
    log = logging.getLogger("sglite.server")
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.INFO)
    try:
        call("POST", "/v1/completions", json={"prompt": "secret", "max_tokens": 1}, headers={"x-request-id": "mine"})
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    (line,) = map(json.loads, out.getvalue().splitlines())
    assert (line["request_id"], line["route"], line["status"]) == ("mine", "/v1/completions", 200)
    assert line["level"] == "info"
    assert line["ms"] >= 0
    assert "secret" not in out.getvalue()
    assert request_id.get() is None


def test_log_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="log_format must be one of text, json"):
        ServerConfig(log_format="xml")
