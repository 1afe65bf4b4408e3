"""DecodeRole: reserve pages, receive the KV, generate.

    bootstrap ──reserved──> waiting ──KVDone──> scheduler ──finish──> over
    (nothing)               (row, pages,        (decode batch)
                             writable by P)

A reservation that ends without its KV cannot be freed at once: prefill may still be writing to it. Its pages
are quarantined until the transport's fence has passed (docs/decisions/0004-fences.md).
"""

from __future__ import annotations

import logging

from msgspec.structs import replace

from common.errors import PageDiffers, TransferError
from decode_node.moves import MOVE_SLACK_TOKENS, Moves
from decode_node.pausing import DecodePausing
from decode_node.room import DecodeHold, DecodeRoom
from kvtransfer.receiver import KVReceiver
from scheduler.config import Phase
from scheduler.node_policy import AfterPrefill
from scheduler.queue import WaitingQueue
from scheduler.req import Req
from wire.mailbox import Mail
from wire.messages.base import Receipt, kind_of
from wire.messages.rooms import Abort, Decode, RejectKind, Reserved, RoomStatus, Timeline
from wire.messages.transfer import GroupTarget, KVDone, KVFailed, KVReady, KVTarget, Release
from wire.peer_monitors import PeerState
from wire.records import Role
from wire.stages import RequestStage
from worker.holds import QuarantineOwner
from worker.outbox import OutputKey
from worker.quarantine import Quarantine
from worker.role import WorkerRole
from worker.rooms import StartVerdict
from worker.services import Services

log = logging.getLogger(__name__)


class DecodeRole(WorkerRole[DecodeRoom]):
    """The receiving side of the hand-off."""

    name = Role.DECODE
    accepts = Decode
    phases = frozenset(Phase)
    reserves = True
    pausing = DecodePausing

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self.waiting = self._bootstrap = WaitingQueue()  # no later room passes one that waits
        self._moves = Moves(services, self.scheduler.hand_off, self._moved)
        self._quarantine = Quarantine(services.memory)

    def backends(self) -> tuple[str, ...]:
        return self.transfer.receiver.backends

    def close(self) -> None:
        self._moves.close()

    @property
    def busy(self) -> bool:
        return super().busy or bool(self._quarantine)

    # -- the room starts ---------------------------------------------------------------------------

    def make_room(self, router: str, req: Req, message: Decode) -> DecodeRoom:
        hold = DecodeHold.SCHEDULER if message.prefill is None else DecodeHold.BOOTSTRAP
        return DecodeRoom(req, router, message.prefill, hold, is_move=message.move)

    def begin(self, room: DecodeRoom, now: float) -> None:
        if room.prefill is None:
            self.fetching.add(room.req, room.source, now)
            return
        room.req.stamp(RequestStage.DECODE_BOOTSTRAP)
        self.scheduler.hand_off.prefetch(room.req)
        self._bootstrap.push(room.req)

    def on_prefilled(self, req: Req) -> AfterPrefill:  # noqa: ARG002  every request stays here
        return AfterPrefill.DECODE

    def poll(self, now: float) -> None:
        while (head := self._bootstrap.head) is not None:
            room = self.rooms.get(head.room, head.epoch)
            assert room is not None, "a room that ends leaves the queue"
            if self.scheduler.hand_off.reserve(head, MOVE_SLACK_TOKENS if room.is_move else 0):
                self._bootstrap.pop()
                self._reserved(room, now)
            elif self._bootstrap.head is head:
                break  # else it can never fit, and on_failed has ended the room
        self._moves.poll(now)
        self._quarantine.lift()

    def sweep(self, now: float) -> None:
        for key, prefill in self.questions.tick(now):
            room = self.rooms.get(*key)
            assert room is not None, "a room that ends takes its question with it"
            self.fail(room, RejectKind.FAILED, "no KV came from prefill, which does not answer", prefill)
        self._moves.sweep(now)

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
            if name in self.transfer.regions  # a full group without layers has no bytes to send
        }
        room.receiver = KVReceiver(self.transfer.receiver, room.room, room.epoch, room.req.input_len, groups)
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
            host=self.transfer.host,
            layout=self.transfer.layout,
            endpoints=self.transfer.receiver.endpoints,
            groups=groups,
            checksums=self.options.kv_checksums,
            context_tokens=room.req.input_len,
        )
        self.questions.ask(room.prefill, target, now)

    def on_peer(self, address: str, state: PeerState, is_lost: bool) -> None:
        super().on_peer(address, state, is_lost)
        if is_lost:
            self._moves.on_lost(address)

    # -- the KV arrives, or does not ---------------------------------------------------------------

    def handle(self, mail: Mail) -> None:
        match mail.message:
            case KVTarget() as target:
                self._moves.on_target(mail.sender, target)
            case KVDone() | KVFailed() | Release() as message:
                room = self.rooms.get(message.room, message.epoch)
                if room is not None and room.hold is not DecodeHold.SCHEDULER:
                    if mail.sender != room.prefill:
                        self.strays.note(mail.sender, message)
                        return
                    self._hand_off_ended(room, message)
                elif isinstance(message, KVFailed):
                    self._moves.on_failed(message)
                key = OutputKey(message.room, message.epoch)
                # A Receipt for the KVDone of a room that is not taken over would end it where it is.
                if not isinstance(message, KVDone) or not self._moves.is_refused(mail.sender, key):
                    self.mailbox.send(mail.sender, Receipt(*key, kind_of(message)))
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
                blamed = "" if message.blameless else room.prefill or ""
                self.fail(room, RejectKind.FAILED, f"no KV came from prefill: {message.reason}", blamed)
            case Release():  # token 0 ended the request, and prefill has told the router
                self.end(room)
                self.abandon(room)

    def _commit(self, room: DecodeRoom, done: KVDone) -> None:
        """Check what has arrived and let the request decode. When something is wrong the room fails."""
        hand_off, req = self.scheduler.hand_off, room.req
        try:
            if room.receiver is None:
                raise TransferError("prefill was done before it was told where to write")
            if done.context_tokens > req.kv_allocated_len:
                raise TransferError(f"{done.context_tokens} tokens came where {req.kv_allocated_len} fit")
            expected = hand_off.filled(req, done.context_tokens)
            room.kv_bytes = room.receiver.commit(done, self.options.kv_checksums, expected)
        except TransferError as error:
            if isinstance(error, PageDiffers):
                log.warning("%s: a bad page came from %s: %s", self.worker_id, room.prefill, error)
                self.scheduler.metrics.bad_hand_offs += 1
            self.fail(room, RejectKind.FAILED, str(error), room.prefill or "")
            return
        room.hold = DecodeHold.SCHEDULER
        req.stamp(RequestStage.DECODE_TRANSFERRED)
        hand_off.add_transferred(
            req, done.first_token, done.logprobs, done.cached_tokens, done.output, done.output_logprobs
        )

    # -- the room ends -----------------------------------------------------------------------------

    def _moved(self, room: DecodeRoom) -> None:
        """Another worker has the room's KV, and all of its output that the router may lack."""
        self.fail(room, RejectKind.MOVED, "the room goes on on another worker")
        self.tell_router(room, self.timeline(room))

    def abandon(self, room: DecodeRoom) -> None:
        if self._moves.drop(room):  # the router has heard of it from the other worker first
            self.tell_router(room, self.timeline(room))
        if room.is_move and room.hold is not DecodeHold.SCHEDULER:
            self._moves.refuse(room.prefill or "", room.key, "it was given up where it should go on")
        match room.hold:
            case DecodeHold.BOOTSTRAP:
                self._bootstrap.remove(room.req)
                self.scheduler.hand_off.withdraw(room.req)
            case DecodeHold.WAITING:
                assert room.receiver is not None
                pages = self.scheduler.hand_off.cancel_reservation(room.req)
                owner = QuarantineOwner(room.key, room.prefill or "")
                self._quarantine.hold(owner, pages, room.receiver.abort())
            case DecodeHold.SCHEDULER:
                self.scheduler.abort(room.room, room.epoch)

    def timeline(self, room: DecodeRoom) -> Timeline:
        told = super().timeline(room)
        if not room.kv_bytes or room.receiver is None:
            return told
        landed = room.receiver.landed
        return replace(
            told,
            kv_bytes=room.kv_bytes,
            kv_backend=landed.backend,
            kv_from=room.prefill or "",
            kv_seconds=landed.seconds,
        )
