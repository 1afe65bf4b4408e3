"""ModelledMoves: requests of decode workers that drain go on on others, with their KV.

What the product does (router/streams/move.py, docs/decisions/0025): the other worker reserves memory, the KV
goes over the link while the request is decoded on, and then it pauses for a moment. A request that nobody has
memory for stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from router.placement.placer import Placer
from router.placement.policy import PlacementRequest
from simulator.attempt import Attempt
from simulator.clock import Clock
from simulator.options import SimulationOptions
from simulator.request import Request
from simulator.worker import ModelledWorker
from wire.records import WorkerRecord

_AT_ONCE = 2  # of a worker, as in the product
_PAUSE_S = 0.05  # measured: 40 to 52 ms at the median (docs/decisions/0025)


@dataclass(slots=True)
class _Move:
    """One request on its way."""

    old: Attempt
    new: Attempt
    source: ModelledWorker
    target: ModelledWorker


class ModelledMoves:
    """All moves of one router, at most one per request."""

    def __init__(
        self,
        clock: Clock,
        options: SimulationOptions,
        attempts: dict[int, Attempt],
        placer: Placer,
        placement_request: Callable[[Request], PlacementRequest],
        worker: Callable[[WorkerRecord], ModelledWorker],
    ) -> None:
        """`attempts` are the router's, by request: a request that has moved has another one there."""
        self._clock = clock
        self._options = options
        self._attempts = attempts
        self._placer = placer
        self._placement_request = placement_request
        self._worker = worker
        self._moves: dict[int, _Move] = {}
        self._leaving: set[str] = set()

    def tick(self, records: Mapping[str, WorkerRecord]) -> None:
        """Begin the moves that are due. `records`: the workers that the router knows."""
        self._leaving = {record.id for record in records.values() if record.draining}
        self._begin_due()

    def needs(self, record: WorkerRecord) -> bool:
        """Whether a request is on its way to this worker."""
        return any(move.target.record.id == record.id for move in self._moves.values())

    def drop(self, number: int) -> None:
        """The request has ended, or has lost a worker."""
        move = self._moves.pop(number, None)
        if move is not None:
            move.new.end()
            self._placer.close(move.new.placement, self._clock.now)
            self._clock.after(self._options.message_s, move.target.abort, move.new)

    def lost(self, record: WorkerRecord) -> None:
        """A worker is gone: what was on its way to it stays where it is."""
        for number, move in list(self._moves.items()):
            if move.target.record.id == record.id:
                self.drop(number)

    def reserved(self, new: Attempt) -> None:
        """The other worker has memory: all KV leaves."""
        move = self._moves.get(new.request.number)
        if move is None or move.new is not new:
            return
        tokens = move.old.prompt + move.old.output - move.target.memory.cached_tokens(new)
        size = tokens * self._options.worker.kv_bytes_per_token
        end, _ = move.source.link.send(move.target.link, size, self._clock.now)
        self._clock.at(end, self._landed, move)

    def _begin_due(self) -> None:
        if not self._leaving:
            return
        busy = Counter(move.source.record.id for move in self._moves.values())
        for number, attempt in list(self._attempts.items()):
            source = attempt.placement.decode
            if source.id not in self._leaving or busy[source.id] >= _AT_ONCE or number in self._moves:
                continue
            if attempt.received and self._begin(number, attempt):
                busy[source.id] += 1

    def _begin(self, number: int, old: Attempt) -> bool:
        """Returns False while nobody has memory for it."""
        source, now = old.placement.decode, self._clock.now
        choice = self._placer.choose_decode(
            self._placement_request(old.request), now, frozenset((source.id,))
        )
        if choice is None:
            return False
        placement = self._placer.place(choice, now)
        self._placer.prefilled(placement, now)  # nothing is computed
        new = Attempt(
            old.request, placement, old.prompt, old.output, old.hashes,
            taken_over=True, first_token_sent=True,
        )  # fmt: skip
        target = self._worker(placement.decode)
        self._moves[number] = _Move(old, new, self._worker(source), target)
        self._clock.after(self._options.message_s, target.decode, new)
        return True

    def _landed(self, move: _Move) -> None:
        move.source.hand_over(move.old, move.new, lambda lacking: self._left(move, lacking))

    def _left(self, move: _Move, lacking: int) -> None:
        """The old worker decodes it no longer; `lacking` tokens are to come."""
        old, new, now = move.old, move.new, self._clock.now
        del self._moves[old.request.number]
        made = old.output - 1 - lacking
        old.request.forwarded += made
        new.prompt, new.output, new.last_at = old.prompt + made, lacking + 1, now
        old.end()
        self._placer.close(old.placement, now)
        self._attempts[old.request.number] = new
        old.request.decode = new.placement.decode.id
        self._clock.after(_PAUSE_S, move.target.received, new)
        self._begin_due()
