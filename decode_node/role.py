"""DecodeRole: reserve pages, receive the KV, generate.

    bootstrap ──reserved──> waiting ──KVDone──> scheduler ──finish──> over
    (nothing)               (row, pages,        (decode batch)
                             writable by P)

A reservation that ends without its KV cannot be freed at once: prefill may still be writing to it. Its pages
are quarantined until the transport's fence has passed (docs/decisions/0004-fences.md).
"""

from __future__ import annotations

import time
from collections import deque

from common.errors import TransferError
from common.host import host_identity
from decode_node.room import DecodeHold, DecodeRoom
from kvtransfer.receiver import KVReceiver
from kvtransfer.region import pool_regions
from kvtransfer.select import open_receiver
from kvtransfer.transport import Bounds, Fence
from scheduler.config import Phase
from scheduler.node_policy import AfterPrefill
from scheduler.req import Req
from wire.mailbox import Mail
from wire.messages import (
    Decode,
    GroupTarget,
    KVDone,
    KVFailed,
    KVTarget,
    Receipt,
    RejectKind,
    Release,
    Reserved,
    Timeline,
    kind_of,
)
from wire.records import Role, layout_digest
from wire.retransmitter import RetransmitKey
from wire.stages import RequestStage
from worker.outbox import OutputKey
from worker.role import Services, WorkerRole


class DecodeRole(WorkerRole[DecodeRoom]):
    """The receiving side of the hand-off."""

    name = Role.DECODE
    accepts = Decode
    phases = frozenset(Phase)
    shared_pool = True

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
        self._bootstrap: deque[DecodeRoom] = deque()  # FIFO: no later room passes one that waits
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
        deadline = time.monotonic() + self.options.hand_off_timeout_s
        return DecodeRoom(req, router, message.prefill, deadline, hold)

    def begin(self, room: DecodeRoom) -> None:
        if room.prefill is None:
            self.scheduler.add(room.req)
            return
        room.req.stamp(RequestStage.DECODE_BOOTSTRAP)
        self._bootstrap.append(room)

    def on_prefilled(self, req: Req) -> AfterPrefill:  # noqa: ARG002  every request stays here
        return AfterPrefill.DECODE

    def poll(self, now: float) -> None:
        while self._bootstrap and self._try_reserve(self._bootstrap[0], now):
            self._bootstrap.popleft()
        self._lift_quarantine()

    def sweep(self, now: float) -> None:
        for room in self.rooms.active():
            if room.hold is not DecodeHold.SCHEDULER and now >= room.deadline:
                self.fail(room, RejectKind.FAILED, f"no KV arrived in time (room was in {room.hold})")

    def _try_reserve(self, room: DecodeRoom, now: float) -> bool:
        """Reserve the room's pages and tell prefill where they are. Whether the room can leave the queue:
        it is reserved, or it is over."""
        if self.rooms.get(room.room, room.epoch) is not room:
            return True
        if not self.scheduler.hand_off.reserve(room.req):
            return self.rooms.get(room.room, room.epoch) is not room  # on_failed may have ended it
        groups = {
            name: GroupTarget(reserved.first_page, reserved.pages.tolist())
            for name, reserved in room.req.reserved.items()
            if name in self._receivers.regions  # a full group without layers has no bytes to send
        }
        room.receiver = KVReceiver(self._receivers, room.room, room.epoch, room.req.input_len, groups)
        room.hold = DecodeHold.WAITING
        room.deadline = now + self.options.hand_off_timeout_s
        room.req.stamp(RequestStage.DECODE_WAITING)
        self._tell_target(room, groups, now)
        self.tell_router(room, Reserved(room.room, room.epoch))
        return True

    def _tell_target(self, room: DecodeRoom, groups: dict[str, GroupTarget], now: float) -> None:
        """Send prefill the room's KVTarget, and again until prefill confirms it."""
        assert room.prefill is not None
        target = KVTarget(
            room.room,
            room.epoch,
            decode=self.worker_id,
            host=self._host,
            layout=self._layout,
            endpoints=self._receivers.endpoints,
            groups=groups,
        )
        key = RetransmitKey(room.prefill, room.room, room.epoch, kind_of(target))
        self.retransmitter.say(key, target, now, self.options.hand_off_timeout_s)

    # -- the KV arrives, or does not ---------------------------------------------------------------

    def handle(self, mail: Mail) -> None:
        match mail.message:
            case KVDone() | KVFailed() | Release() as message:
                self.mailbox.send(mail.sender, Receipt(message.room, message.epoch, kind_of(message)))
                room = self.rooms.get(message.room, message.epoch)
                if room is not None and room.hold is not DecodeHold.SCHEDULER:
                    self._hand_off_ended(room, message)

    def _hand_off_ended(self, room: DecodeRoom, message: KVDone | KVFailed | Release) -> None:
        self.retransmitter.forget_room(room.room, room.epoch)
        match message:
            case KVDone():
                self._commit(room, message)
            case KVFailed():
                self.fail(room, RejectKind.FAILED, message.reason)
            case Release():  # token 0 ended the request, and prefill has told the router
                self.end(room)
                self.abandon(room)

    def _commit(self, room: DecodeRoom, done: KVDone) -> None:
        """Check what has arrived and let the request decode. The room fails when something is wrong."""
        try:
            if room.receiver is None:
                raise TransferError("prefill was done before it was told where to write")
            room.kv_bytes = room.receiver.commit(done, verify=self.options.kv_checksums)
        except TransferError as error:
            self.fail(room, RejectKind.FAILED, str(error))
            return
        room.hold = DecodeHold.SCHEDULER
        room.req.stamp(RequestStage.DECODE_TRANSFERRED)
        self.scheduler.hand_off.add_transferred(room.req, done.first_token, done.logprobs, done.cached_tokens)

    # -- the room ends -----------------------------------------------------------------------------

    def abandon(self, room: DecodeRoom) -> None:
        match room.hold:
            case DecodeHold.BOOTSTRAP:
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
