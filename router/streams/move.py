"""Moves: the rooms of a decode worker that leaves go on on others, with their KV.

The room's next epoch begins on another worker, which takes its KV over from the one that leaves
(decode_node/moves.py). Meanwhile the epoch goes on. With the first token of the next one, or when the old
worker says that the room has moved, the next epoch becomes the room's. Until then any failure ends the move
alone, and another is tried. A room that nobody can take stays until the worker hands it back; then it is
restarted like any other.

Pure but for `RoomMail`: time is passed in, so tests need no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from router.metrics import RoomMetrics
from router.options import RoomOptions
from router.placement.placement import Placement
from router.placement.placer import Placer
from router.placement.policy import PlacementRequest
from router.streams.epoch import RoomEpoch, RoomMail
from router.streams.stream import RoomStream
from router.trace import TraceStore
from wire.messages.base import kind_of
from wire.messages.rooms import Rejected, RejectKind
from wire.messages.transfer import KVFailed
from wire.records import WorkerRecord
from wire.request import GenerateRequest, TokenRun
from wire.retransmitter import RetransmitKey

_AT_ONCE = 2  # moves of one worker: it has as many transfer threads, so that none waits while it is paused
_AGAIN_S = 0.5  # before a room whose move has failed is tried again
_TAKEN_S = 30.0  # a move that takes longer is given up: the other worker may have no memory for long


@dataclass(frozen=True, slots=True)
class RoomMove:
    """One room on its way to another worker."""

    request: GenerateRequest  # of the next epoch
    epoch: RoomEpoch
    source: WorkerRecord
    give_up_at: float
    placer: Placer  # of the room's version


class RoomMoves:
    """All moves of a router, at most one per room. Belongs to one event loop."""

    def __init__(
        self,
        rooms: Mapping[int, RoomStream],
        placer_of: Callable[[int], Placer],
        placement_request: Callable[[RoomStream], PlacementRequest],
        mail: RoomMail,
        options: RoomOptions,
        traces: TraceStore,
        metrics: RoomMetrics,
    ) -> None:
        """`placer_of`: of a room's version. `placement_request`: what it is told of a room that has output
        already."""
        self._rooms = rooms
        self._placer_of = placer_of
        self._placement_request = placement_request
        self._mail = mail
        self._options = options
        self._traces = traces
        self._metrics = metrics
        for state in ("begun", "done", "failed"):
            metrics.moves.begin(state)
        self._leaving: frozenset[str] = frozenset()
        self._decoding: dict[int, Placement] = {}  # rooms that have tokens of their epoch
        self._moves: dict[int, RoomMove] = {}
        self._again_at: dict[int, float] = {}  # of rooms whose move has failed

    # -- which rooms move --------------------------------------------------------------------------

    def leave(self, workers: frozenset[str], now: float) -> None:
        """These, and no others, are the workers whose rooms should go on elsewhere."""
        self._leaving = workers
        self.tick(now)

    def tick(self, now: float) -> None:
        """Begin moves that are due, and give up those that take too long."""
        for number, move in list(self._moves.items()):
            if now >= move.give_up_at:
                self._fail(number, "the room was not taken over in time", now)
        if not self._leaving:
            return
        busy = Counter(move.source.id for move in self._moves.values())
        for number, placement in list(self._decoding.items()):
            worker = placement.decode.id
            if worker not in self._leaving or busy[worker] >= _AT_ONCE or number in self._moves:
                continue
            if now >= self._again_at.get(number, now) and self._begin(number, placement.decode, now):
                busy[worker] += 1

    def decoding(self, room: RoomStream, placement: Placement) -> None:
        """The room has tokens of its epoch, so there is something to move."""
        self._decoding[room.number] = placement

    def left(self, room: RoomStream, now: float) -> None:
        """The room's epoch has ended, and with it its move."""
        self._decoding.pop(room.number, None)
        self._again_at.pop(room.number, None)
        if room.number in self._moves:
            self._drop(room.number, "the room has ended or was started again", now)

    # -- what workers say --------------------------------------------------------------------------

    def is_served_by(self, number: int, mailbox: str) -> bool:
        """Whether the worker at an address takes the room over."""
        move = self._moves.get(number)
        return move is not None and move.epoch.is_served_by(mailbox)

    def on_run(self, run: TokenRun, now: float) -> None:
        """Tokens came. The first ones of a move's epoch make it the room's."""
        move = self._moves.get(run.room)
        if move is not None and run.epoch == move.epoch.number:
            self._taken_over(run.room, now)

    def on_rejected(self, sender: str, message: Rejected, now: float) -> bool:
        """A worker will send nothing (more) for an epoch. Whether that was about a move."""
        move = self._moves.get(message.room)
        if move is None:
            return False
        if message.why is RejectKind.MOVED and sender == move.source.mailbox:
            self._taken_over(message.room, now)
            return True
        if message.epoch == move.epoch.number:
            self._fail(message.room, message.message, now)
            return True
        return False

    def on_given_up(self, key: RetransmitKey, now: float) -> bool:
        """A worker has acknowledged none of the repeats of a message. Whether that was about a move."""
        move = self._moves.get(key.room)
        if move is None or key.epoch != move.epoch.number:
            return False
        self._fail(key.room, "the worker does not answer", now)
        return True

    def on_worker_gone(self, gone: WorkerRecord, now: float) -> None:
        """A worker is lost, or suspected of it: rooms on their way to it stay."""
        for number, move in list(self._moves.items()):
            if move.epoch.placement.decode.id == gone.id:
                self._fail(number, f"worker {gone.id} is gone", now)

    # -- one move ----------------------------------------------------------------------------------

    def _begin(self, number: int, source: WorkerRecord, now: float) -> bool:
        """Begin the room's next epoch on another worker. False while none has memory for it."""
        room, placer = self._rooms[number], self._placer_of(number)
        choice = placer.choose_decode(self._placement_request(room), now, frozenset((source.id,)))
        if choice is None:
            return False
        placement = placer.place(choice, now)
        placer.prefilled(placement, now)  # nothing is computed
        request = room.next_epoch()
        self._traces.placed(number, request.epoch, None, placement.decode.id)
        epoch = RoomEpoch(request, placement, self._mail, self._options, now)
        epoch.begin(request, now, source)
        self._moves[number] = RoomMove(request, epoch, source, now + _TAKEN_S, placer)
        self._metrics.moves.inc(1, "begun")
        return True

    def _taken_over(self, number: int, now: float) -> None:
        move = self._moves.pop(number)
        self._rooms[number].switch(move.request, move.epoch, now)
        self._decoding[number] = move.epoch.placement
        self._metrics.moves.inc(1, "done")
        self.tick(now)

    def _fail(self, number: int, reason: str, now: float) -> None:
        """The room stays where it is, which its worker is told: it may have paused it."""
        move = self._moves[number]
        message = KVFailed(number, move.epoch.number, reason)
        self._drop(number, reason, now)
        self._mail.say(RetransmitKey(move.source.mailbox, number, message.epoch, kind_of(message)), message)
        self._again_at[number] = now + _AGAIN_S
        self._metrics.moves.inc(1, "failed")

    def _drop(self, number: int, reason: str, now: float) -> None:
        """Tell the other worker that it takes nothing over."""
        move = self._moves.pop(number)
        move.placer.close(move.epoch.placement, now)
        move.epoch.leave(reason)
