"""PrefillRole: compute the prompt, send token 0 to the router and the pages to decode.

A room's life here, with what it holds:

    scheduler ──prefilled──> hand_off ──every page has landed──> over; KVDone is sent until confirmed
    (row, locked   │  ▲      (the same)      ▲
     pages)        │  │                      │ KVTarget, and all of it is cached: locked on device and host
                   │  │ KVTarget: match again, recompute what was evicted
                   ▼  │                      │
                 parked (nothing unevictable)

A room without a target must hold nothing unevictable after its forward. Otherwise a prefill worker full of
rooms without targets and a decode worker full of reservations would wait for each other for ever
(docs/decisions/0016-failures.md).
"""

from __future__ import annotations

import time

from common.errors import TransferError
from kvtransfer.sender import Sent
from prefill_node.room import PrefillHold, PrefillRoom
from scheduler.config import Phase
from scheduler.node_policy import AfterPrefill
from scheduler.req import Req, ReqState
from wire.mailbox import Mail
from wire.messages.base import Receipt, kind_of
from wire.messages.rooms import Prefill, RejectKind
from wire.messages.transfer import KVDone, KVFailed, KVReady, KVTarget, Release
from wire.records import Role
from wire.request import OutputDelta
from wire.retransmitter import RetransmitKey
from wire.stages import RequestStage
from worker.role import WorkerRole
from worker.services import Services
from worker.shipper import PageShipper

_ENDS = ("kv_done", "kv_failed", "release")  # kinds of the messages that tell decode how a room ended


class PrefillRole(WorkerRole[PrefillRoom]):
    """The sending side of the hand-off."""

    name = Role.PREFILL
    accepts = Prefill
    phases = frozenset({Phase.PREFILL})
    reserves = False

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._shipper = PageShipper(services, RequestStage.PREFILL_TRANSFER_KV_CACHE)

    def backends(self) -> tuple[str, ...]:
        return self.transfer.sender.backends

    def close(self) -> None:
        self._shipper.close()

    # -- the room starts ---------------------------------------------------------------------------

    def make_room(self, router: str, req: Req, message: Prefill) -> PrefillRoom:
        return PrefillRoom(req, router, message.decode)

    def begin(self, room: PrefillRoom, now: float) -> None:
        room.req.stamp(RequestStage.PREFILL_BOOTSTRAP)
        parked = self.rooms.unpark(room.room, room.epoch)
        if parked is not None:
            sender, target = parked
            assert isinstance(target, KVTarget)
            if sender != room.decode:
                self.strays.note(sender, target)
            elif not self._aim(room, target):
                return
        self.fetching.add(room.req, room.source, now)

    def handle(self, mail: Mail) -> None:
        target = mail.message
        if not isinstance(target, KVTarget):
            return
        room = self.rooms.get(target.room, target.epoch)
        if room is not None and mail.sender != room.decode:
            self.strays.note(mail.sender, target)
            return
        self.mailbox.send(mail.sender, Receipt(target.room, target.epoch, kind_of(target)))
        if room is None:
            self._park_target(mail.sender, target)
        elif room.sender is None and self._aim(room, target):
            self.questions.end(room.key)
            self._resume(room)

    def _park_target(self, decode: str, target: KVTarget) -> None:
        """Keep the target of a room that has not started here: its Prefill may still be on its way."""
        room, epoch = target.room, target.epoch
        if self.rooms.park(room, epoch, decode, target, time.monotonic()):
            return
        keys = [RetransmitKey(decode, room, epoch, kind) for kind in _ENDS]
        if not any(key in self.retransmitter for key in keys):
            self._tell(decode, KVFailed(target.room, target.epoch, "the room is over on prefill"))

    def _aim(self, room: PrefillRoom, target: KVTarget) -> bool:
        """Open the room's sender. When this worker cannot write to the target, fail the room: False."""
        try:
            room.sender = self._shipper.open(target, room.decode, time.monotonic())
        except TransferError as error:
            self._fail_both(room, str(error))
            return False
        return True

    def _resume(self, room: PrefillRoom) -> None:
        """The target came after the forward: send the KV, or bring it back first if it was given up."""
        assert room.sender is not None, "the target has opened it"
        if room.hold is PrefillHold.PARKED:
            if self._shipper.ship_parked(room.sender, room.req):
                room.hold = PrefillHold.HAND_OFF
            else:
                room.hold = PrefillHold.SCHEDULER
                self.scheduler.hand_off.readmit(room.req)
        elif room.hold is PrefillHold.HAND_OFF:
            self._shipper.ship_rest(room.sender, room.req, room.req.input_len)

    # -- NodePolicy --------------------------------------------------------------------------------

    def on_chunk(self, req: Req) -> None:
        room = self._room_of(req)
        if room.sender is not None:
            self._shipper.ship_committed(room.sender, req)

    def on_tokens(self, req: Req, start: int, delta: OutputDelta) -> None:
        room = self._room_of(req)
        assert len(delta.tokens) == 1, "a prefill worker samples one token per room"
        room.first_token = delta.tokens[0]
        room.first_logprobs = delta.logprobs[0] if delta.logprobs else None
        if delta.finish is not None:  # token 0 ended the request: decode gets Release instead of KV
            room.stop_sending()
            self._tell(room.decode, Release(room.room, room.epoch))
        super().on_tokens(req, start, delta)

    def on_prefilled(self, req: Req) -> AfterPrefill:
        room = self._room_of(req)
        room.hold = PrefillHold.HAND_OFF
        if room.sender is not None:
            self._shipper.ship_rest(room.sender, req, req.input_len)
        return AfterPrefill.HAND_OFF

    def _room_of(self, req: Req) -> PrefillRoom:
        room = self.rooms.get(req.room, req.epoch)
        assert room is not None, "the scheduler only runs rooms that are registered"
        return room

    # -- shipping ----------------------------------------------------------------------------------

    def poll(self, now: float) -> None:
        for room in self.rooms.active():
            if room.hold is PrefillHold.SCHEDULER and room.sender is not None:
                if room.req.state is ReqState.WAITING and not room.looked_below:
                    room.looked_below = True
                    self._shipper.ship_cached(room.sender, room.req)
                self._shipper.ship_committed(room.sender, room.req)
            elif room.hold is PrefillHold.HAND_OFF and room.sender is None:
                room.hold = PrefillHold.PARKED
                self.scheduler.hand_off.park(room.req)
                self.questions.ask(room.decode, KVReady(room.room, room.epoch), now)
        for sent in self._shipper.take_sent(now):
            self._take_sent(sent)

    def sweep(self, now: float) -> None:
        for key, decode in self.questions.tick(now):
            room = self.rooms.get(*key)
            assert room is not None, "a room that ends takes its question with it"
            self.fail(room, RejectKind.FAILED, "decode does not say where the KV should go", decode)
        for decode, target in self.rooms.take_unclaimed(now):
            assert isinstance(target, KVTarget)
            reason = "prefill was not asked to compute this room"
            self._tell(decode, KVFailed(target.room, target.epoch, reason))

    def _take_sent(self, sent: Sent) -> None:
        """A room's sending is over: every page has landed, or the transfer failed."""
        room = self.rooms.get(sent.room, sent.epoch)
        if room is None:
            return  # aborted
        if sent.error is not None:
            self._fail_both(room, f"KV transfer failed: {sent.error}", blameless=sent.aborted)
            return
        assert room.first_token is not None
        self.scheduler.hand_off.release(room.req)
        self.end(room)
        done = KVDone(
            room.room,
            room.epoch,
            context_tokens=room.req.input_len,
            first_token=room.first_token,
            kv_bytes=sent.kv_bytes,
            logprobs=room.first_logprobs,
            cached_tokens=room.req.cached_tokens,
            checksums=sent.checksums,
        )
        self._tell(room.decode, done)

    # -- the room ends early -----------------------------------------------------------------------

    def abandon(self, room: PrefillRoom) -> None:
        room.stop_sending()
        if room.hold is PrefillHold.HAND_OFF:
            self.scheduler.hand_off.release(room.req)
        elif room.hold is PrefillHold.SCHEDULER:
            self.scheduler.abort(room.room, room.epoch)

    def _fail_both(self, room: PrefillRoom, reason: str, blameless: bool = False) -> None:
        """The hand-off has failed: tell the router and decode. `blameless`: only this worker has to do with
        it, so neither names the other."""
        self.fail(room, RejectKind.FAILED, reason, "" if blameless else room.decode)
        self._tell(room.decode, KVFailed(room.room, room.epoch, reason, blameless))

    def _tell(self, decode: str, message: KVDone | KVFailed | Release) -> None:
        """Send a message to decode, and again until decode confirms it."""
        key = RetransmitKey(decode, message.room, message.epoch, kind_of(message))
        self.retransmitter.say(key, message, time.monotonic(), self.options.hand_off_timeout_s)
