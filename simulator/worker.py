"""ModelledWorker: one modelled worker of any role: its prompts, memory, running batch and network.

It does what Baton's workers do. D reserves memory first come, first served, and tells P where to write. P
computes without waiting, chunk by chunk, and ships each chunk once it knows where. A prompt that is computed
before that keeps nothing on P that could not be evicted. A prefill worker has no batch, a decode worker
prefills only what the router gives it alone, and a colocated worker does everything. One class serves all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from simulator.arrivals import Arrivals
from simulator.attempt import Attempt
from simulator.batch import DecodeBatch, ItlHistogram, Steps
from simulator.clock import Clock
from simulator.link import Link
from simulator.memory import WorkerMemory
from simulator.options import Schedule, WorkerModel
from simulator.prompt_queue import PromptQueue
from wire.records import WorkerLoad, WorkerRecord


class WorkerListener(Protocol):
    """What a worker tells its surroundings. Calls come at once; delays of messages are the listener's."""

    def first_token(self, attempt: Attempt) -> None:
        """The prompt is computed."""

    def reserved(self, attempt: Attempt) -> None:
        """D has memory for it."""

    def transferred(self, attempt: Attempt) -> None:
        """All KV of its prompt has been written on D."""

    def done(self, attempt: Attempt) -> None:
        """Its last token is made."""

    def stored(self, worker: ModelledWorker, pages: list[int], medium: str) -> None:
        """Pages are cached in a tier now."""

    def removed(self, worker: ModelledWorker, pages: list[int], medium: str) -> None:
        """Pages are cached there no longer."""


class ModelledWorker:
    """One life of one worker."""

    def __init__(
        self,
        clock: Clock,
        record: WorkerRecord,
        model: WorkerModel,
        listener: WorkerListener,
        itl: ItlHistogram,
    ) -> None:
        self.record = record
        self.dead = False
        self.link = Link(record, model)
        self.memory = WorkerMemory(
            model,
            lambda pages, medium: listener.stored(self, pages, medium),
            lambda pages, medium: listener.removed(self, pages, medium),
        )
        self.arrivals = Arrivals(clock, model, self.memory, self.link, self._kick)
        self.batch = DecodeBatch[Attempt](model, itl)
        self.prefilled_tokens = 0  # computed here so far
        self.prompts = 0  # whose prefill began here
        self._clock = clock
        self._model = model
        self._listener = listener
        self._waiting: deque[Attempt] = deque()  # for memory to decode in
        self._prompts = PromptQueue()
        self._targets: dict[Attempt, ModelledWorker] = {}  # where to ship prompts to
        self._chunk: list[tuple[Attempt, int]] = []
        self.run: Steps | None = None  # steps under way
        self._run_number = 0
        self._planned = 0
        self._leaving: list[tuple[Attempt, Attempt, Callable[[int], None]]] = []

    # -- what others send ----------------------------------------------------------------------------

    def prefill(self, attempt: Attempt, holder: Arrivals | None = None) -> None:
        """The router wants this prompt computed here, and names whom to fetch from."""
        if self.dead or attempt.over:
            return
        self._prompts.push(attempt)
        if holder is not None:  # what it holds comes while the prompt waits
            self.arrivals.bring(attempt, holder)
        self._kick()

    def decode(self, attempt: Attempt, holder: Arrivals | None = None) -> None:
        """The router wants this request decoded here, and prefilled if no other worker does."""
        if self.dead or attempt.over:
            return
        if attempt.alone:
            self.prefill(attempt, holder)
        else:
            self._waiting.append(attempt)
            self._admit()

    def target(self, attempt: Attempt, decode: ModelledWorker) -> None:
        """D has reserved memory: ship the prompt there."""
        if self.dead or attempt.over:
            return
        attempt.reserved = True
        self._targets[attempt] = decode
        if attempt.computed == attempt.prompt and not self.memory.lock_prompt(attempt):
            attempt.started, attempt.asked, attempt.computed = False, False, 0
            self.prefill(attempt)
        elif attempt.computed:
            self._ship(attempt)

    def received(self, attempt: Attempt) -> None:
        """All KV of a prompt has come. What D has of it in other tiers may be on its way."""
        if self.dead or attempt.over:
            return
        if attempt.loaded_at > self._clock.now:
            self._clock.at(attempt.loaded_at, self.received, attempt)
            return
        attempt.received = True
        self.memory.insert(attempt, attempt.prompt)
        _join(self.batch, attempt)
        self._kick()

    def abort(self, attempt: Attempt) -> None:
        """The attempt is over, as its `over` says. What its running chunk uses stays until the chunk ends."""
        if self.dead:
            return
        if attempt in self._waiting:
            self._waiting.remove(attempt)
        elif not any(attempt is other for other, _ in self._chunk):
            self._prompts.remove(attempt)
            self._let_go(attempt)

    def hand_over(self, attempt: Attempt, to: Attempt, then: Callable[[int], None]) -> None:
        """After the present step the attempt goes on as another one, unless that is over. `then` is told how
        many tokens it lacks."""
        self._leaving.append((attempt, to, then))
        self._kick()

    def crash(self) -> list[tuple[Attempt, int]]:
        """The process dies. Returns the attempts that were decoding, with the tokens that they never sent."""
        if self.run is not None and not self._chunk:
            whole = self.run.under_way(self._clock.now) - 1
            if whole:
                self.batch.advance(self.run, whole)
        self.dead = self.arrivals.dead = True
        return self.batch.unfinished()

    def load(self) -> WorkerLoad:
        """How busy it is. Memory for all output is taken with that for the prompt: none of it is free."""
        running, available = len(self.batch), self.memory.cache.available
        return WorkerLoad(
            queued_prefill_tokens=self._prompts.tokens(),
            running_requests=running + len(self._chunk),
            waiting_requests=len(self._prompts) - len(self._chunk) + len(self._waiting),
            free_tokens=available,
            headroom_tokens=0 if self._waiting else available,
            headroom_rows=self.memory.free_rows,
            prefill_tokens_per_s=self._model.prefill_tokens_per_s,
            decode_step_s=self.batch.steps(self._clock.now, 0).first if running else 0.0,
        )

    # -- memory --------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Reserve memory in order of arrival. The first attempt that does not fit holds up the others."""
        while self._waiting and self.memory.reserve(self._waiting[0], self._waiting[0].prompt):
            attempt = self._waiting.popleft()
            found = self.memory.find(attempt, attempt.prompt)
            attempt.loaded_at = self.arrivals.load(found)
            attempt.shipped = found.all * self._model.page_tokens
            self._listener.reserved(attempt)

    def _let_go(self, attempt: Attempt) -> None:
        """The attempt needs nothing here any more."""
        self._targets.pop(attempt, None)
        self.memory.release(attempt)
        self._admit()
        self._kick()

    # -- prompts -------------------------------------------------------------------------------------

    def _start(self, attempt: Attempt) -> bool:
        """Its turn has come: what is cached now need not be computed. Returns False without memory."""
        usable = attempt.prompt - 1  # the last token is always computed
        begin = self.memory.reserve if attempt.alone else self.memory.take
        if not begin(attempt, usable):
            for other in self._prompts:  # they hold what they have brought, and must not hold this one up
                if not other.arriving:
                    self.memory.forget(other)
            if not begin(attempt, usable):
                return False
        attempt.started, attempt.computed = True, self.memory.cached_tokens(attempt)
        attempt.request.cached_tokens = attempt.computed
        self.prompts += 1
        self._prompts.started(attempt)
        return True

    def _take_chunk(self) -> int:
        """Fill the step's chunk from the queue. Returns its tokens. A prompt that waits for memory holds up
        those behind it, but for what has memory already: that of others which arrived before it."""
        budget, is_short = self._model.chunk_tokens, False
        for attempt in self._prompts:
            if is_short and not attempt.started:
                continue
            if not attempt.asked:
                self.arrivals.bring(attempt, None)
            if attempt.arriving:
                continue
            if budget == 0:
                break
            if not (attempt.started or self._start(attempt)):
                is_short = True
                continue
            tokens = min(budget, attempt.left)
            self._chunk.append((attempt, tokens))
            budget -= tokens
        return self._model.chunk_tokens - budget

    def _computed(self, attempt: Attempt, tokens: int) -> None:
        """A chunk of it is done."""
        self.prefilled_tokens += tokens
        if attempt.over:
            self._prompts.remove(attempt)
            self._let_go(attempt)
            return
        attempt.computed += tokens
        self.memory.insert(attempt, attempt.computed)
        if attempt.computed == attempt.prompt:
            self._prompts.remove(attempt)
            self._prefilled(attempt)
        elif attempt.reserved:
            self._ship(attempt)

    def _prefilled(self, attempt: Attempt) -> None:
        """All of the prompt is computed."""
        if not attempt.first_token_sent:
            attempt.first_token_sent, attempt.last_at = True, self._clock.now
            self._listener.first_token(attempt)
        if attempt.alone and attempt.output > 1:
            attempt.received = True
            _join(self.batch, attempt)
        elif attempt.reserved and attempt.output > 1:
            self._ship(attempt)
        else:
            self._let_go(attempt)

    def _ship(self, attempt: Attempt) -> None:
        """Send what is computed and has not been sent."""
        decode = self._targets[attempt]
        tokens = max(0, attempt.computed - attempt.shipped)
        size = tokens * self._model.kv_bytes_per_token
        end, seconds = self.link.send(decode.link, size, self._clock.now)
        attempt.shipped += tokens
        attempt.kv_bytes += size
        attempt.kv_s += seconds
        attempt.request.moved_tokens += tokens
        if attempt.computed == attempt.prompt:
            self._clock.at(end, self._shipped, attempt, decode)

    def _shipped(self, attempt: Attempt, decode: ModelledWorker) -> None:
        if not self.dead:
            self._let_go(attempt)
            self._listener.transferred(attempt)
            decode.received(attempt)

    # -- steps ---------------------------------------------------------------------------------------

    def _kick(self) -> None:
        """Something has changed: begin a step, or end a run of many steps with the one under way."""
        if self.dead:
            return
        if self.run is not None:
            steps = self.run.under_way(self._clock.now) if self._planned > 1 else self._planned
            if steps >= self._planned:
                return
        else:
            rows, tokens = len(self.batch), 0
            if self._prompts and not (self._model.schedule is Schedule.DECODE_FIRST and rows):
                tokens = self._take_chunk()
            if not tokens and not rows:
                return
            self.run = self.batch.steps(self._clock.now, tokens)
            steps = self.run.most
        self._planned = steps
        self._run_number += 1
        self._clock.at(self.run.end(steps), self._ended, self.run, self._run_number)

    def _ended(self, run: Steps, number: int) -> None:
        if self.dead or number != self._run_number:
            return
        done = self.batch.advance(run, self._planned)
        chunk, self._chunk = self._chunk, []
        self._planned = 0  # the changes that follow must not plan: the next step begins after all of them
        for attempt in done:
            self._listener.done(attempt)
            self._let_go(attempt)
        self._hand_over(run)
        for attempt, tokens in chunk:
            self._computed(attempt, tokens)
        self.run = None
        self._kick()

    def _hand_over(self, run: Steps) -> None:
        """Let those go that go on elsewhere. Those that have ended meanwhile have left already."""
        if not run.decodes:
            return
        leaving, self._leaving = self._leaving, []
        for attempt, to, then in leaving:
            lacking = None if to.over else self.batch.leave(attempt)
            if lacking is not None:
                then(lacking)
                self._let_go(attempt)


def _join(batch: DecodeBatch[Attempt], attempt: Attempt) -> None:
    """The attempt has all its KV and one token: decode the others."""
    batch.join(attempt, attempt.prompt + 1, attempt.output - 1, attempt.last_at)
