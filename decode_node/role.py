"""DecodeRole: reserve pages, receive the KV, generate.

    bootstrap ──reserved──> waiting ──KVDone──> scheduler ──finish──> over
    (nothing)               (row, pages,        (decode batch)
                             writable by P)

A reservation that ends without its KV cannot be freed at once: prefill may still be writing to it. Its pages
are quarantined until the transport's fence has passed (docs/decisions/0004-fences.md).
"""

from __future__ import annotations

import logging

from common.errors import PageDiffers, TransferError
from common.host import host_identity
from decode_node.pausing import DecodePausing
from decode_node.room import DecodeHold, DecodeRoom
from kvtransfer.receiver import KVReceiver
from kvtransfer.region import pool_regions
from kvtransfer.select import open_receiver
from kvtransfer.transport import Bounds, Fence
from scheduler.config import Phase
from scheduler.node_policy import AfterPrefill
from scheduler.queue import WaitingQueue
from scheduler.req import Req
from wire.mailbox import Mail
from wire.messages import (
    Abort,
    Decode,
    GroupTarget,
    KVDone,
    KVFailed,
    KVReady,
    KVTarget,
    Receipt,
    RejectKind,
    Release,
    Reserved,
    RoomStatus,
    Timeline,
    kind_of,
)
from wire.records import Role, layout_digest
from wire.stages import RequestStage
from worker.outbox import OutputKey
from worker.role import Services, WorkerRole
from worker.rooms import StartVerdict

log = logging.getLogger(__name__)


class DecodeRole(WorkerRole[DecodeRoom]):
    """The receiving side of the hand-off."""

    name = Role.DECODE
    accepts = Decode
    phases = frozenset(Phase)
    shared_pool = True
    pausing = DecodePausing

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._receivers = open_receiver(
            pool_regions(services.memory),
            self.options.kv_transfer_backend,
            self.options.interface,
            Bounds(write_s=self.options.transfer_timeout_s),
        )
        self._host = host_identity()
        self._layout = layout_digest(services.memory.layouts())
        self._bootstrap = WaitingQueue()  # no later room passes one that waits
        self._fences: dict[OutputKey, Fence] = {}  # of rooms whose pages are quarantined

    def backends(self) -> tuple[str, ...]:
        return self._receivers.backends

    def close(self) -> None:
        self._receivers.close()

    @property
    def busy(self) -> bool:
        return bool(self._fences)

    # -- the room starts ---------------------------------------------------------------------------

    def make_room(self, router: str, req: Req, message: Decode) -> DecodeRoom:
        hold = DecodeHold.SCHEDULER if message.prefill is None else DecodeHold.BOOTSTRAP
        return DecodeRoom(req, router, message.prefill, hold)

    def begin(self, room: DecodeRoom) -> None:
        if room.prefill is None:
            self.scheduler.add(room.req)
            return
        room.req.stamp(RequestStage.DECODE_BOOTSTRAP)
        self._bootstrap.push(room.req)

    def on_prefilled(self, req: Req) -> AfterPrefill:  # noqa: ARG002  every request stays here
        return AfterPrefill.DECODE

    def poll(self, now: float) -> None:
        while (head := self._bootstrap.head) is not None:
            if self.scheduler.hand_off.reserve(head):
                room = self.rooms.get(head.room, head.epoch)
                assert room is not None, "a room that ends leaves the queue"
                self._bootstrap.pop()
                self._reserved(room, now)
            elif self._bootstrap.head is head:
                break  # else it can never fit, and on_failed has ended the room
        self._lift_quarantine()

    def sweep(self, now: float) -> None:
        for key, prefill in self.questions.tick(now):
            room = self.rooms.get(*key)
            assert room is not None, "a room that ends takes its question with it"
            self.fail(room, RejectKind.FAILED, "no KV came from prefill, which does not answer", prefill)

    def status(self, room: DecodeRoom) -> RoomStatus:
        if room.hold is DecodeHold.BOOTSTRAP:
            place = self._bootstrap.place(room.req)
            return RoomStatus(room.room, room.epoch, room.req.stage, place)
        return super().status(room)

    def _reserved(self, room: DecodeRoom, now: float) -> None:
        """The room has its pages: tell prefill where they are."""
        groups = {
            name: GroupTarget(reserved.first_page, reserved.pages.tolist())
            for name, reserved in room.req.reserved.items()
            if name in self._receivers.regions  # a full group without layers has no bytes to send
        }
        room.receiver = KVReceiver(self._receivers, room.room, room.epoch, room.req.input_len, groups)
        room.hold = DecodeHold.WAITING
        room.req.stamp(RequestStage.DECODE_WAITING)
        self._tell_target(room, groups, now)
        self.tell_router(room, Reserved(room.room, room.epoch))

    def _tell_target(self, room: DecodeRoom, groups: dict[str, GroupTarget], now: float) -> None:
        """Send prefill the room's KVTarget, and again until the KV is here."""
        assert room.prefill is not None
        target = KVTarget(
            room.room,
            room.epoch,
            decode=self.worker_id,
            host=self._host,
            layout=self._layout,
            endpoints=self._receivers.endpoints,
            groups=groups,
            checksums=self.options.kv_checksums,
        )
        self.questions.ask(room.prefill, target, now)

    # -- the KV arrives, or does not ---------------------------------------------------------------

    def handle(self, mail: Mail) -> None:
        match mail.message:
            case KVDone() | KVFailed() | Release() as message:
                self.mailbox.send(mail.sender, Receipt(message.room, message.epoch, kind_of(message)))
                room = self.rooms.get(message.room, message.epoch)
                if room is not None and room.hold is not DecodeHold.SCHEDULER:
                    self._hand_off_ended(room, message)
            case KVReady() as message:
                self._tell_whether_known(mail.sender, message)

    def _tell_whether_known(self, prefill: str, message: KVReady) -> None:
        """Answer a prefill worker that waits for a KVTarget. No answer to a Decode that has not come yet."""
        room, epoch = message.room, message.epoch
        if self.rooms.get(room, epoch) is not None:
            self.mailbox.send(prefill, Receipt(room, epoch, kind_of(message)))
        elif self.rooms.admission(room, epoch) is StartVerdict.STALE:
            self.mailbox.send(prefill, Abort(room, epoch, "the room is over on decode"))

    def _hand_off_ended(self, room: DecodeRoom, message: KVDone | KVFailed | Release) -> None:
        self.questions.end(room.key)
        self.retransmitter.forget_room(room.room, room.epoch)
        match message:
            case KVDone():
                self._commit(room, message)
            case KVFailed():
                self.fail(
                    room, RejectKind.FAILED, f"no KV came from prefill: {message.reason}", room.prefill or ""
                )
            case Release():  # token 0 ended the request, and prefill has told the router
                self.end(room)
                self.abandon(room)

    def _commit(self, room: DecodeRoom, done: KVDone) -> None:
        """Check what has arrived and let the request decode. The room fails when something is wrong."""
        try:
            if room.receiver is None:
                raise TransferError("prefill was done before it was told where to write")
            room.kv_bytes = room.receiver.commit(done, self.options.kv_checksums)
        except TransferError as error:
            if isinstance(error, PageDiffers):
                log.warning("%s: a bad page came from %s: %s", self.worker_id, room.prefill, error)
                self.scheduler.metrics.bad_hand_offs += 1
            self.fail(room, RejectKind.FAILED, str(error), room.prefill or "")
            return
        room.hold = DecodeHold.SCHEDULER
        room.req.stamp(RequestStage.DECODE_TRANSFERRED)
        self.scheduler.hand_off.add_transferred(room.req, done.first_token, done.logprobs, done.cached_tokens)

    # -- the room ends -----------------------------------------------------------------------------

    def abandon(self, room: DecodeRoom) -> None:
        match room.hold:
            case DecodeHold.BOOTSTRAP:
                self._bootstrap.remove(room.req)
                self.scheduler.hand_off.withdraw(room.req)
            case DecodeHold.WAITING:
                self._quarantine(room)
            case DecodeHold.SCHEDULER:
                self.scheduler.abort(room.room, room.epoch)

    def _quarantine(self, room: DecodeRoom) -> None:
        """Cancel the reservation; its pages are free once no write to them can be in progress."""
        assert room.receiver is not None
        self.memory.quarantine(self.scheduler.hand_off.cancel_reservation(room.req), room.key)
        self._fences[room.key] = room.receiver.abort()
        self._lift_quarantine()

    def _lift_quarantine(self) -> None:
        for key, fence in list(self._fences.items()):
            if fence.passed:
                del self._fences[key]
                self.memory.release_quarantine(key)

    def timeline(self, room: DecodeRoom) -> Timeline:
        backend = room.receiver.landed.backend if room.receiver is not None else ""
        return Timeline(room.room, room.epoch, self.worker_id, room.req.stamps, room.kv_bytes, backend)
