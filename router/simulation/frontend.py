"""Frontend: one router replica, made of the product's own parts, and the rooms that it has placed.

The parts are DirectoryClient, GlobalIndex, Fleet, Placer and the policy. What the product's RoomStream and
EventPlane do with sockets (start again after a loss, follow a worker's events) is here without.
"""

from __future__ import annotations

import random
from typing import Protocol

from router.directory_client import DirectoryClient
from router.index import GlobalIndex
from router.placer import Placer
from router.policies import make_policy
from router.policy import Ask
from router.simulation.clock import Clock
from router.simulation.options import SimulationOptions
from router.simulation.request import Request, Try
from router.simulation.worker import Worker
from wire.messages import View
from wire.records import WorkerRecord


class Surroundings(Protocol):
    """What a router needs of the rest."""

    def worker(self, record: WorkerRecord) -> Worker:
        """The life that this record speaks of."""

    def ended(self, request: Request) -> None:
        """A request is over."""


class Frontend:
    """See the module."""

    def __init__(self, clock: Clock, options: SimulationOptions, number: int, around: Surroundings) -> None:
        self.index = GlobalIndex()
        chance = random.Random(f"{options.seed} router {number}")
        policy = make_policy(options.policy, options.weights, options.prefill_on_decode_tokens, chance)
        self.placer = Placer(self.index, policy, options.weights, options.expect_s)
        self._clock = clock
        self._options = options
        self._around = around
        self._client = DirectoryClient("", lambda _to, _message: None, options.lease_s)
        self._incarnations: dict[str, int] = {}  # whose events are followed
        self._early: dict[tuple[str, int], list[tuple[bool, list[int]]]] = {}
        self._tries: dict[int, Try] = {}  # by request
        self._homeless: list[Request] = []

    def arrive(self, request: Request) -> None:
        """A request comes in."""
        self._place(request, frozenset())

    def view(self, view: View) -> None:
        """The directory's news."""
        change = self._client.take(view, self._clock.now)
        self.placer.update(list(self._client.workers.values()), self._clock.now)
        for record in change.lost:
            if self._incarnations.pop(record.id, None) is not None:
                self.index.drop(record.id)
            self._lost(record)
        for record in change.joined:
            self.index.join(record.id)
            self._incarnations[record.id] = record.incarnation
            for stored, pages in self._early.pop((record.id, record.incarnation), []):
                self.event(record, stored, pages)
        homeless, self._homeless = self._homeless, []
        for request in homeless:
            self._place(request, frozenset())

    def tick(self) -> None:
        """Time passes."""
        self.placer.tick(self._clock.now)

    def event(self, record: WorkerRecord, stored: bool, pages: list[int]) -> None:
        """A worker's KV event. One from before its View is kept, as the worker's replay buffer would."""
        known = self._incarnations.get(record.id, -1)
        if known == record.incarnation:
            (self.index.store if stored else self.index.remove)(record.id, pages, "GPU")
        elif known < record.incarnation:
            self._early.setdefault((record.id, record.incarnation), []).append((stored, pages))

    def reserved(self, one: Try) -> None:
        """D has reserved: a prompt that had to wait for it goes out."""
        if not one.over and one.prefill is not None and not one.booking.fits:
            self._clock.after(self._options.message_s, one.prefill.prefill, one)

    def first_token(self, one: Try) -> None:
        """The first token of this try came."""
        if one.over and one.output > 1:
            return
        request = one.request
        self.placer.prefilled(one.booking, self._clock.now)
        request.forwarded += 1
        if request.first_at < 0:
            request.first_at = self._clock.now
        if one.output == 1:
            self._end(one)

    def done(self, one: Try) -> None:
        """The last token of this try came."""
        if not one.over:
            one.request.forwarded += one.output - 1
            self._end(one)

    def _end(self, one: Try) -> None:
        request = one.request
        one.over = True
        request.last_at = self._clock.now
        del self._tries[request.number]
        self.placer.close(one.booking, self._clock.now)
        self.placer.answered(request.forwarded)
        self._around.ended(request)

    def _place(self, request: Request, avoid: frozenset[str]) -> None:
        trace, options = request.trace, self._options
        prompt = trace.prompt_tokens + request.forwarded
        output = trace.output_tokens - request.forwarded
        expected = self.placer.output_tokens(output)
        ask = Ask(prompt, trace.hashes, expected, trace.session, trace.tenant, trace.priority)
        choice = self.placer.choose(ask, self._clock.now, avoid)
        if choice is None:
            self._homeless.append(request)
            return
        booking = self.placer.book(ask, choice, self._clock.now)
        prefill = self._around.worker(choice.prefill) if choice.prefill is not None else None
        one = Try(request, booking, prefill, self._around.worker(choice.decode), prompt, output, trace.hashes)
        if prefill is None:
            one.at_prefill = one.at_decode
        request.tries += 1
        request.prefill, request.decode = booking.prefill, booking.decode
        request.predicted_tokens = booking.hit_tokens
        self._tries[request.number] = one
        self._clock.after(options.message_s, one.decode.decode, one)
        if prefill is not None and booking.fits:
            self._clock.after(options.message_s, prefill.prefill, one)

    def _lost(self, record: WorkerRecord) -> None:
        """A worker is gone: its rooms start again elsewhere, from what was forwarded."""
        for one in [one for one in self._tries.values() if self._needs(one, record)]:
            one.over = True
            del self._tries[one.request.number]
            self.placer.close(one.booking, self._clock.now)
            for other in (one.prefill, one.decode):
                if other is not None:
                    self._clock.after(self._options.message_s, other.abort, one)
            self._place(one.request, frozenset({record.id}))

    def _needs(self, one: Try, record: WorkerRecord) -> bool:
        lost = self._around.worker(record)
        return one.decode is lost or (one.prefill is lost and not one.received)
