"""Claims: finds the rooms of a stream whose router is gone, and takes them over (docs/resuming.md).

Every decode worker is asked: a room may have moved since its stream's ids were signed, and the choices of one
request may be on several workers. A worker that has a room sends its output to the asker from then on. When
one of a request's rooms is not found, all are given up, and the request is computed again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import count
from typing import NamedTuple

from common.errors import Interrupted
from router.streams.dispatcher import Dispatcher
from router.streams.stream import RoomStream
from wire.messages.any_message import AnyMessage
from wire.messages.rooms import Abort, Claim, Claimed
from wire.records import WorkerRecord
from wire.retransmitter import RetransmitKey

_REPEAT_S = 0.25


class FoundRoom(NamedTuple):
    """A room that a worker sends to this router from now on."""

    worker: WorkerRecord
    epoch: int
    forced: int  # the worker has no log-probabilities of so many tokens at the beginning
    newest: int  # epochs up to this one may have been used before


class _Asked:
    """One request's rooms."""

    def __init__(self, rooms: list[int]) -> None:
        self.rooms = rooms
        self.workers: dict[str, WorkerRecord] = {}  # that were asked, by mailbox
        self.answered: set[str] = set()
        self.found: dict[int, list[FoundRoom]] = {}
        self.superseded = False
        self.over = asyncio.get_running_loop().create_future()

    @property
    def complete(self) -> bool:
        """Every room was found."""
        return len(self.found) == len(self.rooms)

    def silent(self, workers: Iterable[WorkerRecord]) -> list[str]:
        """The mailboxes of those that have not answered. They are asked now."""
        self.workers |= {worker.mailbox: worker for worker in workers}
        return [mailbox for mailbox in self.workers if mailbox not in self.answered]

    def take(self, sender: str, message: Claimed) -> None:
        """An answer. A repeated one changes nothing."""
        worker = self.workers.get(sender)
        if worker is None or sender in self.answered:
            return
        self.answered.add(sender)
        for room in message.rooms:
            self.found.setdefault(room.room, []).append(
                FoundRoom(worker, room.epoch, room.forced, max(room.epoch, room.newest))
            )
        if self.complete or len(self.answered) == len(self.workers):
            self.end()

    def end(self) -> None:
        """Wait no longer."""
        if not self.over.done():
            self.over.set_result(None)

    def supersede(self) -> None:
        """A later request asks for these rooms."""
        self.superseded = True
        self.end()


class Claims:
    """The questions that wait for answers. Belongs to one event loop."""

    def __init__(self, dispatcher: Dispatcher, send: Callable[[str, AnyMessage], None]) -> None:
        self._dispatcher = dispatcher
        self._send = send
        self._tokens = count(1)
        self._asked: dict[int, _Asked] = {}

    async def ask(
        self, rooms: list[int], workers: Callable[[], Iterable[WorkerRecord]], timeout_s: float
    ) -> dict[int, FoundRoom]:
        """Claim all of the rooms. Returns {} when one is not found within `timeout_s`.

        `workers` returns whom to ask. It is called again and again: this router may have started just now and
        know nobody. Call `take_over` or `give_up` with the result before anything else is awaited.

        A client may have given up a connection, unnoticed so far, and ask again: the later request gets the
        rooms. The earlier one raises Interrupted.
        """
        for earlier in self._asked.values():
            if not set(rooms).isdisjoint(earlier.rooms):
                earlier.supersede()
        asked = _Asked(rooms)
        token = next(self._tokens)
        self._asked[token] = asked
        self._dispatcher.foreign.update(rooms)  # a worker's first tokens may come before the rooms are here
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        try:
            while not asked.over.done() and loop.time() < deadline:
                for mailbox in asked.silent(workers()):
                    self._send(mailbox, Claim(rooms, token))
                await asyncio.wait([asked.over], timeout=_REPEAT_S)
        finally:
            del self._asked[token]
            self.disown(rooms)
        if asked.superseded:
            self._give_up_unasked(asked)
            raise Interrupted("the client goes on with this stream on another connection")
        latest = {number: max(found, key=lambda one: one.epoch) for number, found in asked.found.items()}
        for number, found in asked.found.items():
            surplus = [one for one in found if one != latest[number] or not asked.complete]
            for one in surplus:
                self.give_up({number: one})
        return latest if asked.complete else {}

    def take(self, sender: str, message: Claimed) -> None:
        """A worker has answered, perhaps too late."""
        asked = self._asked.get(message.token)
        if asked is not None:
            asked.take(sender, message)
            return
        wanted = self._wanted()
        for one in message.rooms:
            if one.room in wanted:  # the worker answers the later request, too
                continue
            room = self._dispatcher.rooms.get(one.room)
            if room is None or room.request.epoch != one.epoch:
                self._abort(sender, one.room, one.epoch)

    def take_over(self, rooms: list[RoomStream], found: dict[int, FoundRoom], now: float) -> None:
        """Go on with rooms that were found and are assigned. They run, so they do not wait for admission."""
        for room in rooms:
            one, assignment = found[room.number], self._dispatcher.assignments[room.number]
            assignment.fix()
            placement = assignment.version.placer.take_over(room.placement_request, one.worker, now)
            assert room.number not in self._dispatcher.rooms, "a room has one request"
            self._dispatcher.rooms[room.number] = room
            room.take_over(placement, one.epoch, one.newest, now)

    def give_up(self, found: dict[int, FoundRoom]) -> None:
        """Nobody here goes on with rooms that were found."""
        for number, one in found.items():
            self._abort(one.worker.mailbox, number, one.epoch)

    def disown(self, rooms: Iterable[int]) -> None:
        """The output of rooms that nobody asks for is not left alone any more."""
        self._dispatcher.foreign.difference_update(set(rooms) - self._wanted())

    def _wanted(self) -> set[int]:
        return {number for asked in self._asked.values() for number in asked.rooms}

    def _give_up_unasked(self, asked: _Asked) -> None:
        """Of a superseded request: the later one's client may have the end of some rooms already."""
        wanted = self._wanted()
        for number in asked.found.keys() - wanted:
            for one in asked.found[number]:
                self.give_up({number: one})

    def _abort(self, mailbox: str, room: int, epoch: int) -> None:
        abort = Abort(room, epoch, "it was claimed, and its stream is computed again")
        self._dispatcher.mail.say(RetransmitKey(mailbox, room, epoch, "abort"), abort)
