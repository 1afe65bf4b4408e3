"""Claims: which worker goes on with a room, and what becomes of rooms with which nobody goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import Interrupted
from router.streams.claims import Claims, FoundRoom
from tests.router.directory.test_directory import record
from wire.messages.any_message import AnyMessage
from wire.messages.rooms import Abort, Claim, Claimed, ClaimedRoom
from wire.records import Role, WorkerRecord
from wire.retransmitter import RetransmitKey

D, E = record("d", role=Role.DECODE), record("e", role=Role.DECODE)


class Asking:
    """A router that claims rooms 1 and 2. Nobody answers by itself."""

    def __init__(self, *workers: WorkerRecord) -> None:
        self.workers = list(workers)
        self.sent: list[tuple[str, Claim]] = []
        self.aborted: list[RetransmitKey] = []
        self.rooms: dict[int, Any] = {}
        self.foreign: set[int] = set()
        mail = SimpleNamespace(say=self._say)
        dispatcher: Any = SimpleNamespace(rooms=self.rooms, foreign=self.foreign, mail=mail)
        self.claims = Claims(dispatcher, self._send)

    def _send(self, to: str, message: AnyMessage) -> None:
        assert isinstance(message, Claim)
        self.sent.append((to, message))

    def _say(self, key: RetransmitKey, message: AnyMessage) -> None:
        assert isinstance(message, Abort)
        self.aborted.append(key)

    def ask(
        self, timeout_s: float = 30.0, rooms: tuple[int, ...] = (1, 2)
    ) -> asyncio.Task[dict[int, FoundRoom]]:
        return asyncio.create_task(self.claims.ask([*rooms], lambda: self.workers, timeout_s))

    async def asked(self, worker: WorkerRecord, times: int = 1) -> int:
        """Until the worker was asked so often. Returns the question's token."""
        while sum(to == worker.mailbox for to, _ in self.sent) < times:
            await asyncio.sleep(0.001)
        return self.sent[-1][1].token

    def answer(self, worker: WorkerRecord, token: int, *rooms: ClaimedRoom) -> None:
        self.claims.take(worker.mailbox, Claimed(token, list(rooms)))


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30.0))


def test_choices_of_one_request_are_found_on_several_workers() -> None:
    async def go() -> None:
        asking = Asking(D, E)
        task = asking.ask()
        token = await asking.asked(E)
        asking.answer(D, token, ClaimedRoom(1, 0, 0))
        asking.answer(E, token, ClaimedRoom(2, 3, 5))
        assert asking.foreign == {1, 2}, "their tokens are not refused meanwhile"
        assert await task == {1: FoundRoom(D, 0, 0, 0), 2: FoundRoom(E, 3, 5, 3)}
        assert asking.foreign == set()
        assert asking.aborted == []

    run(go)


def test_who_is_silent_is_asked_again_and_who_comes_late_is_asked_too() -> None:
    async def go() -> None:
        asking = Asking()
        task = asking.ask()
        await asyncio.sleep(0)
        asking.workers.append(D)
        token = await asking.asked(D, times=2)
        asking.answer(D, token, ClaimedRoom(1, 0, 0), ClaimedRoom(2, 0, 0))
        assert set(await task) == {1, 2}

    run(go)


def test_the_latest_epoch_is_taken_and_an_older_one_is_ended() -> None:
    async def go() -> None:
        asking = Asking(D, E)
        task = asking.ask()
        token = await asking.asked(E)
        asking.answer(D, token, ClaimedRoom(1, 0, 0))
        asking.answer(E, token, ClaimedRoom(1, 1, 0), ClaimedRoom(2, 0, 0))
        assert (await task)[1] == FoundRoom(E, 1, 0, 1)
        assert asking.aborted == [RetransmitKey(D.mailbox, 1, 0, "abort")]

    run(go)


def test_when_one_is_missing_the_others_are_given_up() -> None:
    async def go() -> None:
        asking = Asking(D, E)
        task = asking.ask()
        token = await asking.asked(E)
        asking.answer(D, token, ClaimedRoom(1, 0, 0))
        asking.answer(E, token)
        assert await task == {}
        assert asking.aborted == [RetransmitKey(D.mailbox, 1, 0, "abort")]

    run(go)


def test_a_silent_worker_is_waited_for_no_longer_than_allowed() -> None:
    async def go() -> None:
        asking = Asking(D, E)
        task = asking.ask(timeout_s=0.1)
        token = await asking.asked(E)
        asking.answer(D, token, ClaimedRoom(1, 0, 0))
        assert await task == {}
        asking.answer(E, token, ClaimedRoom(2, 0, 0))  # too late
        ended = {(key.to, key.room) for key in asking.aborted}
        assert ended == {(D.mailbox, 1), (E.mailbox, 2)}

    run(go)


def test_a_repeated_answer_does_not_end_the_room() -> None:
    async def go() -> None:
        asking = Asking(D)
        task = asking.ask()
        token = await asking.asked(D)
        both = ClaimedRoom(1, 0, 0), ClaimedRoom(2, 0, 0)
        for _ in range(2):
            asking.answer(D, token, *both)
        await task
        for number in (1, 2):
            asking.rooms[number] = SimpleNamespace(request=SimpleNamespace(epoch=0))
        asking.answer(D, token, *both)
        assert asking.aborted == []

    run(go)


def test_a_later_request_gets_the_rooms_of_an_earlier_one() -> None:
    """The worker answers both in one turn. The later one does not want room 1: its client has its end."""

    async def go() -> None:
        asking = Asking(D)
        earlier = asking.ask()
        first = await asking.asked(D)
        asking.answer(D, first, ClaimedRoom(1, 0, 0))
        later = asking.ask(rooms=(2,))
        second = await asking.asked(D, times=2)
        with pytest.raises(Interrupted):
            await earlier
        assert asking.aborted == [RetransmitKey(D.mailbox, 1, 0, "abort")]
        assert asking.foreign == {2}
        asking.answer(D, first, ClaimedRoom(1, 0, 0), ClaimedRoom(2, 0, 0))
        asking.answer(D, second, ClaimedRoom(2, 0, 0))
        assert await later == {2: FoundRoom(D, 0, 0, 0)}
        assert {key.room for key in asking.aborted} == {1}
        assert asking.foreign == set()

    run(go)
