"""Moves: rooms that go on on another decode worker, with their KV.

The router has started the room's next epoch there. That worker reserves memory and sends a KVTarget here, as
it would to a prefill worker; meanwhile the room decodes on.

    decoding ──what was known has landed──> paused ──the rest has landed──> offered ──Receipt──> moved
    (whole pages leave)                     (no forward changes its KV)     (KVDone is sent)

If anything fails before the Receipt, the room goes on here, in its own epoch. Nothing is computed twice, and
the pause does not depend on how long the context is: only what came since the target is sent in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from common.errors import TransferError
from decode_node.room import DecodeHold, DecodeRoom
from kvtransfer.sender import KVSender, Sent
from scheduler.hand_off import HandOff
from scheduler.req import ReqState
from wire.messages.base import Receipt, kind_of
from wire.messages.transfer import KVDone, KVFailed, KVTarget
from wire.retransmitter import RetransmitKey
from wire.stages import RequestStage
from worker.outbox import OutputKey
from worker.services import Services
from worker.shipper import PageShipper

MOVE_SLACK_TOKENS = 256
"""Tokens that a room may have more, when it is taken over, than the router knew when it began the move."""
_PAUSE_S = 10.0  # a paused room goes on here if it has not been taken over by then


class MoveStage(StrEnum):
    """How far a move is."""

    DECODING = "decoding"
    PAUSED = "paused"
    OFFERED = "offered"


@dataclass(slots=True)
class Move:
    """A room that another worker is about to take over."""

    room: DecodeRoom
    to: str  # mailbox of the worker
    key: OutputKey  # the room and the epoch in which it goes on there
    context_tokens: int  # what the epoch began with; the room must have computed as many
    sender: KVSender
    retractions: int  # of the request, when its pages began to leave
    stage: MoveStage = MoveStage.DECODING
    deadline: float = 0.0  # while it is paused

    @property
    def answer(self) -> RetransmitKey:
        """Names the KVDone."""
        return RetransmitKey(self.to, self.key.room, self.key.epoch, "kv_done")


class Moves:
    """The moves away from this worker, at most one per room. Engine loop's thread only."""

    def __init__(self, services: Services, hand_off: HandOff, on_moved: Callable[[DecodeRoom], None]) -> None:
        """`on_moved` is called when another worker has taken a room over: its request is released."""
        self._services = services
        self._hand_off = hand_off
        self._on_moved = on_moved
        self._moves: dict[OutputKey, Move] = {}  # by room and the epoch that runs here
        self._shipper: PageShipper | None = None  # most workers never need one until they are drained

    def close(self) -> None:
        """End the transfer threads."""
        if self._shipper is not None:
            self._shipper.close()

    # -- messages ----------------------------------------------------------------------------------

    def on_target(self, sender: str, target: KVTarget) -> None:
        """Another worker has reserved memory for a newer epoch of a room."""
        services = self._services
        key = OutputKey(target.room, target.epoch)
        room: DecodeRoom | None = services.rooms.get(target.room)
        if room is None or target.epoch <= max(room.epoch, room.moves_over):
            self.refuse(sender, key, "the room does not decode here, or its move is over")
            return
        known = self._moves.get(room.key)
        if known is not None and known.key != key:
            self._fail(known, "a newer move has begun")
            known = None
        if known is None and room.req.state is ReqState.PAUSED:
            room.moves_over = target.epoch
            self.refuse(sender, key, "the room is paused: its router is gone")
            return
        if known is None and room.hold is DecodeHold.SCHEDULER:  # else the target comes again
            try:
                opened = self._open_shipper().open(target, sender, time.monotonic())
            except TransferError as error:
                self.refuse(sender, key, str(error))
                return
            room.moving_to = sender
            known = Move(room, sender, key, target.context_tokens, opened, room.req.retractions)
            self._moves[room.key] = known
        services.mailbox.send(sender, Receipt(*key, kind_of(target)))

    def on_failed(self, message: KVFailed) -> None:
        """The room is not taken over in this epoch."""
        room: DecodeRoom | None = self._services.rooms.get(message.room)
        move = self._of(message.room, message.epoch)
        if move is not None:
            self._fail(move, message.reason, tell=False)
        elif room is not None:  # its KVTarget may come yet
            room.moves_over = max(room.moves_over, message.epoch)

    def refuse(self, to: str, key: OutputKey, reason: str) -> None:
        """Tell the other worker of a move, until it confirms that, that the room goes on where it is."""
        timeout_s = self._services.options.hand_off_timeout_s
        self._services.retransmitter.say(
            _refusal(to, key), KVFailed(*key, reason), time.monotonic(), timeout_s
        )

    def is_refused(self, to: str, key: OutputKey) -> bool:
        """Whether a worker is being told so."""
        return _refusal(to, key) in self._services.retransmitter

    def on_lost(self, address: str) -> None:
        """A mailbox has gone down. Rooms on their way to that worker stay."""
        for move in list(self._moves.values()):
            if move.to == address:
                self._fail(move, f"{address} is down")

    # -- turns of the loop -------------------------------------------------------------------------

    def poll(self, now: float) -> None:
        """Advance every move by what has landed."""
        shipper = self._shipper
        if shipper is None:
            return
        for sent in shipper.take_sent(now):
            move = self._of(sent.room, sent.epoch)
            if move is not None and move.stage is not MoveStage.OFFERED:
                self._landed(move, sent, now)
        for move in list(self._moves.values()):
            if self._services.rooms.get(*move.room.key) is not move.room:
                self.drop(move.room)  # it has ended
            elif move.stage is MoveStage.DECODING:
                self._advance(shipper, move, now)
            elif move.stage is MoveStage.OFFERED and move.answer not in self._services.retransmitter:
                self.drop(move.room)
                self._on_moved(move.room)

    def sweep(self, now: float) -> None:
        """Paused rooms that nobody takes over go on."""
        for move in list(self._moves.values()):
            if move.stage is not MoveStage.DECODING and now >= move.deadline:
                self._fail(move, "the room was not taken over in time")

    def drop(self, room: DecodeRoom) -> bool:
        """Forget the room's move, if there is one: the room ends here. Its request is the caller's. Returns
        whether another worker had everything."""
        move = self._moves.pop(room.key, None)
        if move is not None:
            room.moving_to, room.moves_over = None, move.key.epoch
            move.sender.abort("the move is over")
            self._services.retransmitter.answered(move.answer)
        return move is not None and move.stage is MoveStage.OFFERED

    # -- one move ----------------------------------------------------------------------------------

    def _advance(self, shipper: PageShipper, move: Move, now: float) -> None:
        """Send what is computed; when that has landed, pause the room and send the rest."""
        req = move.room.req
        if req.retractions != move.retractions:
            self._fail(move, "the room's memory was taken away while it was sent")
            return
        if not move.sender.idle:
            return
        before = move.sender.start_send_idx
        shipper.ship_committed(move.sender, req)
        if move.sender.start_send_idx - before > MOVE_SLACK_TOKENS:
            return  # more than a pause should wait for
        if req.kv_committed_len < move.context_tokens or not self._hand_off.pause(req):
            return  # what the router forced is not computed here yet, or the request waits for memory
        req.stamp(RequestStage.DECODE_PAUSED)
        move.stage, move.deadline = MoveStage.PAUSED, now + _PAUSE_S
        shipper.ship_rest(move.sender, req, req.kv_committed_len)

    def _landed(self, move: Move, sent: Sent, now: float) -> None:
        if sent.error is not None:
            self._fail(move, sent.error)
            return
        req = move.room.req
        first = move.context_tokens - req.prompt_len  # output that is new to the other worker
        *output, last = req.output_ids[first:]
        known = self._services.outbox.logprobs(move.room.key, first)
        done = KVDone(
            *move.key,
            context_tokens=req.kv_committed_len,
            first_token=last,
            kv_bytes=sent.kv_bytes,
            logprobs=known[-1] if known else None,
            cached_tokens=req.cached_tokens,
            checksums=sent.checksums,
            output=output,
            output_logprobs=known[:-1],
        )
        move.stage = MoveStage.OFFERED
        self._services.retransmitter.say(move.answer, done, now, 2 * _PAUSE_S)

    def _fail(self, move: Move, reason: str, tell: bool = True) -> None:
        """The room goes on here. `tell`: the other worker does not know yet."""
        self.drop(move.room)
        if move.stage is not MoveStage.DECODING:
            self._hand_off.resume(move.room.req)
        if tell:
            self.refuse(move.to, move.key, reason)

    def _of(self, room: int, epoch: int) -> Move | None:
        """The move of which a message speaks."""
        running = self._services.rooms.get(room)
        move = None if running is None else self._moves.get(running.key)
        return move if move is not None and move.key.epoch == epoch else None

    def _open_shipper(self) -> PageShipper:
        if self._shipper is None:
            self._shipper = PageShipper(self._services, RequestStage.DECODE_TRANSFER_KV_CACHE)
        return self._shipper


def _refusal(to: str, key: OutputKey) -> RetransmitKey:
    """Names the KVFailed."""
    return RetransmitKey(to, *key, "kv_failed")
