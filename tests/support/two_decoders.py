"""Two decode workers and a router's part of a move in one thread, over a network and a clock that the test
controls. Memory, scheduler, role and the transport are the real ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

from msgspec.structs import replace

from decode_node import moves as decode_moves
from decode_node.worker import DecodeWorker
from engine.fake import fake_generate
from tests.support.hand_off import ROUTER, SMALL, TRANSFER_S, FakeMailbox, Letter, Network, held
from wire.codec import decode, encode, pack_tokens, unpack_tokens
from wire.mailbox import Mail
from wire.messages.any_message import AnyMessage
from wire.messages.base import Receipt, RoomMessage, kind_of
from wire.messages.rooms import (
    Abort,
    Ack,
    Claim,
    Claimed,
    ClaimedRoom,
    Decode,
    Rejected,
    RejectKind,
    Resend,
    Reserved,
    Timeline,
    Tokens,
)
from wire.messages.transfer import KVFailed
from wire.peer_monitors import PeerState
from wire.request import FinishReason, GenerateRequest, SamplingParams, TokenLogprobs
from worker import loop, mail, parts, role
from worker.loop import Worker
from worker.options import KVEventsOptions, WorkerOptions


@dataclass
class Stream:
    """What the router knows of one room."""

    request: GenerateRequest  # of the epoch that runs
    where: int  # index of its worker
    moving: GenerateRequest | None = None  # of the epoch that is to take it over
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    newest: int = 1  # epoch
    moved: int = 0
    lost: bool = False  # no worker runs it
    rejected: list[Rejected] = field(default_factory=list)


class TwoDecoders:
    """The workers, what is on its way between them, and the streams."""

    def __init__(self, network: Network, clock: SimpleNamespace, workers: tuple[Worker, Worker]) -> None:
        self.network = network
        self.clock = clock
        self.workers = workers
        self.streams: dict[int, Stream] = {}
        self.router = ROUTER  # the one that lives
        self._claimed: dict[int, dict[str, list[ClaimedRoom]]] = {}  # answers, by token and worker

    # -- the router's part -------------------------------------------------------------------------

    def ask(self, room: int, prompt: list[int], n: int, where: int = 0, **sampling: Any) -> Stream:
        """A room that one worker does alone."""
        params = SamplingParams(max_new_tokens=n, temperature=0.0, ignore_eos=True, **sampling)
        request = GenerateRequest(
            request_id=f"r{room}", room=room, epoch=1, prompt=pack_tokens(prompt), sampling=params
        )
        stream = self.streams[room] = Stream(request, where)
        self.post(where, Decode(request))
        return stream

    def move(self, room: int) -> None:
        """Start the room's next epoch on the other worker."""
        stream = self.streams[room]
        stream.newest += 1
        stream.moving = replace(stream.request, epoch=stream.newest, forced=tuple(stream.tokens))
        source = self.workers[stream.where].record().mailbox
        self.post(1 - stream.where, Decode(stream.moving, source, move=True))

    def cancel(self, room: int) -> None:
        """The move is off."""
        stream = self.streams[room]
        assert stream.moving is not None
        self.post(1 - stream.where, Abort(room, stream.moving.epoch))
        self.post(stream.where, KVFailed(room, stream.moving.epoch, "given up"))
        stream.moving = None

    def post(self, where: int, message: AnyMessage) -> None:
        to = self.workers[where].record().mailbox
        self.network.letters.append(Letter(self.router, to, decode(encode(message))))

    def router_dies(self) -> None:
        """Another router is there from now on. What was on its way from the first, and to it, is lost."""
        gone, self.router = self.router, f"{self.router}'"
        letters = self.network.letters
        letters[:] = [one for one in letters if gone not in (one.sender, one.to)]
        for worker in self.workers:
            mailbox: Any = worker.parts.services.mailbox
            mailbox.peers = {gone: PeerState.DOWN}
            worker.turn([])

    def claim(self, room: int) -> bool:
        """The client of a room goes on at the router that lives. Whether a worker had the room."""
        found = self.ask_for(room)
        if not found:
            return False
        where, latest = max(found.items(), key=lambda one: one[1].epoch)
        stream = self.streams[room]
        stream.request = replace(stream.request, epoch=latest.epoch, forced=())
        stream.where, stream.moving, stream.lost = where, None, False
        stream.newest = max(latest.epoch, latest.newest)
        stream.tokens, stream.logprobs, stream.finish = [], [], None
        for other, one in found.items():
            if other != where:
                self.post(other, Abort(room, one.epoch))
        letters = self.network.letters
        letters[:] = [one for one in letters if not isinstance(one.message, Tokens)]  # asked for again
        self.post(where, Resend(room, latest.epoch, 0))
        self.deliver(len(letters) - 1)
        return True

    def ask_for(self, room: int) -> dict[int, ClaimedRoom]:
        """Claim a room of both workers. Returns it as those have it that do, by their index."""
        token = len(self._claimed)
        answers = self._claimed[token] = {}
        for where in (0, 1):
            self.post(where, Claim([room], token))
        while len(answers) < len(self.workers):
            self.round()
        mailboxes = [worker.record().mailbox for worker in self.workers]
        return {mailboxes.index(of): found[0] for of, found in answers.items() if found}

    def right(self, room: int, groups: tuple[str, ...] = ()) -> list[int]:
        """The right answer."""
        request = self.streams[room].request
        prompt = unpack_tokens(request.prompt).tolist()
        return fake_generate(prompt, request.sampling.max_new_tokens, groups=groups)

    # -- time --------------------------------------------------------------------------------------

    def deliver(self, index: int = 0) -> None:
        """Deliver a letter."""
        letter = self.network.letters.pop(index)
        if letter.to == self.router:
            self._take(letter)
            return
        for worker in self.workers:
            if letter.to == worker.record().mailbox:
                worker.turn([Mail(letter.sender, letter.message)])

    def round(self) -> bool:
        """A turn of both loops, and everything on its way arrives. Whether anything was done."""
        busy = self.workers[0].turn([]) | self.workers[1].turn([])
        for _ in range(len(self.network.letters)):
            self.deliver()
            busy = True
        return busy

    def until(self, room: int, tokens: int) -> None:
        """Until the router has so many tokens of a room."""
        deadline = time.monotonic() + TRANSFER_S
        while len(self.streams[room].tokens) < tokens:
            assert time.monotonic() < deadline, f"room {room} does not go on"
            self.round()

    def until_moved(self, room: int, times: int = 1) -> None:
        """Until a room has been taken over so often."""
        deadline = time.monotonic() + TRANSFER_S
        while self.streams[room].moved < times:
            assert time.monotonic() < deadline, f"room {room} was not moved: {self.streams[room].rejected}"
            self.round()

    def hold_back(self, kind: type[RoomMessage]) -> Letter:
        """Run until a message of this kind is on its way. It is taken from the network and not delivered."""
        deadline = time.monotonic() + TRANSFER_S
        while True:
            for letter in self.network.letters:
                if isinstance(letter.message, kind):
                    self.network.letters.remove(letter)
                    return letter
            assert time.monotonic() < deadline, f"no {kind.__name__} was sent"
            if self.network.letters:
                self.deliver()
            else:
                self.workers[0].turn([])
                self.workers[1].turn([])

    def finish(self) -> None:
        """Run until every stream is over."""
        deadline = time.monotonic() + TRANSFER_S
        while any(stream.finish is None for stream in self.streams.values()):
            assert time.monotonic() < deadline, "a stream never ended"
            self.round()

    def pass_time(self, seconds: float) -> None:
        """Let time pass, and both workers notice."""
        self.clock.now += seconds
        self.round()

    def settle(self) -> None:
        """Let every deadline pass. Then no room may be left and nothing may be held."""
        for _ in range(8):
            self.pass_time(40.0)
            while self.round():
                pass
        for worker in self.workers:
            assert not worker.rooms()
            assert held(worker) == {}
            assert len(worker.parts.services.outbox) == 0, "output that nobody will acknowledge"

    def computed(self, where: int) -> int:
        """Prompt tokens that a worker has computed."""
        return self.workers[where].parts.role.scheduler.metrics.prefill_tokens

    def _take(self, letter: Letter) -> None:
        message = letter.message
        if isinstance(message, Reserved | Rejected | Timeline):
            receipt = Receipt(message.room, message.epoch, kind_of(message))
            self.network.letters.append(Letter(self.router, letter.sender, receipt))
        if isinstance(message, Rejected):
            self._rejected(message)
        elif isinstance(message, Claimed):
            self._claimed[message.token][letter.sender] = message.rooms
        elif isinstance(message, Tokens):
            for run in message.runs:
                self.network.letters.append(
                    Letter(
                        self.router, letter.sender, Ack([(run.room, run.epoch, run.start + len(run.tokens))])
                    )
                )
                stream = self.streams[run.room]
                if stream.moving is not None and run.epoch == stream.moving.epoch:
                    self._switch(stream)
                if run.epoch != stream.request.epoch:
                    continue
                have = len(stream.tokens)
                if run.start > have:  # a message was lost
                    assert run.start > len(stream.request.forced), "the first run joins what the router has"
                    self.post(stream.where, Resend(run.room, run.epoch, have))
                    continue
                overlap = have - run.start
                assert run.tokens[:overlap] == stream.tokens[run.start : run.start + len(run.tokens)]
                stream.tokens += run.tokens[overlap:]
                if run.logprobs is not None:
                    assert len(run.logprobs) == len(run.tokens)
                    assert run.logprobs[:overlap] == stream.logprobs[run.start : run.start + len(run.tokens)]
                    stream.logprobs += run.logprobs[overlap:]
                stream.finish = stream.finish or run.finish

    def _rejected(self, message: Rejected) -> None:
        stream = self.streams[message.room]
        stream.rejected.append(message)
        if stream.moving is not None and message.epoch == stream.moving.epoch:
            self.cancel(message.room)
        elif message.epoch == stream.request.epoch:
            if message.why is RejectKind.MOVED and stream.moving is not None:
                self._switch(stream)
            else:
                stream.lost = True

    def _switch(self, stream: Stream) -> None:
        assert stream.moving is not None
        self.post(stream.where, Abort(stream.request.room, stream.request.epoch))
        stream.request, stream.moving = stream.moving, None
        stream.where = 1 - stream.where
        stream.moved += 1


@contextmanager
def two_decoders(groups: tuple[str, ...] = (), **options: Any) -> Iterator[TwoDecoders]:
    """Both workers, never started: the test turns their loops."""
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
        "max_total_tokens": 1024,
        "page_size": 4,
        "chunked_prefill_size": 12,
        **options,
    }
    with ExitStack() as cleanup:
        cleanup.enter_context(mock.patch.object(parts, "Mailbox", mailbox))
        for module in (loop, mail, role, decode_moves):
            cleanup.enter_context(mock.patch.object(module, "time", fake_time))
        workers = DecodeWorker(WorkerOptions(**both)), DecodeWorker(WorkerOptions(**both))
        for worker in workers:
            cleanup.callback(worker.close)
        yield TwoDecoders(network, clock, workers)
