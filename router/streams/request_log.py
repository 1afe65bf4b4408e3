"""RequestLog: what is learnt from a request: its timeline, the metrics, the mean length of answers."""

from __future__ import annotations

import time

from router.metrics import RequestMetrics
from router.streams.assignments import Assignment
from router.streams.generation import Generation, Submission
from router.trace import RequestTrace, TraceStore
from wire.stages import RequestStage, Stamp


class RequestLog:
    """Follows one request from its arrival to its end. Implements GenerationObserver."""

    def __init__(self, traces: TraceStore, metrics: RequestMetrics, assignment: Assignment) -> None:
        self._traces = traces
        self._metrics = metrics
        self._assignment = assignment

    def submitted(self, submission: Submission, rooms: list[int]) -> None:
        """The request was taken, and has these rooms."""
        stamps = [
            Stamp(RequestStage.TOKENIZE, submission.arrived_ns),
            Stamp(RequestStage.TOKENIZER_DISPATCH, time.time_ns()),
        ]
        self._traces.open(RequestTrace(submission.request_id, rooms, submission.arrived_ns, stamps))

    def began(self, generation: Generation) -> None:
        """Observe the time to first token."""
        trace = self._traces.get(generation.submission.request_id)
        if trace is not None:
            self._metrics.ttft.observe(trace.begin(time.time_ns()))

    def ended(self, generation: Generation) -> None:
        """Observe the latency, and count tokens."""
        metrics, trace = self._metrics, self._traces.get(generation.submission.request_id)
        if trace is not None:
            metrics.latency.observe(trace.end(time.time_ns()))
            gaps = max((choice.output_tokens for choice in generation.choices), default=0) - 1
            if trace.first_token_ns and gaps > 0:
                metrics.itl.observe((trace.finished_ns - trace.first_token_ns) / 1e9 / gaps)
        if generation.abandoned:
            metrics.aborts.inc()
        else:
            for choice in generation.choices:
                if choice.output_tokens:
                    self._assignment.version.placer.answered(choice.output_tokens)
        metrics.prompt_tokens.inc(generation.prompt_tokens())
        metrics.cached_tokens.inc(generation.cached_tokens())
        metrics.output_tokens.inc(generation.output_tokens())
