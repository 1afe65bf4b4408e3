"""Who is admitted, and how many tokens are prefilled in a step."""

from __future__ import annotations

from scheduler.chunker import Chunk, chunk_end
from scheduler.config import Phase, SchedulerConfig
from scheduler.metrics import SchedulerMetrics
from scheduler.req import Req, ReqState
from scheduler.roster import Roster

CLAIM_STEPS = 64
"""Steps for which a refused reservation keeps younger requests out, unless it is tried again."""


class Admission:
    """First come, first served within a priority: whoever does not fit stops all behind it.

    Letting smaller ones pass would keep the pool filled by them, and a large request could wait for ever. Two
    queues compete for one pool: the scheduler's own, and the policy's reservations (`reserve` is tried until
    it succeeds). A refused reservation therefore leaves a claim that holds back requests that came later.
    """

    def __init__(self, config: SchedulerConfig, roster: Roster, metrics: SchedulerMetrics) -> None:
        self._config = config
        self._roster = roster
        self._pages = roster.pages
        self._metrics = metrics
        self._step_tokens = config.step_tokens(self._pages.page_size)
        self._grows = Phase.DECODE in config.phases
        self._blocked: Req | None = None  # head of the queue that did not fit when last tried
        self._claim: Req | None = None  # oldest reservation that did not fit
        self._claim_age = 0

    # -- memory ------------------------------------------------------------------------------------

    def growth(self, req: Req) -> int:
        """Tokens, in whole pages, that the request may still take: its future, capped."""
        if not self._grows or req.state is ReqState.HANDED_OFF:
            return 0
        now = max(req.prefill_len, req.scheduled_len)
        later = max(min(req.limit_len, now + self._config.decode_reserve_tokens), now)
        held = max(now, req.kv_allocated_len)
        return max(self._pages.pages_of(later) - self._pages.pages_of(held), 0) * self._pages.page_size

    def promised(self) -> int:
        """Tokens that must stay free for the growth of everybody admitted."""
        return sum(map(self.growth, self._roster.holders()))

    def headroom(self) -> int:
        """Tokens that a new reservation can take at once."""
        waiting = self._blocked.prefill_len if self._blocked else 0
        return max(self._pages.free_tokens() - self.promised() - waiting, 0)

    def _take(self, req: Req, match_len: int) -> bool:
        spare = 0 if self._roster.is_alone() else self.promised() + self.growth(req)
        if not self._pages.take(req, match_len, req.prefill_len, spare):
            return False
        if not req.resumed:
            req.cached_tokens = min(req.cache_protected_len, req.prompt_len)
            self._metrics.cached_tokens += req.cached_tokens
        return True

    # -- reservations ------------------------------------------------------------------------------

    def reserve(self, req: Req) -> bool:
        """Room for a prompt that comes by transfer: here the whole of it may be cached already."""
        head = self._roster.waiting.head
        outranked = head is not None and (head.resumed or (head is self._blocked and _before(head, req)))
        if not outranked and self._take(req, req.prefill_len):
            self.withdraw(req)
            return True
        if self._claim is None or self._claim is req or _before(req, self._claim):
            self._claim, self._claim_age = req, 0
        return False

    def withdraw(self, req: Req) -> None:
        """The request no longer competes for memory."""
        if self._claim is not None and (self._claim.room, self._claim.epoch) == (req.room, req.epoch):
            self._claim = None
        if self._blocked is req:
            self._blocked = None

    def _admit(self, req: Req) -> bool:
        claim = self._claim
        if claim is not None and not req.resumed and _before(claim, req) and not self._roster.is_alone():
            return False
        # The last token must be computed to sample the next, unless its successor is known.
        if self._take(req, req.prefill_len if req.is_bare else req.prefill_len - 1):
            self._blocked = None
            return True
        self._blocked = req
        return False

    # -- the step ----------------------------------------------------------------------------------

    def next_chunks(self) -> tuple[list[Chunk], list[Req]]:
        """The prefill chunks of this step, and readmitted requests that turned out to be cached entirely."""
        roster = self._roster
        self._age_claim()
        budget = max(self._step_tokens - len(roster.running), self._pages.page_size)
        chunks: list[Chunk] = []
        complete: list[Req] = []
        while budget > 0:
            req = roster.chunked
            if req is None:
                if len(roster.running) + len(chunks) >= self._config.max_running_requests:
                    break
                req = roster.waiting.head
                if req is None or req.in_flight or not self._admit(req):
                    break
                roster.waiting.pop()
                req.state = ReqState.PREFILL
                if req.scheduled_len == req.prefill_len:
                    complete.append(req)
                    continue
                roster.chunked = req
            end = self._cut(req, budget, is_first=not chunks)
            if end == req.scheduled_len:
                break
            chunk = Chunk(req, req.scheduled_len, end, end == req.prefill_len)
            chunks.append(chunk)
            if not chunk.is_last:
                break
            roster.chunked = None
            budget -= end - chunk.start
        return chunks, complete

    def _cut(self, req: Req, budget: int, is_first: bool) -> int:
        start, total = req.scheduled_len, req.prefill_len
        if not self._config.cuts_prompts:
            return total if is_first or total - start <= budget else start
        cuts = self._pages.cut_points(req, total)
        return chunk_end(start, total, budget, self._pages.page_size, self._config.last_chunk_tokens, cuts)

    def _age_claim(self) -> None:
        self._claim_age += 1
        if self._claim_age > CLAIM_STEPS:
            self._claim = None


def _before(one: Req, other: Req) -> bool:
    """Whether `one` has the better right to memory."""
    return (-one.priority, one.arrival) < (-other.priority, other.arrival)
