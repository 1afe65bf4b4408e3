"""ModelledWorker: one modelled worker of any role. Queue of prompts, memory, running batch, network.

It does what Baton's workers do: D reserves memory first come first served and tells P where to write; P
computes without waiting, chunk by chunk, and ships each chunk once it knows where; a prompt that is done
before that keeps nothing on P that could not be evicted. A prefill worker has no batch, a decode worker
prefills only what the router gives it alone, a colocated one does everything; it is one class.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from typing import Protocol

import msgspec

from simulator.batch import DecodeBatch, ItlHistogram, Steps
from simulator.cache import PrefixCache
from simulator.clock import Clock
from simulator.link import Link
from simulator.options import Schedule, WorkerModel
from simulator.request import Attempt, AttemptMemory
from wire.records import WorkerLoad, WorkerRecord

_KEPT = 1 - 1 / 32  # of earlier prompts, with each new one, as in the product's workers


class WorkerListener(Protocol):
    """What a worker tells its surroundings, at once: messages take their time there."""

    def first_token(self, one: Attempt) -> None:
        """The prompt is computed."""

    def reserved(self, one: Attempt) -> None:
        """D has memory for it."""

    def done(self, one: Attempt) -> None:
        """Its last token is out."""

    def stored(self, worker: ModelledWorker, pages: list[int]) -> None:
        """Pages are cached now."""

    def removed(self, worker: ModelledWorker, pages: list[int]) -> None:
        """Pages are cached no longer."""


class ModelledWorker:
    """One life of one worker."""

    def __init__(
        self,
        clock: Clock,
        record: WorkerRecord,
        model: WorkerModel,
        listener: WorkerListener,
        gaps: ItlHistogram,
    ) -> None:
        self.record = record
        self.dead = False
        self.link = Link(model.link_bytes_per_s)
        self.cache = PrefixCache(
            model.kv_tokens, model.page_tokens,
            lambda pages: listener.stored(self, pages), lambda pages: listener.removed(self, pages),
        )  # fmt: skip
        self.batch = DecodeBatch(model, gaps)
        self.prefilled_tokens = 0  # computed here so far
        self._clock = clock
        self._model = model
        self._listener = listener
        self._waiting: deque[Attempt] = deque()  # for memory
        self._reservations = 0
        self._queue: list[tuple[int, int, Attempt]] = []  # prompts by (urgency, arrival)
        self._queued = 0
        self._queued_tokens = 0  # of prompts not started, what they need if nothing is cached
        self._prompts_lately = 0.0  # tokens of prompts that were begun, fading
        self._computed_lately = 0.0  # of them, those that were not cached
        self._chunk: list[tuple[Attempt, int]] = []
        self._run: Steps | None = None
        self._run_number = 0
        self._planned = 0

    # -- what others send ----------------------------------------------------------------------------

    def prefill(self, one: Attempt) -> None:
        """The router wants this prompt computed here."""
        if self.dead or one.over:
            return
        self._enqueue(one)
        self._kick()

    def decode(self, one: Attempt) -> None:
        """The router wants this request decoded here, and prefilled if nobody else does."""
        if self.dead or one.over:
            return
        if one.prefill is None:
            self._enqueue(one)
            self._kick()
        else:
            self._waiting.append(one)
            self._admit()

    def target(self, one: Attempt) -> None:
        """D has told where to write."""
        if self.dead or one.over:
            return
        one.reserved = True
        if one.computed == one.prompt and not self._keep_again(one):
            one.started, one.computed = False, 0
            self._enqueue(one)
            self._kick()
        elif one.computed:
            self._ship(one)

    def received(self, one: Attempt) -> None:
        """All KV of a prompt has come."""
        if self.dead or one.over:
            return
        one.received = True
        self._cache(one, one.at_decode, len(one.hashes))
        self.batch.join(one, one.output - 1)
        self._kick()

    def abort(self, one: Attempt) -> None:
        """That try is over, and `over` says so already. What its running chunk uses stays until it ends."""
        if self.dead:
            return
        if one in self._waiting:
            self._waiting.remove(one)
        elif not any(one is other for other, _ in self._chunk):
            self._dequeue(one)
            self._let_go(one, one.at_decode if one.decode is self else one.at_prefill)

    def crash(self) -> list[tuple[Attempt, int]]:
        """The process dies. Returns the tries that were decoding, with the tokens that they never sent."""
        if self._run is not None and not self._chunk:
            whole = self._run.under_way(self._clock.now) - 1
            if whole:
                self.batch.advance(self._run, whole)
        self.dead = True
        return self.batch.unfinished()

    # -- what it says of itself ----------------------------------------------------------------------

    def reported(self) -> WorkerRecord:
        """Its record as of now."""
        return msgspec.structs.replace(self.record, load=self.load())

    def load(self) -> WorkerLoad:
        """How busy it is. As the product's workers do, it takes waiting prompts to be as cached as the last
        ones: they are matched when their turn comes."""
        running = len(self.batch)
        return WorkerLoad(
            queued_prefill_tokens=self._left_to_prefill(),
            running_requests=running + len(self._chunk),
            waiting_requests=len(self._queue) - len(self._chunk) + len(self._waiting),
            free_tokens=self.cache.available,
            headroom_tokens=0 if self._waiting else self.cache.available,
            headroom_rows=max(0, self._model.max_running - self._reservations),
            prefill_tokens_per_s=self._model.prefill_tokens_per_s,
            decode_step_s=self.batch.steps(self._clock.now, 0).first if running else 0.0,
        )

    def _left_to_prefill(self) -> int:
        share = self._computed_lately / self._prompts_lately if self._prompts_lately else 1.0
        waiting = sum(not one.started for _, _, one in self._queue)
        started = sum(one.left for _, _, one in self._queue if one.started)
        return max(waiting, round(share * self._queued_tokens)) + started

    # -- memory --------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Reserve for those who wait, in order; the first one that does not fit holds up the rest."""
        while self._waiting and self._reserve(self._waiting[0], self._waiting[0].prompt):
            one = self._waiting.popleft()
            one.shipped = one.at_decode.pages * self.cache.page
            self._listener.reserved(one)

    def _reserve(self, one: Attempt, usable: int) -> bool:
        """Memory for a request with all its output, of whose prompt so many tokens may be cached."""
        if self._reservations == self._model.max_running:
            return False
        if not self._take(one, one.at_decode, one.prompt + one.output, usable):
            return False
        self._reservations += 1
        return True

    def _take(self, one: Attempt, hold: AttemptMemory, tokens: int, usable: int) -> bool:
        """Memory for a request: cached pages among its first `usable` tokens, new memory for the rest."""
        hashes = one.hashes[: usable // self.cache.page]
        matched = hashes[: self.cache.match(hashes)]
        self.cache.lock(matched)
        rest = tokens - len(matched) * self.cache.page
        if not self.cache.hold(rest):
            self.cache.unlock(matched)
            return False
        hold.pages, hold.tokens = len(matched), rest
        return True

    def _cache(self, one: Attempt, hold: AttemptMemory, pages: int) -> None:
        """Its leading pages so far become cached."""
        new = one.hashes[hold.pages : pages]
        self.cache.insert(new)
        hold.tokens -= len(new) * self.cache.page
        hold.pages += len(new)

    def _let_go(self, one: Attempt, hold: AttemptMemory) -> None:
        """It needs nothing here any more."""
        if hold is one.at_decode and (hold.pages or hold.tokens):
            self._reservations -= 1
        self.cache.unlock(one.hashes[: hold.pages])
        self.cache.release(hold.tokens)
        hold.pages = hold.tokens = 0
        self._admit()
        self._kick()

    def _keep_again(self, one: Attempt) -> bool:
        """A prompt that was computed before D had room: is all of it still there?"""
        if self.cache.match(one.hashes) < len(one.hashes):
            return False
        self.cache.lock(one.hashes)
        one.at_prefill.pages = len(one.hashes)
        return True

    # -- prompts -------------------------------------------------------------------------------------

    def _enqueue(self, one: Attempt) -> None:
        self._queued += 1
        insort(self._queue, (-one.request.trace.priority, self._queued, one))
        self._queued_tokens += one.prompt

    def _dequeue(self, one: Attempt) -> bool:
        for at, entry in enumerate(self._queue):
            if entry[2] is one:
                del self._queue[at]
                if not one.started:
                    self._queued_tokens -= one.prompt
                return True
        return False

    def _start(self, one: Attempt) -> bool:
        """Its turn has come: what is cached now need not be computed. False while there is no memory."""
        usable = one.prompt - 1  # the last token is always computed
        if one.prefill is None:
            begun = self._reserve(one, usable)
        else:
            begun = self._take(one, one.at_prefill, one.prompt, usable)
        if not begun:
            return False
        one.started = True
        self._queued_tokens -= one.prompt
        one.computed = one.at_prefill.pages * self.cache.page
        one.request.cached_tokens = one.computed
        self._prompts_lately = _KEPT * self._prompts_lately + one.prompt
        self._computed_lately = _KEPT * self._computed_lately + one.left
        return True

    def _take_chunk(self) -> int:
        """Fill the step's chunk from the queue. Returns its tokens."""
        budget = self._model.chunk_tokens
        for _, _, one in self._queue:
            if budget == 0 or not (one.started or self._start(one)):
                break
            tokens = min(budget, one.prompt - one.computed)
            self._chunk.append((one, tokens))
            budget -= tokens
        return self._model.chunk_tokens - budget

    def _computed(self, one: Attempt, tokens: int) -> None:
        """A chunk of it is done."""
        self.prefilled_tokens += tokens
        if one.over:
            self._dequeue(one)
            self._let_go(one, one.at_prefill)
            return
        one.computed += tokens
        self._cache(one, one.at_prefill, one.computed // self.cache.page)
        if one.computed == one.prompt:
            self._dequeue(one)
            self._prefilled(one)
        elif one.reserved:
            self._ship(one)

    def _prefilled(self, one: Attempt) -> None:
        if not one.told:
            one.told, one.last_at = True, self._clock.now
            self._listener.first_token(one)
        if one.output == 1:
            self._let_go(one, one.at_prefill)
            if one.prefill is not None:
                one.over = True
                one.decode.abort(one)
        elif one.prefill is None:
            one.received = True
            self.batch.join(one, one.output - 1)
        elif one.reserved:
            self._ship(one)
        else:
            self._let_go(one, one.at_prefill)

    def _ship(self, one: Attempt) -> None:
        """Send what is computed and has not been sent."""
        tokens = max(0, one.computed - one.shipped)
        end = self.link.send(one.decode.link, tokens * self._model.kv_bytes_per_token, self._clock.now)
        one.shipped += tokens
        one.request.moved_tokens += tokens
        if one.computed == one.prompt:
            self._clock.at(end, self._shipped, one)

    def _shipped(self, one: Attempt) -> None:
        if not self.dead:
            self._let_go(one, one.at_prefill)
            one.decode.received(one)

    # -- steps ---------------------------------------------------------------------------------------

    def _kick(self) -> None:
        """Something has changed: begin a step, or end a run of many with the one under way."""
        if self.dead:
            return
        if self._run is None:
            self._begin()
        elif self._planned > 1:
            steps = self._run.under_way(self._clock.now)
            if steps < self._planned:
                self._plan(steps)

    def _begin(self) -> None:
        schedule, rows = self._model.schedule, len(self.batch)
        tokens = 0
        if self._queue and not (schedule is Schedule.DECODE_FIRST and rows):
            tokens = self._take_chunk()
        if not tokens and not rows:
            return
        self._run = self.batch.steps(self._clock.now, tokens)
        self._plan(self._run.most)

    def _plan(self, steps: int) -> None:
        assert self._run is not None
        self._planned = steps
        self._run_number += 1
        self._clock.at(self._run.end(steps), self._ended, self._run_number)

    def _ended(self, number: int) -> None:
        if self.dead or number != self._run_number:
            return
        assert self._run is not None
        done = self.batch.advance(self._run, self._planned)
        chunk, self._chunk = self._chunk, []
        self._planned = 0  # what follows changes much: the next step begins once all of it has
        for one in done:
            self._listener.done(one)
            self._let_go(one, one.at_decode)
        for one, tokens in chunk:
            self._computed(one, tokens)
        self._run = None
        self._kick()
