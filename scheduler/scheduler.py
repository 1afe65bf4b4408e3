"""Scheduler: decides what every forward computes, and who holds which memory.

    schedule      transferred requests join, the decode batch gets its pages, prefill chunks are chosen
    launch        one ForwardBatch goes to the engine
    take result   of this step, or with overlap_depth 1 of the step before, while this one computes

All methods are called on one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Hashable

from engine.batch import Engine
from kvcache.balance import run_through
from kvcache.memory import Memory, MemoryReport
from scheduler.batch_builder import build_batch
from scheduler.budget import BatchAdmission
from scheduler.chunker import Chunk
from scheduler.config import Phase, SchedulerConfig
from scheduler.fetch_table import FetchTable
from scheduler.hand_off import HandOff
from scheduler.load_ahead import LoadAhead
from scheduler.metrics import SchedulerMetrics
from scheduler.node_policy import NodePolicy
from scheduler.pages import Pages
from scheduler.rates import Rates
from scheduler.req import Req, ReqState
from scheduler.request_table import RequestTable
from scheduler.results import Results
from scheduler.retraction import pick_victim
from scheduler.running import RunningBatch
from wire.messages.rooms import RejectKind
from wire.records import WorkerLoad
from wire.stages import RequestStage


class Scheduler:
    """One engine's requests, from `add` (or `hand_off.reserve`) to their last token."""

    def __init__(
        self,
        memory: Memory,
        engine: Engine,
        policy: NodePolicy,
        config: SchedulerConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` measures how long forwards take; it decides nothing."""
        self.config = config
        self.metrics = SchedulerMetrics()
        self._rates = Rates(clock)
        self._engine = engine
        self._memory = memory
        self._pool = memory.req_to_token_pool
        self._pages = Pages(memory, self._rates)
        self._running = RunningBatch(
            config.max_running_requests,
            self._pool.max_context_len,
            memory.page_size,
            memory.config.mamba_track_interval if memory.states is not None else None,
        )
        self._requests = RequestTable(self._pages, self._running)
        self._admission = BatchAdmission(config, self._requests, self.metrics, self._rates)
        self._load_ahead = LoadAhead(self._requests, self._admission)
        self._results = Results(self._requests, policy, self.metrics)
        pre_alloc_rows = max(self._pool.size - config.max_running_requests, 0)
        self.hand_off = HandOff(
            self._requests, self._admission, self._results, self._take_results, pre_alloc_rows
        )
        self.fetches = FetchTable(self._requests, self._admission, self._rates)
        self._ended_early: list[Req] = []  # need no forward; in the queue until the next step answers them

    # -- requests ----------------------------------------------------------------------------------

    def add(self, req: Req, fetch: bool = False) -> None:
        """Queue a request for prefill, or with `fetch` when its fetch is over (scheduler/fetch_table.py). A
        request that can never run is answered in the next step."""
        self._admission.lower_limit(req)
        self._requests.enrol(req)
        req.aim_prefill()
        self.fetches.enter(req, fetch)
        all_forced = bool(req.output_ids) and req.prompt_len + len(req.output_ids) >= req.limit_len
        if self._admission.why_never(req) or all_forced:
            self._ended_early.append(req)

    def abort(self, room: int, epoch: int) -> bool:
        """End a request whose output is not wanted any more. False when `abort` cannot end it.

        It cannot when the request is unknown, over, reserved (a peer may be writing to its pages: see
        `HandOff.cancel_reservation`) or handed off (see `HandOff.release`).
        """
        req = self._requests.live.get((room, epoch))
        if req is None or req.state in (ReqState.RESERVED, ReqState.HANDED_OFF):
            return False
        self._admission.withdraw(req)
        self._requests.end(req)
        self.metrics.aborted += 1
        return True

    def _answer_early(self) -> bool:
        """Answer requests that need no forward: too long, or with all of their output forced."""
        for req in self._ended_early:
            if req.state is ReqState.DONE:
                continue
            why = self._admission.why_never(req)
            if why:
                self._results.fail(req, RejectKind.INVALID, why)
            else:
                self._results.report(req, None)
        answered = bool(self._ended_early)
        self._ended_early.clear()
        return answered

    def close(self) -> None:
        """There is no other step, but the memory may go on: free what waited for a forward or a transfer."""
        self._pages.deferred.free_all()

    # -- the loop ------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Schedule, launch, take a result. Whether anything was done.

        Raises DeviceLost when a forward is stuck. The scheduler is unusable after that (see Results.take).
        """
        moved = self._pages.lower.poll()
        self._pages.deferred.free_unused()
        answered = self._answer_early()
        self._requests.queue_compiled()
        self._join_transferred()
        self._grow_decode()
        chunks, complete = self._admission.next_chunks()
        launched = bool(chunks or len(self._running))
        if launched:
            self._launch(chunks)
        for req in complete:  # after the launch, because the policy may abort any request
            self._results.prefilled(req)
        self._load_ahead.begin()
        taken = self._take_results(self.config.overlap_depth if launched else 0)
        return launched or taken or answered or moved or bool(complete) or self._unblock()

    def _join_transferred(self) -> None:
        """Fill the free places of the batch. One is the queue's head's, if that came first and fits."""
        requests = self._requests

        def following() -> Req | None:
            busy = requests.chunked is not None
            if len(self._running) + busy >= self.config.max_running_requests:
                return None
            return next((req for req in requests.transferred if req.sampling.is_ready), None)

        if (first := following()) is not None:
            self._admission.admit_before(first)
        while (req := following()) is not None:
            requests.transferred.remove(req)
            req.state = ReqState.RUNNING
            req.stamp(RequestStage.DECODE_LOOP)
            self._running.join(req, self._pages.slots(req, req.scheduled_len))

    def _unblock(self) -> bool:
        """Nothing could be done: retract a prefill that waits for window pages, if nothing will free any. No
        forward will; what copies or sends pages ends in bounded time, and then wakes the loop."""
        chunked, pages = self._requests.chunked, self._pages
        if chunked is None or pages.lower.will_free or pages.deferred.pages():
            return False
        self._requests.retract(chunked)
        self.metrics.retracted += 1
        return True

    def _grow_decode(self) -> None:
        """Pages for the tokens that this step decodes. While they are short, requests are retracted."""
        while not self._pages.grow(self._running):
            # A pending result may end a request; and a request that a forward computes cannot be retracted.
            if self._pages.lower.makes_room() or self._take_results(0):
                continue
            chunked = self._requests.chunked
            self._requests.retract(pick_victim([*self._running.reqs, *([chunked] if chunked else [])]))
            self.metrics.retracted += 1

    def _launch(self, chunks: list[Chunk]) -> None:
        running, window = self._running, self._pages.window
        self._rates.launched(len(running), sum(chunk.end - chunk.start for chunk in chunks))
        if running.states is not None:
            self.metrics.checkpoints += running.states.prepare(running.reqs, running.lens[: len(running)])
        table = None if window is None else window.table
        batch = build_batch(running, chunks, self._pool.req_to_token, table)
        for chunk in chunks:  # before the launch: without overlap it returns when the forward is over
            stage = RequestStage.PREFILL_FORWARD if chunk.is_last else RequestStage.PREFILL_CHUNKED_FORWARD
            chunk.req.stamp(stage)
        pending = self._engine.launch(batch)
        decode = self._running.reqs.copy()
        for req in decode:
            req.in_flight += 1
            req.scheduled_len += 1
        self._running.advance()
        for chunk in chunks:
            self._chunk_launched(chunk)
        self._results.launched(decode, chunks, pending)
        self.metrics.launched(len(decode), [chunk.end - chunk.start for chunk in chunks])

    def _chunk_launched(self, chunk: Chunk) -> None:
        req = chunk.req
        req.in_flight += 1
        req.scheduled_len = chunk.end
        decodes = Phase.DECODE in self.config.phases and chunk.samples and chunk.end + 1 < req.limit_len
        if chunk.is_last and decodes:
            req.state = ReqState.RUNNING
            self._running.join(req, self._pages.slots(req, chunk.end))

    def _take_results(self, depth: int) -> bool:
        """Take results until at most `depth` forwards are in flight. Whether there was one to take."""
        taken = False
        while self._results.in_flight > depth:
            self._results.take(self._rates.bound_s(self.config.result_timeout_s))
            self.metrics.forward_seconds.add(self._rates.landed())
            taken = True
        return taken

    # -- views ---------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing. Reserved, paused, handed-off and parked requests wait for someone
        else."""
        requests = self._requests
        return (
            not (
                self._results.in_flight
                or requests.waiting
                or requests.transferred
                or requests.chunked
                or len(self._running)
            )
            and self._pages.lower.is_idle
        )

    @property
    def expected_s(self) -> float:
        """See Rates. Any thread may ask."""
        return self._rates.expected_s

    def load(self) -> WorkerLoad:
        """How busy this worker is."""
        requests, waiting = self._requests, self._requests.waiting
        chunked = requests.chunked
        left = chunked.prefill_len - chunked.scheduled_len if chunked else 0
        early = (*requests.compiling, *requests.fetching)  # not in the queue yet
        tokens = waiting.tokens() + sum(req.prefill_len for req in early)
        return WorkerLoad(
            queued_prefill_tokens=self._rates.to_compute(len(waiting) + len(early), tokens) + left,
            running_requests=requests.count(ReqState.PREFILL, ReqState.RUNNING),
            waiting_requests=len(waiting) + len(requests.transferred) + len(early),
            free_tokens=self._pages.free_tokens(),
            headroom_tokens=self._admission.headroom(),
            headroom_rows=self.hand_off.headroom_rows(),
            prefill_tokens_per_s=self._rates.prefill_tokens_per_s,
            decode_step_s=self._rates.decode_step_s,
            prompts=self.metrics.prompts,
            prefilled_tokens=self.metrics.prefill_tokens,
            decoded_tokens=self.metrics.decode_tokens,
        )

    def spare_window_pages(self) -> int:
        """Window pages that can be had now and are promised to no request; less than 0 if too few can."""
        window = self._pages.window
        return 0 if window is None else window.available_pages() - self._admission.promised().window_pages

    def place(self, req: Req) -> int:
        """How many requests come before this one in the queue that it is in; 0 when it is in none."""
        return self._requests.place(req)

    def check_memory(self) -> MemoryReport:
        """Balance every pool against everything this scheduler holds. Raises OutOfBalance on a leak."""
        return run_through(self.check_slices())

    def check_slices(self) -> Generator[None, None, MemoryReport]:
        """`check_memory` with a `yield` after each bounded part of it; see Memory.check_slices."""
        return self._requests.check_slices()

    def memory_version(self) -> Hashable:
        """See Memory.version."""
        return self._memory.version()
