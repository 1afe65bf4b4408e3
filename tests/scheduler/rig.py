"""A scheduler over real memory and the fake engine, with checks of memory and output after every step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from engine.batch import BatchResult, Engine, ForwardBatch, Pending
from engine.fake import FakeEngine, FakeTiming, fake_generate, fake_spec
from engine.spec import ModelSpec
from kvcache.config import MIN_STATE_SLOTS, CacheConfig
from kvcache.memory import Memory, build_memory
from kvcache.tiers.config import TierConfig
from kvcache.tiers.mover import WorkQueue
from scheduler.config import SchedulerConfig
from scheduler.node_policy import AfterPrefill
from scheduler.req import Req, RequestLimits
from scheduler.scheduler import Scheduler
from tests.support.late_device import LateDevice, LateEngine
from wire.messages.rooms import RejectKind
from wire.request import FinishReason, GenerateRequest, OutputDelta, SamplingParams, TokenLogprobs

VOCAB = 499
EOS = tuple(range(5, VOCAB, 12))
"""So many that random output soon contains one."""
DEFAULT = SchedulerConfig(model="m", max_running_requests=8)


class Recorder:
    """A NodePolicy that records its calls, and fails if a token is reported twice or out of order."""

    def __init__(self, after: AfterPrefill = AfterPrefill.DECODE) -> None:
        self.after = after
        self.outputs: dict[int, list[int]] = {}
        self.finished: dict[int, FinishReason] = {}
        self.failed: dict[int, tuple[RejectKind, str]] = {}
        self.prefilled: list[Req] = []
        self.chunk_ends: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[TokenLogprobs]] = {}

    def on_chunk(self, req: Req) -> None:
        assert len(req.prefix_indices) == req.kv_committed_len
        self.chunk_ends.setdefault(req.room, []).append(req.kv_committed_len)

    def on_prefilled(self, req: Req) -> AfterPrefill:
        self.prefilled.append(req)
        return self.after

    def on_tokens(self, req: Req, start: int, delta: OutputDelta) -> None:
        assert req.room not in self.finished, "tokens after the last"
        known = self.outputs.setdefault(req.room, list(req.request.forced))
        assert start == len(known), "a token was lost or came twice"
        known.extend(delta.tokens)
        if delta.logprobs is not None:
            assert len(delta.logprobs) == len(delta.tokens)
            self.logprobs.setdefault(req.room, []).extend(delta.logprobs)
        if delta.finish is not None:
            self.finished[req.room] = delta.finish

    def on_failed(self, req: Req, why: RejectKind, message: str) -> None:
        assert req.room not in self.failed
        self.failed[req.room] = (why, message)


@dataclass
class StubReader:
    """A PageReader that has read its pages, which are of the full group, when the test says so."""

    idle: bool = False
    reads: list[int] = field(default_factory=list)
    aborted: str = ""

    def abort(self, reason: str) -> None:
        self.aborted = reason


@dataclass
class _Watched:
    """A Pending that reports when its pages are no longer in use."""

    pending: Pending
    failures: dict[int, str]
    landed: Callable[[], None]

    def result(self, timeout_s: float) -> BatchResult:
        try:
            return replace(self.pending.result(timeout_s), failures=self.failures)
        finally:
            self.landed()


class WatchedEngine:
    """An Engine that records which pages launched forwards touch, and can be made to fail."""

    def __init__(self, inner: Engine, window: int, page_size: int) -> None:
        self.inner = inner
        self.window, self.page_size = window, page_size
        self.spec: ModelSpec = inner.spec
        self.in_flight: dict[int, dict[str, set[int]]] = {}
        self.launches = 0
        self.batches: list[ForwardBatch] = []
        self.fail_launch: int | None = None
        self.bad_rows: set[int] = set()  # req_to_token rows whose sequences fail alone

    def launch(self, batch: ForwardBatch) -> Pending:
        self.launches += 1
        number = self.launches
        if number == self.fail_launch:  # pages beyond any pool: the forward raises
            batch = replace(batch, out_slots=batch.out_slots + 10**9)
        self.in_flight[number] = touched(batch, self.window, self.page_size)
        self.batches.append(batch)
        failures = {i: "not finite" for i, row in enumerate(batch.rows.tolist()) if row in self.bad_rows}
        landed = lambda: self.in_flight.pop(number, None) and None  # noqa: E731
        return _Watched(self.inner.launch(batch), failures, landed)

    def close(self) -> None:
        self.inner.close()


def touched(batch: ForwardBatch, window: int, page_size: int) -> dict[str, set[int]]:
    """Pages and slots, by group, that a forward reads or writes."""
    pages = {"full": set(batch.page_table.ravel().tolist()) - {0}}
    if batch.window is not None:
        firsts = np.maximum(0, batch.seq_lens - batch.q_lens - window + 1) // page_size
        seen = np.arange(batch.window.page_table.shape[1]) >= firsts[:, None]
        pages["window"] = set(batch.window.page_table[seen].tolist()) - {0}
    if batch.state is not None:
        pages["state"] = {*batch.state.reads.tolist(), *batch.state.writes.tolist()} - {0}
    return pages


GROUPS: tuple[tuple[str, ...], ...] = ((), ("window",), ("state",), ("window", "state"))
"""The kinds of groups that a model may have beside full attention, in every combination."""


@dataclass
class Rig:
    """One worker's scheduler. `expected` is the output that each room must end with.

    `tight` gives the groups beside the full one as little memory as one request can live with; `interval` is
    the tokens between a decoding request's checkpoints.
    """

    page_size: int = 16
    pool_tokens: int = 1024
    max_context: int = 256
    pre_alloc: int = 0
    engine_overlap: bool = False
    config: SchedulerConfig = DEFAULT
    after: AfterPrefill = AfterPrefill.DECODE
    eos: tuple[int, ...] = ()
    timing: FakeTiming | None = None
    prefix_cache: str = "radix"
    groups: tuple[str, ...] = ()
    window: int = 40
    interval: int = 32
    tight: bool = False
    state_slots: int | None = None  # more than `tight` gives
    eviction_policy: str = "lru"
    clock: Callable[[], float] = time.monotonic
    tiers: TierConfig = field(default_factory=TierConfig)
    mover: WorkQueue | None = None
    device: LateDevice | None = None  # computes the forwards when they are waited for, not at launch

    def __post_init__(self) -> None:
        spec = fake_spec(VOCAB, self.max_context, self.eos, self.groups, self.window)
        self.memory: Memory = build_memory(
            CacheConfig(
                page_size=self.page_size,
                total_tokens=self.pool_tokens,
                max_running_requests=self.config.max_running_requests,
                max_context_len=min(self.max_context, self.pool_tokens),
                pre_alloc_size=self.pre_alloc,
                prefix_cache=self.prefix_cache,
                window_tokens=self.smallest_window() * self.page_size if self.tight else None,
                max_chunk_tokens=self._chunk_tokens(),
                state_slots=self.state_slots or (MIN_STATE_SLOTS if self.tight else None),
                eviction_policy=self.eviction_policy,
                mamba_track_interval=self.interval,
                tiers=self.tiers,
            ),
            spec.groups,
            self.mover,
        )
        self.pool = self.memory.kv_caches[self.memory.specs[0].name]
        overlap = self.engine_overlap and self.device is None
        engine = FakeEngine(spec, self.memory.kv_caches, self.timing, overlap)
        queued = engine if self.device is None else LateEngine(engine, self.device, self.engine_overlap)
        self.engine = WatchedEngine(queued, self.window, self.page_size)
        self.policy = Recorder(self.after)
        self.scheduler = Scheduler(self.memory, self.engine, self.policy, self.config, self.clock)
        self.limits = RequestLimits(10_000, VOCAB, self.eos)
        self.expected: dict[int, list[int]] = {}
        self.rooms = 0

    def _chunk_tokens(self) -> int | None:
        return self.config.step_tokens(self.page_size) if self.config.cuts_prompts else None

    def smallest_window(self) -> int:
        """Pages that one request needs: its window, its chunk, and a page where each begins and ends."""
        longest = min(self.max_context, self.pool_tokens)
        both = self.window + (self._chunk_tokens() or longest)
        return min(-(-both // self.page_size) + 2, -(-longest // self.page_size))

    def req(
        self,
        prompt: Sequence[int],
        max_new: int = 8,
        forced: int = 0,
        priority: int = 0,
        arrived_ns: int = 0,
        tenant: str = "",
        **sampling: object,
    ) -> Req:
        """A request whose outputs are known; the first `forced` of them are given as input."""
        self.rooms += 1
        params = SamplingParams(max_new_tokens=max_new, **sampling)  # type: ignore[arg-type]
        outputs = fake_generate(prompt, max_new, VOCAB, self.groups, self.window)
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.eos))
        for i, token in enumerate(outputs):
            if token in stops and i >= max(params.min_tokens, forced):
                outputs = outputs[: i + 1]
                break
        self.expected[self.rooms] = outputs
        request = GenerateRequest(
            request_id=str(self.rooms),
            room=self.rooms,
            epoch=1,
            prompt=np.asarray(prompt, dtype="<i4").tobytes(),
            sampling=params,
            forced=tuple(outputs[:forced]),
            priority=priority,
            arrived_ns=arrived_ns,
            tenant=tenant,
        )
        return Req.from_request(request, "m", self.limits)

    def add(self, prompt: Sequence[int], max_new: int = 8, **more: object) -> Req:
        req = self.req(prompt, max_new, **more)  # type: ignore[arg-type]
        self.scheduler.add(req)
        return req

    def step(self) -> bool:
        worked = self.scheduler.step()
        self.check()
        return worked

    def check(self) -> None:
        """Every pool balances, and no page is free that a launched forward touches."""
        self.scheduler.check_memory()
        for name, allocator in self.memory.allocators.items():
            free = set(allocator.free_pages.tolist())
            for pages in self.engine.in_flight.values():
                assert not free & pages[name], f"a {name} page is free while a launched forward can touch it"

    def run(self, limit: int = 5000) -> int:
        """Step until idle. Returns the number of steps."""
        steps = 0
        while not self.scheduler.idle:
            assert self.step(), "a step did nothing though the scheduler is not idle"
            steps += 1
            assert steps < limit, "no end in sight"
        return steps

    def assert_outputs(self, *skip: int) -> None:
        """Every room but `skip` has finished with the expected output."""
        for room, tokens in self.expected.items():
            if room not in skip:
                assert self.policy.outputs.get(room) == tokens, f"room {room}"
                assert room in self.policy.finished

    def close(self) -> None:
        """Nothing may be held any more; the engine's thread ends."""
        self.check()
        memory = self.memory
        report_free = memory.primary.available_pages() * memory.page_size
        assert report_free == memory.total_tokens, "something is still held or locked"
        if memory.swa is not None:
            assert memory.swa.available_pages() == memory.swa.allocator.num_pages, "a window is still held"
        if memory.states is not None:
            assert memory.states.available_pages() == memory.states.allocator.num_pages, (
                "a state is still held"
            )
        assert self.memory.req_to_token_pool.available_size() == self.memory.req_to_token_pool.size
        self.engine.close()
        self.memory.close()
