"""A decode worker's pool stays mapped while something may be sent there, and no longer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from unittest import mock

import pytest

from kvtransfer.local import LocalSender
from prefill_node.room import PrefillRoom
from tests.support.hand_off import FakeMailbox, Pair, pair, prompt_of, right
from wire.messages.rooms import RejectKind
from wire.messages.transfer import TransferEndpoint
from wire.peer_monitors import PeerState
from worker.loop import Worker
from worker.mapped_peers import IDLE_S, MappedPeers

ONE, OTHER = TransferEndpoint("shm", "@one"), TransferEndpoint("tcp", "other:1")


def test_only_an_endpoint_without_a_sender_is_idle() -> None:
    peers = MappedPeers()
    peers.opened(ONE, "a", 0.0)
    peers.opened(ONE, "a", 1.0)
    peers.opened(OTHER, "a", 2.0)
    peers.closed(ONE, 3.0)
    peers.closed(OTHER, 4.0)
    assert peers.take_idle(3.9 + IDLE_S) == []
    assert peers.take_idle(4.0 + IDLE_S) == [OTHER]
    assert peers.of("a") == [ONE]
    assert peers.take_idle(10 * IDLE_S) == []
    peers.closed(ONE, 10 * IDLE_S)
    assert peers.take_idle(11 * IDLE_S - 0.1) == []
    assert peers.take_idle(11 * IDLE_S) == [ONE]
    assert peers.of("a") == []


def test_a_worker_at_the_address_of_another_is_not_that_one() -> None:
    first, second = (TransferEndpoint("tcp", "host:1", {"token": token}) for token in "ab")
    peers = MappedPeers()
    peers.opened(first, "before", 0.0)
    peers.closed(first, 0.0)
    peers.opened(second, "after", 1.0)
    assert (peers.of("before"), peers.of("after")) == ([first], [second])
    assert peers.take_idle(10 * IDLE_S) == [first]


@pytest.fixture
def both() -> Iterator[Pair]:
    """Room 1 has its target, and prefill computes it only after IDLE_S."""
    with pair() as workers:
        workers.ask(1, prompt_of(1, 50), 3)
        with computing_nothing(workers.prefill):
            while not is_aimed(workers):
                workers.turn(workers.decode)
                workers.deliver(0)
            workers.pass_time(IDLE_S + 1)
        yield workers


def computing_nothing(worker: Worker) -> AbstractContextManager[mock.MagicMock]:
    return mock.patch.object(worker.parts.role.scheduler, "step", return_value=False)


def is_aimed(both: Pair) -> bool:
    """Whether prefill knows where the room's pages go."""
    return any(isinstance(room, PrefillRoom) and room.sender is not None for room in both.prefill.rooms())


def mapped(both: Pair) -> int:
    """The decode workers whose pools prefill has mapped."""
    transport = both.prefill.parts.services.transfer.sender._transports["shm"]
    assert isinstance(transport, LocalSender)
    return len(transport._mappings)


def test_a_pool_is_unmapped_after_a_room_that_waited_long_for_its_prefill(both: Pair) -> None:
    both.run_dry()
    assert both.outputs[1].tokens == right(both, 1)
    assert mapped(both) == 1
    both.settle()
    assert mapped(both) == 0


def test_pages_of_a_room_that_waited_long_are_not_sent_to_a_worker_that_is_down(both: Pair) -> None:
    decode = both.decode.record().mailbox
    mailbox = both.prefill.parts.services.mailbox
    assert isinstance(mailbox, FakeMailbox)
    mailbox.peers[decode] = PeerState.DOWN
    with computing_nothing(both.prefill):  # it hears of that before it has pages to send
        both.turn(both.prefill)
    deadline = time.monotonic() + 30.0
    while both.prefill.rooms():  # and nothing more of the other, which would show that it is not down
        assert time.monotonic() < deadline
        both.turn(both.prefill)
    assert mapped(both) == 0
    both.run_dry()
    blamed = {one.blamed: one.why for one in both.outputs[1].rejections}
    assert blamed[decode] is RejectKind.FAILED
    both.insist(1)
    both.run_dry()
    assert both.outputs[1].tokens == right(both, 1)
    both.settle()
