"""Frontend: one router replica, made of the product's own parts, and the rooms that it has placed.

The parts are DirectoryClient, GlobalIndex, Admission, Fleet, Placer, RouterPeers and the policy. What the
product's Dispatcher, RoomStream and EventPlane do with sockets (give a room its turn, start it again after a
loss, follow a worker's events) is here without.
"""

from __future__ import annotations

import random
from typing import Protocol

from common.errors import Overloaded
from router.directory.client import DirectoryClient
from router.index.global_index import GlobalIndex
from router.placement.admission import Admission
from router.placement.peers import TELL_AFTER_S, RouterPeers
from router.placement.placer import Placer
from router.placement.policies import make_policy
from router.placement.policy import Choice, PlacementRequest
from simulator.clock import Clock
from simulator.options import SimulationOptions
from simulator.request import Attempt, Request
from simulator.worker import ModelledWorker
from wire.messages import AssignedLoads, View
from wire.records import WorkerRecord


class FrontendHost(Protocol):
    """What a router needs of the rest."""

    def worker(self, record: WorkerRecord) -> ModelledWorker:
        """The life that this record speaks of."""

    def send(self, sender: str, to: str, message: AssignedLoads) -> None:
        """A word to another router."""

    def ended(self, request: Request) -> None:
        """A request is over."""


class Frontend:
    """See the module."""

    def __init__(self, clock: Clock, options: SimulationOptions, number: int, around: FrontendHost) -> None:
        self.index = GlobalIndex()
        self.address = f"router{number}"
        chance = random.Random(f"{options.seed} {self.address}")
        policy = make_policy(options.policy, options.weights, options.prefill_on_decode_tokens, chance)
        self.placer = Placer(
            self.index, policy, options.expect_s, lambda estimate: self.peers.assigned(estimate)
        )
        self.admission = Admission(options.admission, self.placer)
        self.peers = RouterPeers(
            self.placer.fleet, self.address, 0,
            lambda to, message: around.send(self.address, to, message),
            lambda: clock.after(TELL_AFTER_S, self.peers.flush),
        )  # fmt: skip
        self._clock = clock
        self._options = options
        self._host = around
        self._client = DirectoryClient("", lambda _to, _message: None, options.lease_s)
        self._incarnations: dict[str, int] = {}  # whose events are followed
        self._early: dict[tuple[str, int], list[tuple[bool, list[int]]]] = {}
        self._waiting: dict[int, Request] = {}  # in admission's queue
        self._tries: dict[int, Attempt] = {}  # by request
        self._unplaced: list[Request] = []  # nobody is there to take them

    # -- requests --------------------------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """A request comes in: it is refused, or waits for its turn, which may be now."""
        now, wanted = self._clock.now, self._placement_request(request)
        try:
            self.admission.check(1)
            judged = self.admission.judge(wanted, now)
        except Overloaded:
            self._refuse(request)
            return
        self._waiting[request.number] = request
        self.admission.enqueue(request.number, wanted, now)
        self._admit(request.number, judged[0] if judged is not None else None)

    def tick(self) -> None:
        """Time passes."""
        now = self._clock.now
        self.placer.tick(now)
        self.peers.tick(now)
        for number, _ in self.admission.overdue(now):
            self._refuse(self._waiting.pop(number))
        self._admit()

    def _refuse(self, request: Request) -> None:
        request.rejected = True
        self._host.ended(request)

    def _admit(self, fresh: int = -1, choice: Choice | None = None) -> None:
        """Workers for those whose turn it is; `choice` was just made for `fresh`."""
        while (number := self.admission.admit(self._clock.now)) is not None:
            self._place(self._waiting.pop(number), choice if number == fresh else None)

    def _placement_request(self, request: Request) -> PlacementRequest:
        trace = request.trace
        output = self.placer.output_tokens(trace.output_tokens - request.forwarded)
        return PlacementRequest(
            trace.prompt_tokens + request.forwarded, trace.hashes, output,
            trace.session, trace.tenant, trace.priority,
        )  # fmt: skip

    def _place(
        self, request: Request, choice: Choice | None = None, avoid: frozenset[str] = frozenset()
    ) -> None:
        now = self._clock.now
        choice = choice or self.placer.choose(self._placement_request(request), now, avoid)
        if choice is None:
            self._unplaced.append(request)
            return
        placement = self.placer.place(choice, now)
        self.admission.placed(request.number, placement.prefill_tokens)
        prefill = self._host.worker(placement.prefill) if placement.prefill is not None else None
        decode = self._host.worker(placement.decode)
        one = Attempt(
            request, placement, prefill, decode, choice.request.prompt_tokens,
            request.trace.output_tokens - request.forwarded, request.trace.hashes,
        )  # fmt: skip
        if prefill is None:
            one.at_prefill = one.at_decode
        request.tries += 1
        request.prefill = placement.prefill.id if placement.prefill is not None else None
        request.decode = placement.decode.id
        self._tries[request.number] = one
        self._clock.after(self._options.message_s, decode.decode, one)
        if prefill is not None and not placement.hold_prefill:
            self._clock.after(self._options.message_s, prefill.prefill, one)

    # -- what workers say ------------------------------------------------------------------------------

    def reserved(self, one: Attempt) -> None:
        """D has reserved: a prompt that had to wait for it goes out."""
        if not one.over and one.prefill is not None and one.placement.hold_prefill:
            self._clock.after(self._options.message_s, one.prefill.prefill, one)

    def first_token(self, one: Attempt) -> None:
        """The first token of this try came."""
        if one.lost:
            return
        request = one.request
        self.placer.prefilled(one.placement, self._clock.now)
        request.forwarded += 1
        if request.first_at < 0:
            request.first_at = self._clock.now
        if one.output == 1:
            self._end(one)

    def done(self, one: Attempt) -> None:
        """The last token of this try came."""
        if not one.lost:
            one.request.forwarded += one.output - 1
            self._end(one)

    def _end(self, one: Attempt) -> None:
        request = one.request
        one.over = True
        request.last_at = self._clock.now
        del self._tries[request.number]
        self.placer.close(one.placement, self._clock.now)
        self.placer.answered(request.forwarded)
        self.admission.produced(request.number, request.forwarded)
        self.admission.leave(request.number)
        self._host.ended(request)
        self._admit()

    # -- who is there ----------------------------------------------------------------------------------

    def view(self, view: View) -> None:
        """The directory's news."""
        now = self._clock.now
        change = self._client.take(view, now)
        self.placer.update(list(self._client.workers.values()), now)
        self.peers.meet(view.routers)
        for record in change.lost:
            if self._incarnations.pop(record.id, None) is not None:
                self.index.drop(record.id)
            self._lost(record)
        for record in change.joined:
            self.index.join(record.id)
            self._incarnations[record.id] = record.incarnation
            for stored, pages in self._early.pop((record.id, record.incarnation), []):
                self.event(record, stored, pages)
        unplaced, self._unplaced = self._unplaced, []
        for request in unplaced:
            self._place(request)

    def event(self, record: WorkerRecord, stored: bool, pages: list[int]) -> None:
        """A worker's KV event. One from before its View is kept, as the worker's replay buffer would."""
        known = self._incarnations.get(record.id, -1)
        if known == record.incarnation:
            (self.index.store if stored else self.index.remove)(record.id, pages, "GPU")
        elif known < record.incarnation:
            self._early.setdefault((record.id, record.incarnation), []).append((stored, pages))

    def _lost(self, record: WorkerRecord) -> None:
        """A worker is gone: its rooms start again elsewhere, from what was forwarded."""
        for one in [one for one in self._tries.values() if self._needs(one, record)]:
            one.over = one.lost = True
            del self._tries[one.request.number]
            self.placer.close(one.placement, self._clock.now)
            for other in (one.prefill, one.decode):
                if other is not None:
                    self._clock.after(self._options.message_s, other.abort, one)
            self._place(one.request, avoid=frozenset({record.id}))

    def _needs(self, one: Attempt, record: WorkerRecord) -> bool:
        lost = self._host.worker(record)
        return one.decode is lost or (one.prefill is lost and not one.received)
