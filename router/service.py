"""Router: everything behind the HTTP edge, composed."""

from __future__ import annotations

import asyncio
import time

from prometheus_client import CollectorRegistry

from common.errors import ContextTooLong, Interrupted, InvalidRequest, ModelNotFound, Unavailable
from router.admin_pages import AdminPages
from router.events.event_plane import EventPlane
from router.index.global_index import GlobalIndex
from router.keys import API_KEYS_ENV, Keys, described_keys
from router.membership import Membership
from router.metrics import (
    EventMetrics,
    LevelMetrics,
    OwnCounts,
    RequestMetrics,
    RoomMetrics,
    SuspicionMetrics,
    WorkerMetrics,
)
from router.options import RouterOptions
from router.placement.load_estimate import WorkerLoadEstimate
from router.placement.placer import Placer
from router.placement.policies import make_policy
from router.process_group import OwnLists, ProcessGroup
from router.streams.claims import Claims, FoundRoom
from router.streams.client_holds import ClientHolds
from router.streams.dispatcher import Dispatcher, OpenRooms
from router.streams.generation import Answer, ChoiceCounts, ChoiceOutput, Generation, Submission
from router.streams.inspections import Inspections
from router.streams.request_log import RequestLog
from router.streams.resume import ResumeTokens, Resumption
from router.streams.resumed_output import Resumed, ResumedOutput
from router.streams.room_requests import RoomRequests
from router.streams.stream import RoomSink, RoomStream
from router.text.tokenization import Tokenization
from router.trace import TraceStore
from router.unanswered import Unanswered
from wire.holds import Hold
from wire.loop_mailbox import LoopMailbox
from wire.mailbox import Mail
from wire.messages import Claimed, Inspect, Inspected
from wire.peer_monitors import PeerState
from wire.security import curve_for

_TICK_S = 0.05
_CLAIM_TIMEOUT_S = 2.0  # then a stream is computed again


class Router:
    """Lives on the event loop on which it is made. Submit to it there, and close it."""

    def __init__(self, options: RouterOptions, first_process: str | None = None, admin_url: str = "") -> None:
        """Load the tokenizer, bind the mailbox, look for workers. Raises ConfigError for what cannot work.

        `first_process` is the mailbox of the process that started this one, if one did (processes.py).
        `admin_url` is announced in the directory: where somebody serves `pages`, if anybody does.
        """
        self.options = options
        self.tokenization = Tokenization(options.model)
        registry = CollectorRegistry()
        self.metrics = RequestMetrics(registry)
        self.keys = Keys("api_keys_file", options.api_keys_file, API_KEYS_ENV, described_keys)
        self.started_at = int(time.time())
        traces, index, secret = TraceStore(), GlobalIndex(), options.secret()
        curve = curve_for(secret)
        policy = make_policy(options.policy, options.weights, options.prefill_on_decode_tokens)
        self.placer = Placer(index, policy, options.expect_s, self._on_assigned)
        self.resume_tokens = ResumeTokens(options, secret)
        self._requests = RoomRequests(options.served_model_name, self.placer)
        self._log = RequestLog(traces, self.metrics, self.placer)
        self._mailbox = LoopMailbox(
            options.interface, curve, self._on_mail, self._on_peer, options.ports.of("mailboxes")
        )
        OwnCounts(registry, self.keys, self._mailbox)
        self.mailbox_address = self._mailbox.address  # also of the directory, if this router hosts it
        self._unanswered = Unanswered(self._mailbox.send)
        send = self._unanswered.send
        self._inspections = Inspections(send)
        self._events = EventPlane(index, curve)
        EventMetrics(registry, self._events.counters)
        metrics = RoomMetrics(registry)
        self._dispatcher = rooms = Dispatcher(options, self.placer, traces, metrics, send)
        self._claims = Claims(rooms, self.placer, send)
        self.clients = ClientHolds(options.body_timeout_s, options.unread_timeout_s, metrics.swept)
        self.membership = known = Membership(
            options, self._mailbox, self.placer, self._events, rooms, self._unanswered, admin_url
        )
        SuspicionMetrics(registry, known.suspicions)
        WorkerMetrics(registry, lambda: known.workers)
        LevelMetrics(registry, rooms.rooms, rooms.waiting, known.peers, index, lambda: known.workers)
        own = OwnLists(
            lambda: rooms.report(time.monotonic()),
            lambda: self._own_holds(time.monotonic()),
            lambda: known.suspicions.report(self.mailbox_address),
            lambda target: self.pages.open(target),
        )
        self._processes = ProcessGroup(registry, traces, send, self._inspections, own, first_process)
        self.pages = AdminPages(
            options.policy, self.tokenization, self._requests, self.placer, rooms.admission, known,
            self._processes, self._inspections,
        )  # fmt: skip
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_soon(self._tick)

    def close(self) -> None:
        """End what runs, free ports and threads. Closing twice changes nothing."""
        self._timer.cancel()
        self.interrupt()
        self._dispatcher.close()
        self.membership.close()
        self._processes.close()
        self._mailbox.close()
        self._events.close()

    # -- requests ------------------------------------------------------------------------------

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFound for a name that is not served here."""
        if name is not None and name != self.options.served_model_name:
            raise ModelNotFound(
                f"the model {name!r} does not exist; this is {self.options.served_model_name!r}", "model"
            )

    def room_for(self, prompt: list[int], wanted: int | None, param: str) -> int:
        """How many output tokens a prompt may have: `wanted`, or what the context leaves.

        Raises InvalidRequest for an empty prompt, ContextTooLong for one that does not fit.
        """
        if not prompt:
            raise InvalidRequest("the prompt is empty", param)
        limit = self.membership.context_limit
        if limit is None:
            if wanted is None:
                raise Unavailable("no worker has said yet how long an answer may be")
            return wanted  # a worker that comes within the wait will judge
        if len(prompt) + (wanted if wanted is not None else 1) > limit:
            raise ContextTooLong(len(prompt) + (wanted if wanted is not None else 1), limit, param)
        return wanted if wanted is not None else limit - len(prompt)

    def number_rooms(self, count: int) -> int:
        """The first of `count` consecutive room numbers, for a submission."""
        return self._requests.number(count)

    def submit(self, submission: Submission, answer: Answer, resumed: Resumed | None = None) -> Generation:
        """Start a request. Raises Overloaded when there is no place for it, or when it would be too late.

        With `resumed`, the answer is given what its client does not have yet.
        """
        dispatcher, now = self._dispatcher, time.monotonic()
        ended = {} if resumed is None else resumed.ended()
        found = {} if resumed is None else resumed.found
        running = [index for index in range(submission.choice_count) if index not in ended]
        if not found:
            dispatcher.admission.check(len(running))
        requests = self._requests.make(submission)
        judged = None
        if running and not found:
            judged = dispatcher.admission.judge(requests[running[0]][1], now)
        numbers = [requests[index][0].room for index in running]
        self._log.submitted(submission, numbers)
        generation = Generation(submission, answer, OpenRooms(dispatcher, numbers), self._log, ended)
        rooms = []
        for index in running:
            sink = self._make_sink(generation.choices[index], generation, resumed)
            rooms.append(RoomStream(*requests[index], dispatcher, dispatcher.mail, sink, self.options))
        if found:
            self._claims.take_over(rooms, found, now)
        elif rooms:
            dispatcher.open(rooms, judged, now)
        else:  # the client has everything but the end of the stream
            self._log.ended(generation)
        return generation

    def _make_sink(self, counts: ChoiceCounts, generation: Generation, resumed: Resumed | None) -> RoomSink:
        submission = generation.submission
        detokenizer = self.tokenization.detokenizers.make(submission.skip_special_tokens)
        output = ChoiceOutput(counts, generation, detokenizer, submission.stop)
        return output if resumed is None else ResumedOutput(output, counts, generation, resumed)

    async def claim(self, resumption: Resumption) -> dict[int, FoundRoom]:
        """Find the rooms of an interrupted stream; {}: it must be computed again. Submit at once after it."""
        first = resumption.first_room
        for stream in self.clients.streams:
            if stream.submission.first_room == first:  # its client has left, unnoticed so far
                stream.interrupt(Interrupted("the client goes on with this stream on another connection"))
        try:
            return await self._claim(resumption)
        finally:  # rooms that were left and are not claimed get an Abort with their next tokens
            numbers = range(first, first + resumption.submission.choice_count)
            self._dispatcher.foreign.difference_update(numbers)

    async def _claim(self, resumption: Resumption) -> dict[int, FoundRoom]:
        first, positions = resumption.first_room, resumption.positions
        running = [first + index for index, position in enumerate(positions) if not position.finished]
        if not running:
            return {}
        found = await self._claims.ask(running, self.membership.decode_workers, _CLAIM_TIMEOUT_S)
        if resumption.submission.sampling.top_logprobs is not None and any(
            positions[number - first].tokens < room.forced for number, room in found.items()
        ):
            self._claims.give_up(found)
            found = {}
        self.metrics.resumes.inc(of="claimed" if found else "computed again")
        return found

    def interrupt(self) -> None:
        """End all streams, so that other routers can go on with them."""
        for stream in self.clients.streams:
            stream.interrupt(Interrupted("this router is closing: resume at another"))

    def _own_holds(self, now: float) -> list[Hold]:
        """Rooms, bodies and answers of clients, messages that are repeated, connections."""
        holder, dispatcher = f"router {self.mailbox_address}", self._dispatcher
        rooms = [
            Hold(holder, "room", f"client of {one.request_id}", one.room, one.epoch)
            for one in dispatcher.report(now)
        ]
        messages = dispatcher.mail.unanswered(holder, now)
        connections = self._mailbox.connections(holder, now)
        return rooms + messages + self.clients.holds(holder, now) + connections

    # -- inside --------------------------------------------------------------------------------

    def _on_assigned(self, estimate: WorkerLoadEstimate) -> None:
        self.membership.peers.assigned(estimate)

    def _on_peer(self, address: str, state: PeerState) -> None:
        self.membership.on_peer(address, state)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(_TICK_S, self._tick)
        now = time.monotonic()
        self.membership.tick(now)
        self._dispatcher.tick(now)
        self.clients.tick(now)

    def _on_mail(self, batch: list[Mail]) -> None:
        now = time.monotonic()
        for mail in batch:
            self._unanswered.heard(mail.sender)
            if self._dispatcher.take(mail, now) or self.membership.take(mail, now):
                pass
            elif isinstance(mail.message, Claimed):
                self._claims.take(mail.sender, mail.message)
            elif isinstance(mail.message, Inspected):
                self._inspections.answer(mail.message)
            elif isinstance(mail.message, Inspect):
                self._processes.answer(mail.sender, mail.message)
