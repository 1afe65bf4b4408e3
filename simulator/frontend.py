"""Frontend: one router replica, made of the product's own parts, and the attempts that it has placed.

The parts are DirectoryClient, GlobalIndex, Admission, Fleet, Placer, RouterPeers and the policy. What the
product's Dispatcher, RoomStream and EventPlane do with sockets is modelled here without them: give a room its
turn, start it again after a loss, follow a worker's events.
"""

from __future__ import annotations

import random
from typing import NamedTuple, Protocol

from common.errors import Overloaded
from router.directory.client import DirectoryClient
from router.index.global_index import GlobalIndex
from router.placement.admission import Admission
from router.placement.peers import TELL_AFTER_S, RouterPeers
from router.placement.placer import Placer
from router.placement.policies import make_policy
from router.placement.policy import Choice, PlacementRequest
from simulator.arrivals import Arrivals
from simulator.attempt import Attempt
from simulator.clock import Clock
from simulator.moves import ModelledMoves
from simulator.options import SimulationOptions
from simulator.request import Request
from simulator.worker import ModelledWorker
from wire.messages.directory import View
from wire.messages.routers import AssignedLoads
from wire.records import WorkerRecord

_BACKEND = ""  # modelled workers offer none by name


class PagesMoved(NamedTuple):
    """A worker's KV event: pages were stored in the tier of that medium, or removed from it."""

    stored: bool
    pages: list[int]
    medium: str


class FrontendHost(Protocol):
    """What a router needs of its surroundings."""

    def worker(self, record: WorkerRecord) -> ModelledWorker:
        """The worker with this id and incarnation."""

    def send(self, sender: str, to: str, message: AssignedLoads) -> None:
        """Send a message to another router."""

    def ended(self, request: Request) -> None:
        """A request is over."""


class Frontend:
    """Takes requests, and hears from workers, as a router does."""

    def __init__(self, clock: Clock, options: SimulationOptions, number: int, host: FrontendHost) -> None:
        self.index = GlobalIndex()
        self.address = f"router{number}"
        chance = random.Random(f"{options.seed} {self.address}")
        alone_tokens, peer_fetch = options.prefill_on_decode_tokens, options.peer_fetch
        policy = make_policy(options.policy, options.weights, alone_tokens, chance, peer_fetch)
        self.placer = Placer(
            self.index, policy, options.expect_s, lambda estimate: self.peers.assigned(estimate)
        )
        self.admission = Admission(options.admission, self.placer)
        self.peers = RouterPeers(
            self.placer.fleet, self.address, 0,
            lambda to, message: host.send(self.address, to, message),
            lambda: clock.after(TELL_AFTER_S, self.peers.flush),
        )  # fmt: skip
        self._clock = clock
        self._options = options
        self._host = host
        self._client = DirectoryClient("", lambda _to, _message: None)
        self._incarnations: dict[str, int] = {}  # of the workers whose events are followed
        self._early_events: dict[tuple[str, int], list[PagesMoved]] = {}
        self._waiting: dict[int, Request] = {}  # in admission's queue
        self._attempts: dict[int, Attempt] = {}  # by request
        self._unplaced: list[Request] = []  # no worker was there to take them
        self._moves = ModelledMoves(
            clock, options, self._attempts, self.placer, self._placement_request, host.worker
        )

    # -- requests --------------------------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """A request comes in. It is refused, or waits for its turn, which may be now."""
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
        """Time has passed."""
        now = self._clock.now
        self.placer.tick(now)
        self.peers.tick(now)
        self._moves.tick(self._client.workers)
        for number, _ in self.admission.overdue(now):
            self._refuse(self._waiting.pop(number))
        self._admit()

    def _refuse(self, request: Request) -> None:
        request.rejected = True
        self._host.ended(request)

    def _admit(self, judged: int = -1, choice: Choice | None = None) -> None:
        """Place the requests whose turn it is. `choice` was just made for the request `judged`."""
        while (number := self.admission.admit(self._clock.now)) is not None:
            self._place(self._waiting.pop(number), choice if number == judged else None)

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
        attempt = Attempt(
            request, placement, choice.request.prompt_tokens,
            request.trace.output_tokens - request.forwarded, request.trace.hashes,
        )  # fmt: skip
        request.attempts += 1
        request.prefill = placement.prefill.id if placement.prefill is not None else None
        request.decode = placement.decode.id
        self._attempts[request.number] = attempt
        decode = self._host.worker(placement.decode).decode
        self._clock.after(self._options.message_s, decode, attempt, self._holder(attempt))
        if not placement.hold_prefill:
            self._send_prefill(attempt)

    def _holder(self, attempt: Attempt) -> Arrivals | None:
        source = attempt.placement.source
        record = None if source is None else self._client.workers.get(source.worker)
        return None if record is None else self._host.worker(record).arrivals

    def _send_prefill(self, attempt: Attempt) -> None:
        record = attempt.placement.prefill
        if record is not None:
            prefill = self._host.worker(record).prefill
            self._clock.after(self._options.message_s, prefill, attempt, self._holder(attempt))

    # -- what workers send -----------------------------------------------------------------------------

    def reserved(self, attempt: Attempt) -> None:
        """D has reserved memory. Send P its prompt, if that was held back until now."""
        if attempt.taken_over:
            self._moves.reserved(attempt)
        elif not attempt.over and attempt.placement.hold_prefill:
            self._send_prefill(attempt)

    def first_token(self, attempt: Attempt) -> None:
        """The first token of an attempt came."""
        if attempt.lost:
            return
        request = attempt.request
        self.placer.prefilled(attempt.placement, self._clock.now)
        request.forwarded += 1
        if request.first_at < 0:
            request.first_at = self._clock.now
        if attempt.output == 1:
            self._end(attempt)

    def transferred(self, attempt: Attempt) -> None:
        """D says how long its KV took, which is the price of later transfers."""
        prefill, decode = attempt.placement.prefill, attempt.placement.decode
        if prefill is not None:
            transfers = self.placer.policy.transfers
            transfers.observe(prefill, decode, _BACKEND, attempt.kv_bytes, attempt.kv_s)

    def done(self, attempt: Attempt) -> None:
        """The last token of an attempt came."""
        if not attempt.lost:
            attempt.request.forwarded += attempt.output - 1
            self._end(attempt)

    def _end(self, attempt: Attempt) -> None:
        request = attempt.request
        attempt.end()
        request.last_at = self._clock.now
        del self._attempts[request.number]
        self._moves.drop(request.number)
        self.placer.close(attempt.placement, self._clock.now)
        self.placer.answered(request.forwarded)
        self.admission.produced(request.number, request.forwarded)
        self.admission.leave(request.number)
        self._host.ended(request)
        self._admit()

    # -- who is there ----------------------------------------------------------------------------------

    def view(self, view: View) -> None:
        """Take the directory's View."""
        now = self._clock.now
        change = self._client.take(view)
        self.placer.update(list(self._client.workers.values()), now)
        self.peers.meet(view.routers)
        for record in change.lost:
            if self._incarnations.pop(record.id, None) is not None:
                self.index.drop(record.id)
            self._lost(record)
        for record in change.joined:
            self.index.join(record.id)
            self._incarnations[record.id] = record.incarnation
            for moved in self._early_events.pop((record.id, record.incarnation), []):
                self.event(record, moved)
        unplaced, self._unplaced = self._unplaced, []
        for request in unplaced:
            self._place(request)

    def event(self, record: WorkerRecord, moved: PagesMoved) -> None:
        """Take a worker's KV event. One that comes before the worker's View is kept until then."""
        known = self._incarnations.get(record.id, -1)
        if known == record.incarnation:
            (self.index.store if moved.stored else self.index.remove)(record.id, moved.pages, moved.medium)
        elif known < record.incarnation:
            self._early_events.setdefault((record.id, record.incarnation), []).append(moved)

    def needs(self, record: WorkerRecord) -> bool:
        """Whether a request that is placed cannot go on without this worker."""
        return any(_needs(one, record) for one in self._attempts.values()) or self._moves.needs(record)

    def _lost(self, record: WorkerRecord) -> None:
        """A worker is gone. Its requests start again elsewhere, from what was forwarded."""
        self._moves.lost(record)
        for attempt in [one for one in self._attempts.values() if _needs(one, record)]:
            attempt.end(lost=True)
            del self._attempts[attempt.request.number]
            self._moves.drop(attempt.request.number)
            self.placer.close(attempt.placement, self._clock.now)
            for other in (attempt.placement.prefill, attempt.placement.decode):
                if other is not None:
                    self._clock.after(self._options.message_s, self._host.worker(other).abort, attempt)
            self._place(attempt.request, avoid=frozenset({record.id}))


def _needs(attempt: Attempt, record: WorkerRecord) -> bool:
    """Whether an attempt cannot go on without this worker."""
    lost, placement = (record.id, record.incarnation), attempt.placement
    p, d = placement.prefill, placement.decode
    if (d.id, d.incarnation) == lost:
        return True
    return p is not None and (p.id, p.incarnation) == lost and not attempt.received
