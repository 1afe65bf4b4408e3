"""Spans: requests as OpenTelemetry's SDK exports them. Imported only where traces are on."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from itertools import pairwise

from opentelemetry import propagate
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from router.tracing import Attributes
from wire.stages import Stamp

_FLUSH_S = 2.0


class _OpenSpan:
    """Implements RequestSpan."""

    def __init__(self, span: Span) -> None:
        self._span = span
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def end(self, status: int) -> None:
        """See RequestSpan."""
        self._span.set_attribute("http.response.status_code", status)
        if status >= 500:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


class Spans:
    """Implements Tracing. The SDK's own thread exports, and drops what a slow collector does not take."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("baton")

    @classmethod
    def of_environment(cls, exporter: str) -> Spans:
        """As the OTEL_* variables say: sampler, resource, collector, batches. `exporter`: otlp or console."""
        resource = Resource.create()
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "baton"}))
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        chosen = OTLPSpanExporter() if exporter == "otlp" else ConsoleSpanExporter()
        provider.add_span_processor(BatchSpanProcessor(chosen))
        return cls(provider)

    def start(self, name: str, headers: Mapping[str, str], arrived_ns: int) -> _OpenSpan | None:
        """See Tracing."""
        parent = propagate.extract(headers, Context())
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, start_time=arrived_ns)
        return _OpenSpan(span) if span.is_recording() else None

    def stages(
        self, parent: str, name: str, stamps: list[Stamp], ended_ns: int, attributes: Attributes
    ) -> None:
        """See Tracing."""
        if not stamps:
            return
        ordered = sorted(stamps, key=lambda stamp: stamp.at_ns)
        end_ns = max(ended_ns, ordered[-1].at_ns)
        begun = self._tracer.start_span(
            name, _context(parent), start_time=ordered[0].at_ns, attributes=attributes
        )
        within = set_span_in_context(begun, Context())
        for stamp, after_ns in zip(ordered, [b.at_ns for _, b in pairwise(ordered)] + [end_ns], strict=True):
            self._tracer.start_span(stamp.stage, within, start_time=stamp.at_ns).end(after_ns)
        begun.end(end_ns)

    def close(self) -> None:
        """See Tracing. A collector that does not answer holds nobody up."""
        flusher = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        flusher.start()
        flusher.join(_FLUSH_S)


def _context(traceparent: str) -> Context:
    _, trace, span, flags = traceparent.split("-")
    parent = SpanContext(
        int(trace, 16), int(span, 16), is_remote=False, trace_flags=TraceFlags(int(flags, 16))
    )
    return set_span_in_context(NonRecordingSpan(parent), Context())
