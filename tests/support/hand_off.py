"""A prefill worker, a decode worker and a router's part of the protocol in one thread, over a network and a
clock that the test controls. Memory, scheduler, both roles and the transport (shm) are the real ones.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from msgspec.structs import replace

from decode_node.worker import DecodeWorker
from engine.fake import fake_generate
from prefill_node import role as prefill_role
from prefill_node.worker import PrefillWorker
from tests.harness.local_stack import in_use
from wire.codec import decode, encode, pack_tokens, unpack_tokens
from wire.holds import Hold
from wire.mailbox import Mail
from wire.messages.any_message import AnyMessage
from wire.messages.base import Receipt, RoomMessage, kind_of
from wire.messages.rooms import (
    Abort,
    Ack,
    Decode,
    Prefill,
    Rejected,
    Resend,
    Reserved,
    RoomStatus,
    Timeline,
    Tokens,
)
from wire.peer_monitors import PeerState
from wire.request import NO_MARKS, FinishReason, GenerateRequest, PromptMarks, SamplingParams
from worker import loop, mail, parts, role
from worker.loop import Worker
from worker.options import KVEventsOptions, WorkerOptions

ROUTER = "router"
TRANSFER_S = 20.0


class Letter(NamedTuple):
    """A message on its way."""

    sender: str
    to: str
    message: AnyMessage


class Network:
    """Every message that was sent and not yet delivered, in the order of sending."""

    def __init__(self) -> None:
        self.letters: list[Letter] = []
        self.names = itertools.count()


class FakeMailbox:
    """wire.mailbox.Mailbox without sockets. A message still goes through the codec, as on the wire."""

    network: Network

    def __init__(self, *_: Any, **__: Any) -> None:
        self.address = f"worker-{next(self.network.names)}"
        self.peers: dict[str, PeerState] = {}  # that have come up or gone down

    def send(self, to: str, message: AnyMessage) -> None:
        self.network.letters.append(Letter(self.address, to, decode(encode(message))))

    def take_peers(self) -> dict[str, PeerState]:
        states, self.peers = self.peers, {}
        return states

    def watch(self, peers: frozenset[str]) -> None:
        """All are."""

    def connections(self, holder: str, now: float) -> list[Hold]:
        return []

    def nudge(self) -> None:
        """The test turns the loop itself."""

    def forget(self, peer: str) -> None:
        """Nothing is connected."""

    def close(self) -> None:
        """Nothing is open."""


@dataclass
class Output:
    """What the router has received of one room."""

    request: GenerateRequest
    split: bool
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    rejected: Rejected | None = None  # in the current epoch
    rejections: list[Rejected] = field(default_factory=list)  # of each worker, in any epoch
    statuses: list[RoomStatus] = field(default_factory=list)  # of any epoch
    aborted: bool = False
    cached_tokens: int = 0  # of the prompt, as it was told with position 0

    @property
    def open(self) -> bool:
        """More is to come."""
        return self.finish is None and not self.aborted


class Pair:
    """One prefill and one decode worker, and what a router would have of their rooms."""

    def __init__(self, network: Network, clock: SimpleNamespace, prefill: Worker, decode: Worker) -> None:
        self.network = network
        self.clock = clock
        self.prefill = prefill
        self.decode = decode
        self.outputs: dict[int, Output] = {}

    # -- the router's part -------------------------------------------------------------------------

    def ask(
        self,
        room: int,
        prompt: list[int],
        n: int,
        split: bool = True,
        arrived_ns: int = 0,
        top_logprobs: int | None = None,
        temperature: float = 0.0,
        seed: int = 0,
        tenant: str = "",
        marks: PromptMarks = NO_MARKS,
    ) -> None:
        """A new room, started on both workers (or on decode alone). `seed` is of what is sampled."""
        sampling = SamplingParams(
            max_new_tokens=n,
            temperature=temperature,
            seed=seed,
            ignore_eos=True,
            top_logprobs=top_logprobs,
        )
        request = GenerateRequest(
            request_id=f"r{room}",
            room=room,
            epoch=1,
            prompt=pack_tokens(prompt),
            sampling=sampling,
            arrived_ns=arrived_ns,
            tenant=tenant,
            marks=marks,
        )
        self.outputs[room] = Output(request, split)
        self.start(room)

    def start(self, room: int) -> None:
        """Send the room's start messages, perhaps again."""
        output = self.outputs[room]
        if output.split:
            self.post(self.prefill, Prefill(output.request, self.decode.record().mailbox))
        prefill = self.prefill.record().mailbox if output.split else None
        self.post(self.decode, Decode(output.request, prefill))

    def restart(self, room: int, split: bool) -> None:
        """The room again, in the next epoch, with what was forwarded as forced input."""
        output = self.outputs[room]
        old = output.request
        output.request = replace(old, epoch=old.epoch + 1, forced=tuple(output.tokens))
        output.split, output.rejected = split, None
        self.start(room)

    def insist(self, room: int) -> None:
        """What a router does about a silent room: restart it if it was rejected, else repeat itself."""
        if self.outputs[room].rejected is not None:
            self.restart(room, split=False)
        else:
            self.start(room)
            self._ask_again(room)

    def abort(self, room: int) -> None:
        """The client went away."""
        output = self.outputs[room]
        output.aborted = True
        for worker in (self.prefill, self.decode):
            self.post(worker, Abort(room, output.request.epoch))

    def post(self, worker: Worker, message: AnyMessage) -> None:
        self.network.letters.append(Letter(ROUTER, worker.record().mailbox, decode(encode(message))))

    # -- time --------------------------------------------------------------------------------------

    def deliver(self, index: int, keep: bool = False) -> None:
        """Deliver the letter at `index`; `keep` leaves a copy on its way."""
        letter = self.network.letters[index]
        if not keep:
            del self.network.letters[index]
        if letter.to == ROUTER:
            self._take(letter)
            return
        for worker in (self.prefill, self.decode):
            if letter.to == worker.record().mailbox:
                worker.turn([Mail(letter.sender, letter.message)])

    def hold_back(self, kind: type[RoomMessage]) -> Letter:
        """Run until a message of this kind is on its way. It is taken from the network and not delivered."""
        deadline = time.monotonic() + TRANSFER_S
        while True:
            for letter in self.network.letters:
                if isinstance(letter.message, kind):
                    self.network.letters.remove(letter)
                    return letter
            assert time.monotonic() < deadline, f"no {kind.__name__} was sent"
            self.turn(self.prefill)
            self.turn(self.decode)
            self._moving()
            if self.network.letters and not isinstance(self.network.letters[0].message, kind):
                self.deliver(0)

    def arrive(self, letter: Letter) -> None:
        """Deliver a message that was held back, or that the test has made up."""
        self.network.letters.insert(0, letter)
        self.deliver(0)

    def turn(self, worker: Worker) -> bool:
        """One turn without mail."""
        return worker.turn([])

    def step(self, number: int) -> None:
        """The smallest thing that can happen next: a turn of either loop, or the oldest letter arrives."""
        if number % 3 < 2:
            self.turn((self.prefill, self.decode)[number % 3])
        elif self.network.letters:
            self.deliver(0)

    def pass_time(self, seconds: float) -> None:
        """Let time pass, and both workers notice."""
        self.clock.now += seconds
        for worker in (self.prefill, self.decode):
            worker.turn([])

    def run_dry(self) -> None:
        """Deliver everything in order and turn both loops until nothing happens any more."""
        deadline = time.monotonic() + TRANSFER_S
        quiet = 0
        while quiet < 3:
            assert time.monotonic() < deadline, "the pair never came to rest"
            busy = self.turn(self.prefill) | self.turn(self.decode)
            while self.network.letters:
                busy = True
                self.deliver(0)
            quiet = 0 if busy or self._moving() else quiet + 1

    def run_dry_without(self, stopped: Worker) -> None:
        """Deliver everything but the mail of one worker, which is not turned either and keeps its mail."""
        address, kept = stopped.record().mailbox, []
        other = self.decode if stopped is self.prefill else self.prefill
        quiet = 0
        while quiet < 3:
            busy = self.turn(other)
            while self.network.letters:
                letter = self.network.letters[0]
                if letter.to == address:
                    kept.append(self.network.letters.pop(0))
                    continue
                busy = True
                self.deliver(0)
            quiet = 0 if busy else quiet + 1
        self.network.letters += kept

    def settle(self, seconds: float = 40.0) -> None:
        """Let every deadline pass, `seconds` at a time. Then no room may be left and nothing may be held."""
        for _ in range(8):
            self.pass_time(seconds)
            self.run_dry()
        for worker in (self.prefill, self.decode):
            assert not worker.rooms()
            assert held(worker) == {}
            assert len(worker.parts.services.outbox) == 0, "output that nobody will acknowledge"

    def _moving(self) -> bool:
        """Whether a transfer or a tier's thread is at work, even for an aborted room. If so, let it run."""
        sending = any(room.hold is prefill_role.PrefillHold.HAND_OFF for room in self.prefill.rooms())
        memories = (worker.parts.services.memory for worker in (self.prefill, self.decode))
        moving = not all(memory.tiers is None or memory.tiers.is_idle for memory in memories)
        if sending or moving or self.decode.parts.role.busy:
            time.sleep(0.001)
            return True
        return False

    def _take(self, letter: Letter) -> None:
        message = letter.message
        if isinstance(message, Reserved | Rejected | Timeline):
            receipt = Receipt(message.room, message.epoch, kind_of(message))
            self.network.letters.append(Letter(ROUTER, letter.sender, receipt))
        match message:
            case Tokens():
                for run in message.runs:
                    output = self.outputs[run.room]
                    if run.epoch != output.request.epoch or output.aborted:
                        continue
                    have = len(output.tokens)
                    if run.start > have:
                        self._ask_again(run.room)
                        continue
                    if run.start == have == 0:
                        output.cached_tokens = run.cached_tokens
                    output.tokens += run.tokens[have - run.start :]
                    output.finish = output.finish or run.finish
                    if output.finish is not None:
                        ack = Ack([(run.room, run.epoch, len(output.tokens))])
                        self.post(self.prefill, ack)
                        self.post(self.decode, ack)
            case RoomStatus():
                self.outputs[message.room].statuses.append(message)
            case Rejected():
                output = self.outputs[message.room]
                output.rejections.append(message)
                if message.epoch == output.request.epoch:
                    output.rejected = message

    def _ask_again(self, room: int) -> None:
        output = self.outputs[room]
        for worker in (self.prefill, self.decode):
            self.post(worker, Resend(room, output.request.epoch, len(output.tokens)))


def held(worker: Worker) -> dict[str, Any]:
    """What is neither free nor an unlocked part of the cache, in any group. Checks that memory balances."""
    return in_use(asdict(worker.check_memory()))


def prompt_of(seed: int, length: int) -> list[int]:
    """Random tokens."""
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


def right(both: Pair, room: int, groups: tuple[str, ...] = ()) -> list[int]:
    """The right answer to the room."""
    request = both.outputs[room].request
    prompt = unpack_tokens(request.prompt).tolist()
    return fake_generate(prompt, request.sampling.max_new_tokens, groups=groups)


GROUPS: tuple[tuple[str, ...], ...] = ((), ("window",), ("state",), ("window", "state"))
"""The groups of the fake model beside its full group, in every combination."""
SMALL = {
    "window": {"swa_full_tokens_ratio": 0.3},
    "state": {"max_mamba_cache_size": 24, "mamba_track_interval": 8},
}
"""Memory of each group for only a few rooms at once, so that it runs short in a test."""


@contextmanager
def pair(
    groups: tuple[str, ...] = (), prefill_differs: dict[str, Any] | None = None, **options: Any
) -> Iterator[Pair]:
    """Both workers, never started: the test turns their loops. `groups` as in GROUPS; `options` of both, and
    those that are others for prefill. With an engine other than the fake one a model must be named."""
    for group in groups:
        options = {**SMALL[group], **options}
    network, clock = Network(), SimpleNamespace(now=1000.0)
    fake_time = SimpleNamespace(monotonic=lambda: clock.now)
    mailbox = type("NetworkMailbox", (FakeMailbox,), {"network": network})
    both = {
        "model": "fake",
        "engine": "fake",
        "kv_events_config": KVEventsOptions(enable=False),
        "fake_groups": groups,
        "max_total_tokens": 512,
        "page_size": 4,
        "chunked_prefill_size": 12,
        **options,
    }
    prefill_options = WorkerOptions(**{**both, **(prefill_differs or {})})
    with ExitStack() as cleanup:
        cleanup.enter_context(mock.patch.object(parts, "Mailbox", mailbox))
        for module in (loop, mail, role, prefill_role):
            cleanup.enter_context(mock.patch.object(module, "time", fake_time))
        prefill, decode = PrefillWorker(prefill_options), DecodeWorker(WorkerOptions(**both))
        cleanup.callback(decode.close)
        cleanup.callback(prefill.close)
        yield Pair(network, clock, prefill, decode)
