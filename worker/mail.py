"""MailHandler: what a worker does with each message from routers, other workers and the directory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from common.errors import UserError, WireError
from scheduler.req import Req, RequestLimits
from wire.mailbox import Mail
from wire.messages.base import Receipt, kind_of
from wire.messages.caches import ClearCache, ForgetTenant, Inspect, Inspected
from wire.messages.directory import Announced, AnnounceRefused, Joined, Replaced, RoleSet, SetRole
from wire.messages.rooms import Abort, Ack, Claim, Claimed, Decode, Prefill, Rejected, RejectKind, Resend
from wire.messages.transfer import Fetch, Fetched, FetchRefused, KVTarget
from wire.records import Role
from wire.retransmitter import RetransmitKey
from worker.clearing import CacheClearing
from worker.drain import Drain
from worker.forgetting import TenantForgetting
from worker.heartbeat import DirectoryAnswer, Heartbeat
from worker.holds import hold_report
from worker.inspection import worker_report
from worker.orphans import CLAIMED
from worker.outbox import OutputKey
from worker.role import WorkerRole
from worker.rooms import StartVerdict
from worker.services import Services


def keep_role(role: Role) -> str:
    """What a worker answers whose role is not to be changed."""
    return f"its role is fixed: it cannot become a {role} worker"


class MailHandler:
    """Starts, aborts and repeats rooms; KV-control messages go to the role. Engine loop's thread only."""

    def __init__(
        self,
        services: Services,
        role: WorkerRole[Any],
        limits: RequestLimits,
        drain: Drain,
        heartbeat: Heartbeat | None,
        set_role: Callable[[Role], str],
        forgetting: TenantForgetting,
    ) -> None:
        """`set_role`: see Worker."""
        self._services = services
        self._role = role
        self._limits = limits
        self._drain = drain
        self._heartbeat = heartbeat
        self._set_role = set_role
        self._clearing = CacheClearing(services.memory, services.mailbox.send)
        self._forgetting = forgetting

    def handle(self, mail: Mail) -> None:
        """Act on one message. A repeated message is answered like the first."""
        services = self._services
        self._role.orphans.heard(mail.sender, time.monotonic())
        if isinstance(mail.message, KVTarget | Fetch):
            # It waits for pages. This worker's own connection to it may not be there again yet.
            services.transfer.on_up(mail.sender)
        match mail.message:
            case Prefill() | Decode() as message:
                self._start_room(mail.sender, message)
            case Abort() as message:
                services.mailbox.send(mail.sender, Receipt(message.room, message.epoch, kind_of(message)))
                self._abort(mail.sender, message)
            case Claim() as message:
                claimed = self._role.orphans.claim(mail.sender, message.rooms)
                services.mailbox.send(mail.sender, Claimed(message.token, claimed))
            case Receipt() as message:
                key = RetransmitKey(mail.sender, message.room, message.epoch, message.of)
                services.retransmitter.answered(key)
                services.questions.answered(
                    OutputKey(message.room, message.epoch), mail.sender, time.monotonic()
                )
            case Ack() as message:
                services.outbox.ack(mail.sender, message.items)
            case Resend() as message:
                self._resend(mail.sender, message)
            case Inspect() as message:
                report = self._report(message.what)
                services.mailbox.send(mail.sender, Inspected(message.token, report))
            case ClearCache() as message:
                self._clearing.clear(mail.sender, message)
            case ForgetTenant() as message:
                self._forgetting.forget(mail.sender, message)
            case Joined() | Announced() | AnnounceRefused() | Replaced() as message:
                self._on_directory(mail.sender, message)
            case Fetch() as message:
                fetch = self._forgetting.current_fetch(message)
                self._role.lending.on_fetch(mail.sender, fetch, time.monotonic())
            case Fetched() | FetchRefused() as message:
                self._role.fetching.on_answer(mail.sender, message, time.monotonic())
            case SetRole() as message:
                self._on_set_role(mail.sender, message)
            case _:
                self._role.handle(mail)

    def _report(self, what: str) -> str:
        services = self._services
        if what == "leases":
            now = time.monotonic()
            peers = [*self._role.fetching.holds(now), *self._role.lending.holds(now)]
            return msgspec.json.encode(hold_report(services, now, peers)).decode()
        return worker_report(what, services.memory, self._role.scheduler, services.rooms)

    def _on_directory(self, sender: str, answer: DirectoryAnswer) -> None:
        if self._heartbeat is None or not self._heartbeat.is_from_directory(sender):
            return
        if isinstance(answer, Replaced):
            if not self._heartbeat.replaces(answer):
                return
            self._drain.begin(time.monotonic(), 0.0)  # takes no new rooms; those that run go back at once
            for room in self._services.rooms.active():
                problem = f"another process has joined as {self._services.worker_id}"
                self._role.fail(room, RejectKind.DRAINING, problem)
        if isinstance(answer, Announced):
            self._forgetting.learn(answer.settings.tenants)
        self._heartbeat.on_answer(answer)

    def _on_set_role(self, sender: str, message: SetRole) -> None:
        """Only the directory may ask: its word decides which worker does what."""
        if self._heartbeat is None or not self._heartbeat.is_from_directory(sender):
            return
        same = message.role is self._role.name and not self._drain.begun
        problem = "" if same else self._set_role(message.role)
        self._services.mailbox.send(sender, RoleSet(self._services.worker_id, message.role, problem))

    def _start_room(self, router: str, message: Prefill | Decode) -> None:
        services, room, epoch = self._services, message.room, message.epoch
        services.mailbox.send(router, Receipt(room, epoch, kind_of(message)))
        if services.rooms.admission(room, epoch) is not StartVerdict.NEW:
            return
        older = services.rooms.get(room)
        if older is not None and older.router != router:
            services.mailbox.send(router, Rejected(room, epoch, RejectKind.CLAIMED, CLAIMED))
            return
        if older is not None:
            self._abort_room(room, older.epoch)
        req = self._checked(message)
        if isinstance(req, Rejected):
            services.rooms.end(room, epoch, time.monotonic())
            services.mailbox.send(router, req)
            return
        if req.sampling.grammar is not None:
            req.sampling.grammar.when_compiled(services.mailbox.nudge)
        started = self._role.make_room(router, req, message)
        started.source = message.source
        services.rooms.start(started)
        self._role.begin(started, time.monotonic())

    def _checked(self, message: Prefill | Decode) -> Req | Rejected:
        """The request of a start message, or the answer that refuses it."""
        worker = self._services.worker_id
        why, problem = RejectKind.INVALID, ""
        if not isinstance(message, self._role.accepts):
            problem = f"{worker} is a {self._role.name} worker and takes no {kind_of(message)}"
        elif self._drain.begun:
            why, problem = RejectKind.DRAINING, f"worker {worker} is leaving"
        else:
            try:
                request = self._forgetting.current(message.request)
                return Req.from_request(request, self._services.options.model_name, self._limits)
            except (UserError, WireError) as error:
                problem = str(error)
        return Rejected(message.room, message.epoch, why, problem)

    def _abort(self, sender: str, message: Abort) -> None:
        """This ends an older epoch of the room, too, but none that another router has claimed, and drops no
        output that another router may ask for."""
        room, outbox = self._services.rooms.get(message.room), self._services.outbox
        if room is None and outbox.is_of_another(sender, OutputKey(message.room, message.epoch)):
            return
        if room is None or room.epoch > message.epoch or sender in room.peers:
            self._abort_room(message.room, message.epoch)

    def _abort_room(self, room: int, epoch: int) -> None:
        self._forget(OutputKey(room, epoch))
        ended = self._services.rooms.end(room, epoch, time.monotonic())
        if ended is not None:
            self._forget(ended.key)  # of an older epoch, if the message that starts this one was lost
            self._role.abandon(ended)

    def _forget(self, key: OutputKey) -> None:
        services = self._services
        services.retransmitter.forget_room(key.room, key.epoch)
        services.questions.end(key)
        services.outbox.discard(key)

    def _resend(self, router: str, message: Resend) -> None:
        services, room, epoch = self._services, message.room, message.epoch
        if services.outbox.resend(router, OutputKey(room, epoch), message.start):
            return
        active = services.rooms.get(room, epoch)
        if active is not None and active.router == router:
            services.mailbox.send(router, self._role.status(active))
        elif active is not None:
            services.mailbox.send(router, Rejected(room, epoch, RejectKind.CLAIMED, CLAIMED))
        else:
            problem = f"worker {services.worker_id} does not run this room"
            services.mailbox.send(router, Rejected(room, epoch, RejectKind.UNKNOWN, problem))
