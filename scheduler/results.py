"""Results: launched forwards, and what their results mean for requests."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from engine.batch import Pending
from engine.errors import DeviceLost, EngineError
from scheduler.chunker import Chunk
from scheduler.metrics import SchedulerMetrics
from scheduler.node_policy import AfterPrefill, NodePolicy
from scheduler.req import Req, ReqState
from scheduler.request_table import RequestTable
from wire.messages.rooms import RejectKind
from wire.request import FinishReason, OutputDelta, TokenLogprobs
from wire.stages import RequestStage


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A forward in flight. It samples one token per decoding request, then one per chunk that samples."""

    number: int  # grows by 1 with every launch
    decode: list[Req]
    chunks: list[Chunk]
    pending: Pending


def finish_reason(req: Req, token: int) -> FinishReason | None:
    """Why `token`, the request's latest output, is its last; None when it is not."""
    outputs = len(req.output_ids)
    if req.sampling.is_last(token, outputs - 1):
        return FinishReason.STOP
    if req.prompt_len + outputs >= req.limit_len:
        return FinishReason.LENGTH
    return None


class Results:
    """Takes results in launch order. It alone calls the policy."""

    def __init__(self, requests: RequestTable, policy: NodePolicy, metrics: SchedulerMetrics) -> None:
        self._requests = requests
        self._policy = policy
        self._metrics = metrics
        self._offload_stride = requests.pages.offload_stride
        self.last_launch = 0  # number of the newest launched forward
        self._in_flight: deque[LaunchedStep] = deque()

    @property
    def in_flight(self) -> int:
        """Launched forwards whose results have not been taken."""
        return len(self._in_flight)

    def launched(self, decode: list[Req], chunks: list[Chunk], pending: Pending) -> None:
        """A forward over these decoding requests and chunks is in flight."""
        self.last_launch += 1
        self._in_flight.append(LaunchedStep(self.last_launch, decode, chunks, pending))

    def take(self, timeout_s: float) -> None:
        """Wait for the oldest result; commit KV, report tokens, end requests that are over.

        Raises DeviceLost when it does not come in time. Nothing is freed then: the forward may still write
        to its pages, and no later forward will run. It ends the worker's loop, and the worker is replaced.
        """
        step = self._in_flight.popleft()
        try:
            result = step.pending.result(timeout_s)
        except DeviceLost:
            raise
        except EngineError as error:
            self._requests.pages.deferred.landed(step.number)
            self._fail(step, str(error))
            return
        self._requests.pages.deferred.landed(step.number)
        tokens, logprobs = result.tokens.tolist(), result.logprobs
        failed = {i: (RejectKind.FAILED_ALONE, why) for i, why in result.failures.items()}
        failed |= {i: (RejectKind.INVALID, why) for i, why in result.refusals.items()}
        for i, req in enumerate(step.decode):
            if not self._requests.landed(req):
                self._metrics.surplus_tokens += 1
            elif i in failed:
                self._fail_alone(req, *failed[i])
            else:
                req.kv_committed_len += 1
                self._output(req, tokens[i], logprobs[i])
                self._offload(req)
        sample = len(step.decode)
        for i, chunk in enumerate(step.chunks, start=sample):
            chunk.req.prompt_logprobs += result.scored.get(i, ())
            if i in result.pooled:
                chunk.req.add_hidden(result.pooled[i])
            if i in failed:
                if self._requests.landed(chunk.req):
                    self._fail_alone(chunk.req, *failed[i])
                sample += chunk.samples
            elif not chunk.is_last:
                self._chunk(chunk)
            elif not chunk.samples:
                self._restored(chunk)
            else:
                self._last_chunk(chunk, tokens[sample], logprobs[sample])
                sample += 1

    def _chunk(self, chunk: Chunk) -> None:
        if self._requests.landed(chunk.req):
            self._commit(chunk.req, chunk.end, chunked=True)
            self._policy.on_chunk(chunk.req)

    def _last_chunk(self, chunk: Chunk, token: int, logprobs: TokenLogprobs | None) -> None:
        req = chunk.req
        if self._requests.landed(req):
            req.kv_committed_len = chunk.end
            # The token is reported first, because everything else can wait.
            self._output(req, token, logprobs)
            if req.state is not ReqState.DONE:
                self._commit(req, chunk.end)
                self.prefilled(req, chunk)

    def _restored(self, chunk: Chunk) -> None:
        if self._requests.landed(chunk.req):
            self._commit(chunk.req, chunk.end)
            self.prefilled(chunk.req, chunk)

    def _commit(self, req: Req, end: int, chunked: bool = False) -> None:
        req.kv_committed_len = end
        self._requests.pages.cache_prefix(req, self.last_launch, chunked)
        if req.running_index >= 0:  # the tree may have replaced its pages by equal ones
            self._requests.running.set_pages(req, self._requests.pages.slots(req, end))

    def _offload(self, req: Req) -> None:
        """Every so many tokens the tree gets what was generated, and with it the lower tiers: a long answer
        outlives this worker. A step after the border the state at the border is complete, in its own slot."""
        stride = self._offload_stride
        if stride and (req.kv_committed_len - 1) % stride == 0 and req.state is ReqState.RUNNING:
            self._commit(req, req.kv_committed_len, chunked=True)

    def prefilled(self, req: Req, last: Chunk | None = None) -> None:
        """All of the request's prefill is valid and cached: ask the policy whether it decodes here.

        `last` is the chunk that completed it, None when nothing had to be computed.
        """
        after = self._policy.on_prefilled(req)
        if req.state is ReqState.DONE:
            return
        req.is_kv_only = False
        if after is AfterPrefill.HAND_OFF:
            self._requests.detach(req)
            req.state = ReqState.HANDED_OFF
            if last is not None and req.state_hold is not None:  # a decode step may have replaced the state
                req.state_hold.live, req.state_hold.live_len = last.state_write, last.end
            return
        req.stamp(RequestStage.DECODE_LOOP)
        if req.state is ReqState.PREFILL:  # not in the decode batch yet: readmitted with its token known
            req.state = ReqState.TRANSFERRED
            self._requests.transferred.append(req)

    def _output(self, req: Req, token: int, logprobs: TokenLogprobs | None) -> None:
        req.output_ids.append(token)
        if req.running_index >= 0:
            self._requests.running.learn(req, req.prompt_len + len(req.output_ids) - 1, token)
        self.report(req, None if logprobs is None else [logprobs])

    def report(self, req: Req, logprobs: list[TokenLogprobs] | None) -> None:
        """Report the outputs that have not been reported, and end the request if the last one ends it."""
        start, outputs = req.emitted_len, req.output_ids
        finish = finish_reason(req, outputs[-1]) if outputs else None
        req.emitted_len = len(outputs)
        self._metrics.output_tokens += len(outputs) - start
        scores = None
        if start == 0 and req.request.sampling.prompt_logprobs is not None:
            scores, req.prompt_logprobs = req.prompt_logprobs, []
        pooled = req.pooled() if start == 0 else None
        delta = OutputDelta(outputs[start:], logprobs, finish, prompt_logprobs=scores, pooled=pooled)
        self._policy.on_tokens(req, start, delta)
        if finish is not None and req.state is not ReqState.DONE:
            self._metrics.finished += 1
            self._requests.end(req)

    def _fail(self, step: LaunchedStep, message: str) -> None:
        """Fail the requests of a forward. What it wrote is not valid, so nothing of them enters the tree."""
        for req in (*step.decode, *(chunk.req for chunk in step.chunks)):
            if self._requests.landed(req):
                self.fail(req, RejectKind.FAILED, message)

    def _fail_alone(self, req: Req, why: RejectKind, problem: str) -> None:
        """Fail one request of a forward whose other results are valid."""
        where = f"after {req.prompt_len + len(req.output_ids)} tokens"
        self.fail(req, why, f"room {req.room} failed {where}: {problem}")

    def fail(self, req: Req, why: RejectKind, message: str) -> None:
        """End the request without a result."""
        self._metrics.failed += 1
        self._requests.end(req, is_insert=False)
        self._policy.on_failed(req, why, message)
