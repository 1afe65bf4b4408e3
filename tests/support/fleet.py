"""Workers that compute whole requests and fetch from each other, in one thread, over a network and a clock
that the test controls. Memory, scheduler, both sides of a fetch and the transport are the real ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count, takewhile
from types import SimpleNamespace
from typing import Any
from unittest import mock

from decode_node.worker import DecodeWorker
from engine.fake import fake_generate
from kvcache import memory
from kvtransfer.sender import KVSender
from tests.kvcache.support import HandMover
from tests.support.hand_off import ROUTER, SMALL, TRANSFER_S, FakeMailbox, Letter, Network, held
from wire.codec import decode, encode, pack_tokens, unpack_tokens
from wire.mailbox import Mail
from wire.messages.any_message import AnyMessage
from wire.messages.base import Receipt, kind_of
from wire.messages.rooms import Abort, Ack, Decode, FetchSource, Rejected, Timeline, Tokens
from wire.peer_monitors import PeerState
from wire.request import GenerateRequest, SamplingParams
from worker import lending, loop, mail, parts, role
from worker.loop import Worker
from worker.options import KVEventsOptions, WorkerOptions


class Writes:
    """Stands in for a worker's SenderThreads: a write happens when the test says so."""

    all: list[Writes]  # one for each worker, in the order of opening

    def __init__(self, transport: Any, regions: Any, on_sent: Any, threads: int, arenas: Any) -> None:
        self.transport = transport
        self.regions = regions
        self.arenas = arenas
        self.post = on_sent
        self.waiting: list[KVSender] = []
        self.all.append(self)

    def queue(self, sender: KVSender) -> None:
        self.waiting.append(sender)

    def close(self) -> None:
        """There are no threads."""


class Moves(HandMover):
    """Stands in for a worker's Mover, likewise."""

    all: list[Moves]

    def __init__(self) -> None:
        super().__init__()
        self.all.append(self)


@dataclass
class Answer:
    """What the router has of one room."""

    request: GenerateRequest
    worker: int
    seen: dict[int, int] = field(default_factory=dict)  # tokens by position, which may come in any order
    last: int | None = None  # how many there are
    aborted: bool = False
    rejected: Rejected | None = None
    timeline: Timeline | None = None

    @property
    def tokens(self) -> list[int]:
        """As far as none is missing."""
        return [self.seen[at] for at in takewhile(self.seen.__contains__, count())]

    @property
    def complete(self) -> bool:
        """All tokens have come."""
        return self.last is not None and len(self.seen) == self.last

    @property
    def open(self) -> bool:
        """More is to come."""
        return not (self.complete or self.aborted or self.rejected)


class Fleet:
    """Some workers, and what a router would have of their rooms. Workers in `stopped` do nothing."""

    def __init__(
        self,
        network: Network,
        clock: SimpleNamespace,
        workers: list[Worker],
        groups: tuple[str, ...],
        writes: list[Writes],
        movers: list[Moves],
    ) -> None:
        """`movers`: of workers that have a tier below the device, by worker; empty where they have none."""
        self.network = network
        self.clock = clock
        self.workers = workers
        self.groups = groups
        self.answers: dict[int, Answer] = {}
        self.stopped: set[int] = set()
        self.writes = writes
        self.movers = movers
        self._addresses = [worker.record().mailbox for worker in workers]

    def address(self, worker: int) -> str:
        """A worker's mailbox."""
        return self._addresses[worker]

    # -- the router's part -------------------------------------------------------------------------

    def ask(
        self,
        room: int,
        worker: int,
        prompt: list[int],
        n: int = 3,
        holder: int | None = None,
        tenant: str = "",
    ) -> None:
        """Start a room on a worker, which may fetch all of the prompt from `holder`."""
        request = GenerateRequest(
            request_id=f"r{room}",
            room=room,
            epoch=1,
            prompt=pack_tokens(prompt),
            sampling=SamplingParams(max_new_tokens=n, temperature=0.0, ignore_eos=True),
            tenant=tenant,
        )
        self.answers[room] = Answer(request, worker)
        source = (
            None
            if holder is None
            else FetchSource(f"worker {holder}", self.address(holder), len(prompt) // 4)
        )
        self.post(worker, Decode(request, source=source))

    def abort(self, room: int) -> None:
        """The client went away."""
        answer = self.answers[room]
        answer.aborted = True
        self.post(answer.worker, Abort(room, answer.request.epoch))

    def post(self, worker: int, message: AnyMessage) -> None:
        """A message from the router."""
        self.network.letters.append(Letter(ROUTER, self.address(worker), decode(encode(message))))

    def right(self, room: int) -> list[int]:
        """The right answer."""
        request = self.answers[room].request
        prompt = unpack_tokens(request.prompt).tolist()
        return fake_generate(prompt, request.sampling.max_new_tokens, groups=self.groups)

    # -- time --------------------------------------------------------------------------------------

    def deliver(self, index: int = 0, keep: bool = False) -> None:
        """Deliver the letter at `index`; `keep` leaves a copy on its way. A stopped worker reads nothing."""
        letter = self.network.letters[index]
        if letter.to != ROUTER and self._addresses.index(letter.to) in self.stopped:
            return
        if not keep:
            del self.network.letters[index]
        if letter.to == ROUTER:
            self._take(letter)
        else:
            self.workers[self._addresses.index(letter.to)].turn([Mail(letter.sender, letter.message)])

    def turn(self, worker: int) -> bool:
        """One turn without mail."""
        return worker not in self.stopped and self.workers[worker].turn([])

    def pass_time(self, seconds: float) -> None:
        """Let time pass, and all workers notice."""
        self.clock.now += seconds
        for worker in range(len(self.workers)):
            self.turn(worker)

    def write(self, worker: int) -> bool:
        """The worker writes what has waited longest to be written. Whether there was something."""
        waiting = self.writes[worker].waiting
        if worker in self.stopped or not waiting:
            return False
        waiting.pop(0).run_one()
        return True

    def move(self, worker: int, lane: str | None = None, fails: bool = False) -> bool:
        """The worker's mover does what has waited longest, of one lane or of all, also while its loop is
        stopped. Whether there was something."""
        mover = self.movers[worker] if self.movers else None
        if mover is None or not mover.waiting:
            return False
        return mover.do(mover.waiting[0][0] if lane is None else lane, fails)

    def down(self, worker: int, state: PeerState = PeerState.DOWN) -> None:
        """All others learn that a worker is down (or up again)."""
        for index, other in enumerate(self.workers):
            if index != worker:
                other.parts.services.mailbox.peers[self.address(worker)] = state  # type: ignore[attr-defined]

    def run_dry(self) -> None:
        """Deliver everything that can be, and turn all loops, until nothing happens any more."""
        deadline = time.monotonic() + TRANSFER_S
        quiet = 0
        while quiet < 3:
            assert time.monotonic() < deadline, "the fleet never came to rest"
            done = [
                self.turn(worker) | self.write(worker) | self.move(worker)
                for worker in range(len(self.workers))
            ]
            busy = any(done)
            for _ in range(len(self.network.letters)):
                before = len(self.network.letters)
                self.deliver()
                if self.network.letters and len(self.network.letters) == before:  # its reader is stopped
                    self.network.letters.append(self.network.letters.pop(0))
                else:
                    busy = True
            quiet = 0 if busy else quiet + 1

    def settle(self) -> None:
        """Let every deadline pass. Then nothing may be held anywhere."""
        for _ in range(8):
            self.pass_time(40.0)
            self.run_dry()
        for worker in self.workers:
            assert not worker.rooms()
            assert held(worker) == {}
            assert not worker.parts.role.busy

    def metrics(self, worker: int) -> Any:
        """What the worker's scheduler has counted."""
        return self.workers[worker].parts.role.scheduler.metrics

    def _take(self, letter: Letter) -> None:
        message = letter.message
        match message:
            case Timeline():
                self.answers[message.room].timeline = message
                receipt = Receipt(message.room, message.epoch, kind_of(message))
                self.network.letters.append(Letter(ROUTER, letter.sender, receipt))
            case Rejected():
                receipt = Receipt(message.room, message.epoch, kind_of(message))
                self.network.letters.append(Letter(ROUTER, letter.sender, receipt))
                self.answers[message.room].rejected = message
            case Tokens():
                for run in message.runs:
                    answer = self.answers[run.room]
                    answer.seen.update(enumerate(run.tokens, run.start))
                    if run.finish is not None:
                        answer.last = run.start + len(run.tokens)
                    if answer.complete:
                        self.post(answer.worker, Ack([(run.room, run.epoch, len(answer.tokens))]))


@contextmanager
def fleet(
    size: int = 3,
    groups: tuple[str, ...] = (),
    differs: dict[int, dict[str, Any]] | None = None,
    **options: Any,
) -> Iterator[Fleet]:
    """Workers with the fake engine, never started: the test turns their loops. `groups` as in GROUPS;
    `differs`: options of single workers."""
    for group in groups:
        options = {**SMALL[group], **options}
    network, clock = Network(), SimpleNamespace(now=1000.0)
    fake_time = SimpleNamespace(monotonic=lambda: clock.now)
    mailbox = type("NetworkMailbox", (FakeMailbox,), {"network": network})
    common = {
        "model": "fake",
        "engine": "fake",
        "kv_events_config": KVEventsOptions(enable=False),
        "fake_groups": groups,
        "max_total_tokens": 512,
        "page_size": 4,
        "chunked_prefill_size": 12,
        "peer_fetch_min_tokens": 4,
        "peer_fetch_min_s": 5.0,
        "peer_lend_share": 1.0,
        **options,
    }
    with ExitStack() as cleanup:
        writes = type("FleetWrites", (Writes,), {"all": []})
        movers = type("FleetMoves", (Moves,), {"all": []})
        cleanup.enter_context(mock.patch.object(lending, "SenderThreads", writes))
        cleanup.enter_context(mock.patch.object(parts, "Mailbox", mailbox))
        cleanup.enter_context(mock.patch.object(memory, "Mover", movers))
        for module in (loop, mail, role):
            cleanup.enter_context(mock.patch.object(module, "time", fake_time))
        workers: list[Worker] = []
        for index in range(size):
            own = WorkerOptions(**{**common, **(differs or {}).get(index, {})})
            workers.append(cleanup.enter_context(_closing(DecodeWorker(own))))
        yield Fleet(network, clock, workers, groups, writes.all, movers.all)  # type: ignore[attr-defined]


@contextmanager
def _closing(worker: Worker) -> Iterator[Worker]:
    try:
        yield worker
    finally:
        worker.close()
