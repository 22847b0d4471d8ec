"""OpenTelemetry spans: one a request, under one a program. The optional extra ``otel`` brings the library.

A program's span begins with its first call and ends when the program says so, or when it has been idle for a while.
Spans hold counts and times, no text. A client's ``traceparent`` becomes the parent of a request without a program.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglite.errors import ConfigError
from sglite.runtime.server.traces import CallRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Span, TracerProvider

IDLE_SECONDS = 60.0
MAX_OPEN = 1000


@dataclass(slots=True)
class _Program:
    span: Span
    context: Any
    ended: float


class Spans:
    """``add`` is told of every request that ended."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("sglite")
        self._programs: OrderedDict[tuple[str, str], _Program] = OrderedDict()

    def add(self, record: CallRecord, headers: dict[str, str] | None = None) -> None:
        own = record.program == record.request_id
        context = _parent(headers) if own else self._program(record, headers).context
        span: Any = self._tracer.start_span(f"sglite.{record.kind}", context, start_time=_ns(record.began))
        span.set_attributes(_attributes(record))
        if record.finish not in ("stop", "length"):
            _mark_failed(span, record.finish)
        span.end(_ns(record.began + record.wall))
        if record.last and not record.branch:
            self._end((record.namespace, record.program))
        self._end_idle()

    def close(self) -> None:
        """End what is open and send what waits."""
        for key in list(self._programs):
            self._end(key)
        self._provider.shutdown()

    def _program(self, record: CallRecord, headers: dict[str, str] | None) -> _Program:
        from opentelemetry import trace

        key, ended = (record.namespace, record.program), record.began + record.wall
        if key not in self._programs:
            span: Any = self._tracer.start_span("sglite.program", _parent(headers), start_time=_ns(record.began))
            span.set_attribute("sglite.program", record.program)
            self._programs[key] = _Program(span, trace.set_span_in_context(span), ended)
        program = self._programs[key]
        program.ended = max(program.ended, ended)
        self._programs.move_to_end(key)
        return program

    def _end_idle(self) -> None:
        now = time.time()
        while self._programs:
            key, program = next(iter(self._programs.items()))
            if len(self._programs) <= MAX_OPEN and now - program.ended < IDLE_SECONDS:
                return
            self._end(key)

    def _end(self, key: tuple[str, str]) -> None:
        program = self._programs.pop(key, None)
        if program is not None:
            program.span.end(_ns(program.ended))


def open_spans(endpoint: str) -> Spans | None:
    """Spans for an OTLP collector; None without an endpoint. Raises ConfigError where the library is missing."""
    if not endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError("otlp_endpoint needs OpenTelemetry; install it with: pip install 'sglite[otel]'") from None
    provider = TracerProvider(resource=Resource.create({"service.name": "sglite"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return Spans(provider)


def _parent(headers: dict[str, str] | None) -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(headers or {})


def _attributes(record: CallRecord) -> dict[str, str | int | float | bool]:
    usage = record.usage
    return {
        "sglite.request_id": record.request_id,
        "sglite.branch": record.branch,
        "sglite.constrained": record.constrained,
        "sglite.queue_seconds": usage.queue_time,
        "sglite.first_token_seconds": -1.0 if record.ttft is None else record.ttft,
        "sglite.forced_tokens": usage.forced_tokens,
        "sglite.cached_tokens": usage.cached_tokens,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.response.finish_reasons": record.finish,
    }


def _mark_failed(span: Any, why: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, why))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
