"""Router: everything behind the HTTP edge, composed."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from prometheus_client import CollectorRegistry

from common.errors import Interrupted, InvalidRequest, ModelNotFound
from common.tenant_labels import TenantLabels
from router.admin_changes import AdminChanges
from router.admin_pages import AdminPages
from router.events.event_plane import EventPlane
from router.index.global_index import GlobalIndex
from router.kept_responses import KeptResponses
from router.keys import API_KEYS_ENV, Keys, described_keys
from router.membership import Membership
from router.metrics import (
    EventMetrics,
    LevelMetrics,
    OwnCounts,
    RoomMetrics,
    SuspicionMetrics,
    VersionMetrics,
)
from router.model import Model
from router.options import RouterOptions
from router.placement.admission import Admission
from router.placement.broken_pairs import BrokenPairs
from router.placement.load_estimate import WorkerLoadEstimate
from router.placement.models import Models
from router.placement.placer import Placer
from router.placement.policies import make_policy
from router.placement.version import ModelVersion
from router.private_hook import PrivatePromptHook
from router.process_group import OwnLists, ProcessGroup
from router.request_lines import RequestLines
from router.request_metrics import RequestMetrics
from router.shared_tenants import SharedTenants
from router.streams.assignments import Assignment, version_gone, version_key
from router.streams.claims import Claims, FoundRoom
from router.streams.client_holds import ClientHolds
from router.streams.dispatcher import Dispatcher, OpenRooms, abort_requests
from router.streams.generation import Answer, ChoiceCounts, ChoiceOutput, Generation, Submission
from router.streams.inspections import Inspections
from router.streams.large_answers import LargeAnswers
from router.streams.request_log import RequestLog
from router.streams.resume import ResumeTokens, Resumption
from router.streams.resumed_output import Resumed, ResumedOutput
from router.streams.room_requests import RoomNumbers, RoomRequests
from router.streams.stream import RoomSink, RoomStream
from router.text.grammars import GrammarChecks
from router.text.long_texts import LongTexts
from router.trace import TraceStore
from router.tracing import open_tracing
from router.unanswered import Unanswered
from router.worker_metrics import WorkerMetrics
from wire.holds import Hold
from wire.loop_mailbox import LoopMailbox
from wire.mailbox import Mail
from wire.messages.caches import CacheCleared, Inspect, Inspected, TenantForgotten
from wire.messages.rooms import Claimed
from wire.peer_monitors import PeerState
from wire.security import curve_for

log = logging.getLogger(__name__)

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
        self.registry = registry = CollectorRegistry()
        tenants, names = options.tenant_labels(), [one.served_model_name for one in options.served]
        self.metrics = RequestMetrics(registry, names, tenants)
        self.keys = Keys("api_keys_file", options.api_keys_file, API_KEYS_ENV, described_keys)
        self.started_at = int(time.time())
        self.tracing = open_tracing(os.environ)
        self.request_lines = (
            None
            if options.request_log is None
            else RequestLines(options.request_log, options.request_log_prompts)
        )
        traces, index, secret = TraceStore(self.tracing), GlobalIndex(), options.secret()
        curve = curve_for(secret)
        self.traces, self._numbers = traces, RoomNumbers()
        weights = {one.served_model_name: one.version_weights for one in options.served}
        self._versions = Models(weights, partial(_make_version, options, index, self._on_assigned))
        self._long_texts = LongTexts()
        shared_tenants = SharedTenants(options.tenant_generations)
        self.models = _load_models(options, shared_tenants, self._versions, self._long_texts)
        self.private_hook = PrivatePromptHook(
            options.private_prompt_hook, options.private_prompt_hook_s, registry
        )
        self.grammars = GrammarChecks()
        self.large_answers = LargeAnswers()
        self.resume_tokens = ResumeTokens(options, secret)
        self._mailbox = LoopMailbox(
            options.interface, curve, self._on_mail, self._on_peer, options.ports.of("mailboxes")
        )
        self.mailbox_address = self._mailbox.address  # also of the directory, if this router hosts it
        self._unanswered = Unanswered(self._mailbox.send)
        send = self._unanswered.send
        self._inspections = Inspections(send)
        self._events = EventPlane(index, curve)
        metrics = RoomMetrics(registry, tenants)
        self._dispatcher = rooms = Dispatcher(options, self._versions, traces, metrics, send)
        self._claims = Claims(rooms, send)
        self.clients = ClientHolds(options.body_timeout_s, options.unread_timeout_s, metrics.swept)
        self.membership = known = Membership(
            options, self._mailbox, self._versions, self._events, rooms, self._unanswered, admin_url,
            shared_tenants,
        )  # fmt: skip
        self.responses = KeptResponses(options, self._mailbox.send, lambda: known.peers.others)
        self._register_levels(index, tenants)
        own = OwnLists(
            lambda: rooms.report(time.monotonic()),
            lambda: self._own_holds(time.monotonic()),
            lambda: known.suspicions.report(self.mailbox_address),
            lambda target: self.pages.open(target),
            partial(abort_requests, rooms),
        )
        self._processes = ProcessGroup(
            registry, traces, send, self._inspections, own, first_process, compat=options.metrics_compat
        )
        asked = known, self._processes, self._inspections
        changes = AdminChanges(self.model, tuple(self.models), *asked)
        self.pages = AdminPages(
            options.policy, self.model, self._versions, index, self._events.unsure, *asked, changes
        )
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_soon(self._tick)

    def _register_levels(self, index: GlobalIndex, tenants: TenantLabels) -> None:
        """Metrics that are read off when somebody asks for them."""
        registry, rooms, known = self.registry, self._dispatcher, self.membership
        OwnCounts(registry, self.keys, self._mailbox)
        EventMetrics(registry, self._events.counters)
        SuspicionMetrics(registry, known.suspicions)
        WorkerMetrics(registry, lambda: known.workers, tenants)
        VersionMetrics(registry, self._versions)
        levels = rooms.rooms, rooms.waiting, known.peers, index, self.responses
        LevelMetrics(registry, *levels, lambda: known.workers)

    @property
    def healthy(self) -> bool:
        """Whether the thread that follows KV events lives. Without it placement goes by an old index."""
        return self._events.running

    def close(self) -> None:
        """End what runs, free ports and threads. Closing twice changes nothing."""
        self._timer.cancel()
        self._long_texts.close()
        self.interrupt()
        self.grammars.close()
        self.large_answers.close()
        self._dispatcher.close()
        self.membership.close()
        self._processes.close()
        self._mailbox.close()
        self._events.close()
        if self.tracing is not None:
            self.tracing.close()
        if self.request_lines is not None:
            self.request_lines.close()

    # -- requests ------------------------------------------------------------------------------

    def model(self, name: str | None) -> Model:
        """The model of that name; the only one if none is given. Raises ModelNotFound, InvalidRequest."""
        if name is None and len(self.models) == 1:
            return next(iter(self.models.values()))
        served = ", ".join(repr(one) for one in self.models)
        if name is None:
            raise InvalidRequest(f"name the model: {served}", "model")
        if name not in self.models:
            raise ModelNotFound(f"the model {name!r} does not exist; served here: {served}", "model")
        return self.models[name]

    def number_rooms(self, count: int) -> int:
        """The first of `count` consecutive room numbers, for a submission."""
        return self._numbers.take(count)

    def assign(
        self,
        submission: Submission,
        resumption: Resumption | None = None,
        found: Mapping[int, FoundRoom] = MappingProxyType({}),
    ) -> Assignment:
        """The version for a request: of the workers on which its rooms were found, or on which it began if
        the client has tokens of it, or a new choice.

        Raises Unavailable when the version on which it began is not served.
        """
        versions = self.models[submission.model].versions
        key = version_key(submission)
        version: ModelVersion | None = None
        if found:
            version = self._versions.of_worker(next(iter(found.values())).worker)
        elif resumption is not None and any(one.tokens for one in resumption.positions):
            version = versions.tagged(resumption.version)
        else:
            version = versions.choose(key)
        if version is None:
            raise version_gone(submission.model)
        assignment = Assignment(versions, version, key)
        if resumption is not None and any(one.tokens for one in resumption.positions):
            assignment.fix()
        return assignment

    def submit(
        self, submission: Submission, assignment: Assignment, answer: Answer, resumed: Resumed | None = None
    ) -> Generation:
        """Start a request. Raises Overloaded when there is no place for it, or when it would be too late.
        A later part of a request that was taken waits for places instead.

        With `resumed`, the answer is given what its client does not have yet.
        """
        dispatcher, now = self._dispatcher, time.monotonic()
        ended = [] if resumed is None else resumed.ended()
        found = {} if resumed is None else resumed.found
        has_ended = {choice.index for choice in ended}
        running = [index for index in range(submission.choice_count) if index not in has_ended]
        refusable = not found and not assignment.continues
        if refusable:
            assignment.admission.check(len(running))
        requests = self.models[submission.model].requests.make(submission, assignment.version.placer)
        judged = None
        if running and refusable:
            judged = assignment.admission.judge(requests[running[0]][1], now)
        numbers = [requests[index][0].room for index in running]
        log = RequestLog(self.traces, self.metrics, assignment)
        log.submitted(submission, numbers)
        dispatcher.assignments.add(numbers, assignment)
        generation = Generation(submission, answer, OpenRooms(dispatcher, numbers), log, ended)
        generation.accepted = assignment.continues
        rooms = []
        for index in running:
            sink = self._make_sink(generation.choices[index], generation, resumed)
            rooms.append(RoomStream(*requests[index], dispatcher, dispatcher.mail, sink, self.options))
        if found:
            self._claims.take_over(rooms, found, now)
        elif rooms:
            dispatcher.open(rooms, judged, now)
        else:  # the client has everything but the end of the stream
            log.ended(generation)
        return generation

    def _make_sink(self, counts: ChoiceCounts, generation: Generation, resumed: Resumed | None) -> RoomSink:
        submission = generation.submission
        detokenizers = self.models[submission.model].tokenization.detokenizers
        detokenizer = detokenizers.make(submission.skip_special_tokens, submission.kept_special)
        output = ChoiceOutput(counts, generation, detokenizer, submission.stop, submission.keep_stop)
        return output if resumed is None else ResumedOutput(output, counts, generation, resumed)

    async def claim(self, resumption: Resumption, repeats: bool = False) -> dict[int, FoundRoom]:
        """Find the rooms of an interrupted stream; {}: it must be computed again. Submit at once after it.
        `repeats`: events tell what the client has once more."""
        first = resumption.first_room
        for stream in self.clients.streams:
            if stream.submission.first_room == first:  # its client has left, unnoticed so far
                stream.interrupt(Interrupted("the client goes on with this stream on another connection"))
        try:
            return await self._claim(resumption, repeats)
        finally:  # rooms that were left and are not claimed get an Abort with their next tokens
            self._claims.disown(range(first, first + resumption.submission.choice_count))

    async def _claim(self, resumption: Resumption, repeats: bool) -> dict[int, FoundRoom]:
        first, positions = resumption.first_room, resumption.positions
        running = [first + index for index, position in enumerate(positions) if not position.finished]
        if not running:
            return {}
        model = resumption.submission.model
        found = await self._claims.ask(
            running, lambda: self.membership.decode_workers(model), _CLAIM_TIMEOUT_S
        )
        if resumption.submission.sampling.top_logprobs is not None and any(
            (0 if repeats else positions[number - first].tokens) < room.forced
            for number, room in found.items()
        ):
            self._claims.give_up(found)
            found = {}
        self.metrics.resumes.inc(1, "claimed" if found else "computed again")
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
            try:
                self._take(mail, now)
            except Exception:  # others wait for the rest of the batch
                log.exception("%s from %s cannot be taken", type(mail.message).__name__, mail.sender)
        self.membership.publish(now)

    def _take(self, mail: Mail, now: float) -> None:
        self._unanswered.heard(mail.sender)
        if self._dispatcher.take(mail, now) or self.membership.take(mail, now) or self.responses.take(mail):
            return
        if isinstance(mail.message, Claimed):
            self._claims.take(mail.sender, mail.message)
        elif isinstance(mail.message, Inspected | CacheCleared | TenantForgotten):
            self._inspections.answer(mail.message)
        elif isinstance(mail.message, Inspect):
            self._processes.answer(mail.sender, mail.message)


def _load_models(
    options: RouterOptions, tenants: SharedTenants, versions: Models, long_texts: LongTexts
) -> dict[str, Model]:
    secret = options.secret()
    return {
        (name := one.served_model_name): Model.load(
            one,
            RoomRequests(name, secret, tenants.generation),
            versions.by_name[name],
            long_texts,
            options.public_prefixes,
        )
        for one in options.served
    }


def _make_version(
    options: RouterOptions,
    index: GlobalIndex,
    on_assigned: Callable[[WorkerLoadEstimate], None],
    broken_pairs: BrokenPairs,
) -> tuple[Placer, Admission]:
    """What chooses the workers of one version of a model, and who may use them."""
    policy = make_policy(
        options.policy, options.weights, options.prefill_on_decode_tokens, peer_fetch=options.peer_fetch
    )
    placer = Placer(index, policy, options.expect_s, on_assigned, broken_pairs)
    return placer, Admission(options, placer)
