"""Who is admitted, and how many tokens are prefilled in a step."""

from __future__ import annotations

from scheduler.chunker import Chunk, chunk_end, first_cut
from scheduler.config import Phase, SchedulerConfig
from scheduler.metrics import SchedulerMetrics
from scheduler.pages import Capacity, match_len
from scheduler.rates import Rates
from scheduler.req import Req, ReqState
from scheduler.request_table import RequestTable

CLAIM_STEPS = 64
"""Steps for which a refused reservation keeps younger requests out, unless it is tried again."""


class BatchAdmission:
    """One after another in the order of the queue: a request that does not fit stops all behind it.

    If smaller requests could pass, they would keep the pool full, and a large request could wait for ever.
    Two queues compete for one pool: the scheduler's own, and the reservations (`reserve` is tried until it
    succeeds). A refused reservation therefore leaves a claim, which holds back requests that came later.
    """

    def __init__(
        self, config: SchedulerConfig, requests: RequestTable, metrics: SchedulerMetrics, rates: Rates
    ) -> None:
        self._config = config
        self._requests = requests
        self._pages = requests.pages
        self._metrics = metrics
        self._rates = rates
        self._step_tokens = config.step_tokens(self._pages.page_size)
        self._capacity = self._pages.memory.config.max_context_len
        self._grows = Phase.DECODE in config.phases
        self._blocked: Req | None = None  # head of the queue that did not fit when last tried
        self._claim: Req | None = None  # oldest reservation that did not fit
        self._claim_age = 0

    # -- memory ------------------------------------------------------------------------------------

    def growth(self, req: Req) -> int:
        """Tokens, in whole pages, that the request may still take: its future, capped."""
        if not self._grows or req.state is ReqState.HANDED_OFF:
            return 0
        held = max(req.prefill_len, req.scheduled_len, req.kv_allocated_len)
        more = self._pages.pages_of(self._later(req)) - self._pages.pages_of(held)
        return max(more, 0) * self._pages.page_size

    def _later(self, req: Req) -> int:
        """The length that the context of an admitted request is expected to reach."""
        now = max(req.prefill_len, req.scheduled_len)
        if not self._grows or req.state is ReqState.HANDED_OFF:
            return now
        return max(min(req.limit_len, now + self._config.decode_reserve_tokens), now)

    def window_peak(self, req: Req, length: int, prefills: bool = True) -> int:
        """The most window pages that the request will hold at once while it grows to `length` tokens."""
        window = self._pages.window
        if window is None:
            return 0
        left = req.prefill_len - req.scheduled_len if prefills else 0
        chunk = min(left, self._step_tokens) if self._config.cuts_prompts else left
        # A chunk's first query sees the window before it. In decode one page is taken as one is freed.
        newest = max(self._pages.pages_of(chunk), 1)
        return min(self._pages.pages_of(window.window) + newest, self._pages.pages_of(length))

    def promised(self) -> Capacity:
        """What must stay free for the growth of all admitted requests."""
        tokens = pages = 0
        for req in self._requests.holders():
            tokens += self.growth(req)
            if self._pages.window is not None and req.state is not ReqState.HANDED_OFF:
                peak = self.window_peak(req, self._later(req), req.state is ReqState.PREFILL)
                pages += max(peak - self._pages.window_pages(req), 0)
        return Capacity(tokens, pages)

    def headroom(self) -> int:
        """Tokens that a new reservation can take at once: none while an older one waits for memory."""
        if self._claim is not None and not self._requests.is_alone():
            return 0
        waiting = self._blocked.prefill_len if self._blocked else 0
        return max(self._pages.free_tokens() - self.promised().tokens - waiting, 0)

    def more_requests(self) -> int:
        """How many more reservations there are rows, state slots and windows for."""
        window = self._pages.window
        if window is None:
            return self._pages.more_requests(0, 0)
        return self._pages.more_requests(
            self._pages.pages_of(window.window) + 1, self.promised().window_pages
        )

    def lower_limit(self, req: Req) -> None:
        """Keep the request's output within the longest context that this worker can hold."""
        req.limit_len = min(req.limit_len, self._capacity)

    def why_never(self, req: Req) -> str:
        """Why this worker cannot run the request even if it is alone; "" when it can."""
        known = req.prompt_len + len(req.output_ids)
        if known >= self._capacity:
            return (
                f"the prompt is {known} tokens long and this worker holds contexts of at most "
                f"{self._capacity} tokens, output included"
            )
        peak, window = self.window_peak(req, req.limit_len), self._pages.window
        if window is None or peak <= window.allocator.num_pages:
            return ""
        return (
            f"the prompt is {req.prefill_len} tokens long and needs {peak} pages of window KV at once, "
            f"and this worker has {window.allocator.num_pages}"
        )

    def _spare(self, req: Req, prefills: bool = True, extent: int = 0) -> Capacity:
        """What must stay free beside the slots for the prefill, or for `extent` tokens, for the request to be
        admitted. What `extent` is longer than the prefill is a part of the growth that is taken at once."""
        pages, later = self._pages, self._later(req)
        slack_pages = max(pages.pages_of(extent) - pages.pages_of(req.prefill_len), 0)
        peak = self.window_peak(req, later, prefills) + slack_pages
        peak = min(peak, pages.pages_of(max(later, extent)))
        if self._requests.is_alone():
            return Capacity(0, peak)
        promised = self.promised()
        growth = max(self.growth(req) - slack_pages * pages.page_size, 0)
        return Capacity(promised.tokens + growth, promised.window_pages + peak)

    # -- reservations ------------------------------------------------------------------------------

    def reserve(self, req: Req, slack: int = 0) -> bool:
        """Take memory for a prompt whose KV comes by transfer. All of it may be cached here already. `slack`:
        for how many tokens that may follow it, as far as the request may grow."""
        head = self._requests.waiting.head
        outranked = head is not None and (head.resumed or (head is self._blocked and _before(head, req)))
        extent = self._extent(req, slack)
        spare = self._spare(req, prefills=False, extent=extent)
        if not outranked and self._requests.reservations.reserve(req, spare, extent):
            self.withdraw(req)
            _count_cached(req, self._metrics)
            return True
        if self._claim is None or self._claim is req or _before(req, self._claim):
            self._claim, self._claim_age = req, 0
        return False

    def _extent(self, req: Req, slack: int) -> int:
        """How many tokens to reserve for. The last token of all has no KV. A pool of windows holds at least
        one request's window and chunk, so a slack of a chunk fits in it."""
        if self._pages.window is not None:
            slack = min(slack, self._step_tokens)
        return max(min(req.prefill_len + slack, req.limit_len - 1), req.prefill_len)

    def withdraw(self, req: Req) -> None:
        """The request no longer competes for memory."""
        self._pages.lower.forget(req)
        if self._claim is not None and (self._claim.room, self._claim.epoch) == (req.room, req.epoch):
            self._claim = None
        if self._blocked is req:
            self._blocked = None

    def _admit(self, req: Req) -> bool:
        claim = self._claim
        if claim is not None and not req.resumed and _before(claim, req) and not self._requests.is_alone():
            return False
        if self._pages.take(req, match_len(req), self._spare(req)):
            self._blocked = None
            if not req.resumed:  # of one that has run before most is cached, unlike of those that have not
                self._rates.admitted(req.prefill_len, req.prefill_len - req.scheduled_len)
            self._metrics.prompts += not req.is_kv_only
            _count_cached(req, self._metrics)
            return True
        self._blocked = req
        return False

    # -- the step ----------------------------------------------------------------------------------

    def next_chunks(self) -> tuple[list[Chunk], list[Req]]:
        """The prefill chunks of this step, and the readmitted requests that are cached completely."""
        requests = self._requests
        self._age_claim()
        budget = max(self._step_tokens - len(requests.running), self._pages.page_size)
        chunks: list[Chunk] = []
        complete: list[Req] = []
        while budget > 0:
            req = requests.chunked = requests.chunked or self._admit_next(len(chunks))
            if req is None:
                break
            if req.scheduled_len == req.prefill_len:
                complete.append(req)
                requests.chunked = None
                continue
            chunk = self._next_chunk(req, budget, is_first=not chunks)
            if chunk is None:
                break
            chunks.append(chunk)
            if not chunk.is_last:
                break
            requests.chunked = None
            budget -= chunk.end - chunk.start
        return chunks, complete

    def admit_before(self, transferred: Req) -> None:
        """Admit the head of the queue if it comes before a request that has its KV and waits for a place in
        the batch. If the head does not fit now, the place is left to that request.

        While more requests are transferred than the batch has places for, none would be free for the head.
        """
        requests, head = self._requests, self._requests.waiting.head
        if head is None or requests.chunked is not None or transferred.resumed:
            return
        if head.resumed or _before(head, transferred):
            requests.chunked = self._admit_next(0)

    def _admit_next(self, chunks: int) -> Req | None:
        """Admit the head of the queue. None when it must wait; this step has `chunks` chunks so far."""
        requests = self._requests
        if len(requests.running) + chunks >= self._config.max_running_requests:
            return None
        req = requests.waiting.head
        if req is None or req.in_flight or not self._admit(req):
            return None
        requests.waiting.pop()
        req.state = ReqState.PREFILL
        return req

    def _next_chunk(self, req: Req, budget: int, is_first: bool) -> Chunk | None:
        """The request's next chunk. None when the budget or the window's pages are too small for one."""
        whole = self._end(req, budget, is_first)
        end = first_cut(req.scheduled_len, whole, self._pages.cut_points(req, req.prefill_len))
        if end == req.scheduled_len or not self._pages.extend_window(req, end):
            return None
        self._metrics.cut_forwards += end < whole
        hold = req.state_hold
        slots = (0, 0) if hold is None else hold.prefill(end)
        is_last = end == req.prefill_len
        return Chunk(req, req.scheduled_len, end, is_last, is_last and not req.is_kv_only, *slots)

    def _end(self, req: Req, budget: int, is_first: bool) -> int:
        start, total = req.scheduled_len, req.prefill_len
        if not self._config.cuts_prompts:
            return total if is_first or total - start <= budget else start
        return chunk_end(start, total, budget, self._pages.page_size, self._config.last_chunk_tokens)

    def _age_claim(self) -> None:
        self._claim_age += 1
        if self._claim_age > CLAIM_STEPS:
            self._claim = None


def _before(one: Req, other: Req) -> bool:
    """Whether `one` gets memory before `other`. Priority counts within a tenant only."""
    return one.rank < other.rank if one.tenant == other.tenant else one.rank[1:] < other.rank[1:]


def _count_cached(req: Req, metrics: SchedulerMetrics) -> None:
    if not req.resumed:
        req.cached_tokens = min(req.cache_protected_len, req.prompt_len)
        req.cached_from = req.sources.split(req.cached_tokens)
        metrics.cached_tokens += req.cached_tokens
        metrics.prompt_tokens += req.prompt_len
        metrics.cached_from.update(req.cached_from)
