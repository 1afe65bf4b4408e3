"""TenancyRig: the product's scheduler and cache under a trace of tenants, in virtual time.

The engine computes nothing. A step takes as long as its prompt tokens at a given speed, or the least time of
a step. Everything else is what a colocated worker runs: queues, radix tree, promotion, eviction.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.engine_rig import CountingPolicy
from bench.scheduler import InstantEngine
from bench.tenancy_trace import ANSWER_TOKENS, PAGE_SIZE, VOCABULARY, TenantRequest
from engine.fake import fake_spec
from kvcache.config import CacheConfig
from kvcache.memory import build_memory
from kvcache.shares.config import SharesConfig
from kvcache.tenancy.config import TenancyConfig
from scheduler.config import SchedulerConfig
from scheduler.req import Req, RequestLimits
from scheduler.scheduler import Scheduler
from wire.request import GenerateRequest, OutputDelta, SamplingParams

PREFILL_TOKENS_S = 5000.0
STEP_S = 0.02
_CHUNK = 512
_RUNNING = 16
_CONTEXT = 4096
_SECRET = b"bench.tenancy"  # thresholds are the same in every run


@dataclass(frozen=True)
class Worker:
    """What differs between runs."""

    pool_tokens: int
    tenancy: TenancyConfig = field(default_factory=TenancyConfig)
    one_tenant: bool = False  # everybody is: all is shared
    shares: SharesConfig = field(default_factory=SharesConfig)


def sharing(users: int, epoch_s: float) -> TenancyConfig:
    """K, and the length of an epoch; K = 0: nothing is shared."""
    return TenancyConfig(users, epoch_s, secret=_SECRET)


@dataclass(frozen=True)
class Served:
    """A request and what came of it. Tokens of its prompt, seconds."""

    request: TenantRequest
    cached: int
    ttft_s: float
    foreign: int  # of the cached ones, those that fewer than K tenants, and not this one, had asked before

    @property
    def common_hits(self) -> int:
        """Cached tokens of common texts."""
        return min(self.cached, self.request.common)


class _Firsts(CountingPolicy):
    """Also says whose first token came since the last call of `take`."""

    def __init__(self) -> None:
        super().__init__()
        self._new: list[Req] = []

    def on_tokens(self, req: Req, start: int, delta: OutputDelta) -> None:
        """See CountingPolicy."""
        if start == 0:
            self._new.append(req)
        super().on_tokens(req, start, delta)

    def take(self) -> list[Req]:
        """Requests, in the order of their first tokens."""
        new, self._new = self._new, []
        return new


class _Asked:
    """A model of who may find what: how often each tenant has asked each page."""

    def __init__(self, users: int) -> None:
        self._users = users
        self._times: dict[bytes, Counter[str]] = defaultdict(Counter)

    def add(self, request: TenantRequest) -> None:
        """A request came."""
        for page in request.pages:
            self._times[page][request.tenant] += 1

    def foreign(self, request: TenantRequest, cached: int) -> int:
        """Of a request that came: tokens among the first `cached` that it should not have found."""
        found = request.pages[: cached // PAGE_SIZE]
        return PAGE_SIZE * sum(not self._may_find(request.tenant, page) for page in found)

    def _may_find(self, tenant: str, page: bytes) -> bool:
        times = self._times[page]
        return times[tenant] > 1 or len(times) - 1 >= self._users > 0


class TenancyRig:
    """One worker. `serve` once."""

    def __init__(self, worker: Worker, count_as: int) -> None:
        """`count_as`: the K by which `foreign` is counted."""
        spec = fake_spec(vocab_size=VOCABULARY, max_position=_CONTEXT)
        sizes = CacheConfig(
            total_tokens=worker.pool_tokens,
            max_context_len=_CONTEXT,
            max_running_requests=_RUNNING,
            page_size=PAGE_SIZE,
            tenancy=worker.tenancy,
            shares=worker.shares,
        )
        self._worker = worker
        self._memory = build_memory(sizes, spec.groups)
        self._policy = _Firsts()
        config = SchedulerConfig(
            model="m", max_running_requests=_RUNNING, chunked_prefill_size=_CHUNK, max_prefill_tokens=_CHUNK
        )
        self._scheduler = Scheduler(self._memory, InstantEngine(spec), self._policy, config)
        self._limits = RequestLimits(_CONTEXT, VOCABULARY, ())
        self._asked = _Asked(count_as)

    def serve(self, trace: Sequence[TenantRequest]) -> list[Served]:
        """Answer a trace, in order of `at_s`, to its end."""
        now, coming, served = 0.0, 0, list[Served]()
        while len(served) < len(trace) or not self._scheduler.idle:
            while coming < len(trace) and trace[coming].at_s <= now:
                self._asked.add(trace[coming])
                self._scheduler.add(self._req(coming, trace[coming]))
                coming += 1
            if (promotion := self._memory.promotion) is not None:
                promotion.tick(now)
            if self._scheduler.idle:
                now = trace[coming].at_s
                continue
            before = self._scheduler.metrics.prefill_tokens
            self._scheduler.step()
            computed = self._scheduler.metrics.prefill_tokens - before
            now += max(STEP_S, computed / PREFILL_TOKENS_S)
            served += [self._served(req, trace[req.room - 1], now) for req in self._policy.take()]
        self._scheduler.check_memory()
        return served

    def _served(self, req: Req, request: TenantRequest, now: float) -> Served:
        foreign = self._asked.foreign(request, req.cached_tokens)
        return Served(request, req.cached_tokens, now - request.at_s, foreign)

    def _req(self, number: int, request: TenantRequest) -> Req:
        asked = GenerateRequest(
            request_id=str(number),
            room=number + 1,
            epoch=1,
            prompt=request.prompt.astype("<i4").tobytes(),
            sampling=SamplingParams(max_new_tokens=ANSWER_TOKENS, ignore_eos=True),
            tenant="" if self._worker.one_tenant else request.tenant,
        )
        return Req.from_request(asked, "m", self._limits)
