"""RequestLog: what is learnt from a request: its timeline, the metrics, the mean length of answers."""

from __future__ import annotations

import time

from router.request_metrics import RequestMetrics
from router.streams.assignments import Assignment
from router.streams.generation import ChoiceCounts, Generation, Submission
from router.trace import RequestTrace, TraceStore
from router.tracing import Attributes
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
        self._trace = RequestTrace(
            submission.request_id,
            rooms,
            submission.arrived_ns,
            stamps,
            traceparent=submission.traceparent,
        )
        self._traces.open(self._trace)
        self._gaps = self._metrics.itl.at(submission.model)
        self._first_room = submission.first_room

    def began(self, generation: Generation) -> None:
        """Observe the time to first token."""
        self._metrics.ttft.observe(self._trace.begin(time.time_ns()), generation.submission.model)

    def grew(self, choice: ChoiceCounts) -> None:
        """Observe the time between two tokens."""
        now_ns = time.time_ns()
        if choice.grew_ns:
            self._gaps.observe(max(now_ns - choice.grew_ns, 0) / 1e9)
        choice.grew_ns = now_ns
        self._trace.step(self._first_room + choice.index, now_ns)

    def ended(self, generation: Generation) -> None:
        """Observe the latency, and count tokens."""
        metrics, submission, trace = self._metrics, generation.submission, self._trace
        model = submission.model
        longest = max((choice.output_tokens for choice in generation.choices), default=0)
        metrics.latency.observe(trace.end(time.time_ns()), model)
        if trace.first_token_ns:
            decode_s = (trace.finished_ns - trace.first_token_ns) / 1e9
            metrics.decode.observe(decode_s, model)
            if longest > 1:
                metrics.tpot.observe(decode_s / (longest - 1), model)
        self._traces.ended(trace, _figures(generation, trace) if trace.traceparent else {})
        if generation.abandoned:
            metrics.aborts.inc(1)
        else:
            for choice in generation.choices:
                if choice.output_tokens:
                    self._assignment.version.placer.answered(choice.output_tokens)
        self._count(generation, longest)

    def _count(self, generation: Generation, longest: int) -> None:
        """Of which sizes the request was. `longest`: the output tokens of its longest choice."""
        metrics, submission = self._metrics, generation.submission
        model, prompt, output = submission.model, generation.prompt_tokens(), generation.output_tokens()
        for end in generation.ends:
            metrics.finished.inc(1, model, end)
        metrics.prompt_tokens.inc(prompt, model)
        metrics.cached_tokens.inc(generation.cached_tokens(), model)
        metrics.ended(submission.tenant, prompt, generation.cached_tokens())
        metrics.output_tokens.inc(output, model)
        metrics.prompt_length.observe(prompt, model)
        metrics.output_length.observe(output, model)
        metrics.longest_output.observe(longest, model)
        metrics.choices.observe(submission.n, model)
        metrics.max_tokens.observe(submission.sampling.max_new_tokens, model)


def _figures(generation: Generation, trace: RequestTrace) -> Attributes:
    """In OpenTelemetry's words for language models, as far as it has any."""
    submission = generation.submission
    figures: dict[str, str | int | float] = {
        "gen_ai.request.model": submission.model,
        "gen_ai.response.id": submission.request_id,
        "gen_ai.request.choice.count": submission.choice_count,
        "gen_ai.usage.input_tokens": generation.prompt_tokens(),
        "gen_ai.usage.output_tokens": generation.output_tokens(),
        "baton.cached_tokens": generation.cached_tokens(),
        "baton.ends": ",".join(generation.ends),
    }
    if trace.first_token_ns:
        figures["baton.ttft_seconds"] = (trace.first_token_ns - trace.arrived_ns) / 1e9
    return figures
