"""RoomTable: which writes are granted, and when the fence of a closed room passes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.errors import TransferError
from kvcache.page_runs import as_pages
from kvtransfer.rooms import Grant, RoomTable
from kvtransfer.transport import Fence
from tests.kvtransfer.peers import grants_out

PAGES = as_pages([5, 3, 9])


def opened() -> RoomTable:
    table = RoomTable()
    table.open(1, 0, {"full": PAGES})
    return table


@pytest.mark.parametrize(
    ("room", "epoch", "group", "pages"),
    [
        (2, 0, "full", [5]),
        (1, 1, "full", [5]),
        (1, 0, "window", [5]),
        (1, 0, "full", [4]),
        (1, 0, "full", [10]),
        (1, 0, "full", [5, 5]),
        (1, 0, "full", [-1]),
    ],
)
def test_only_opened_pages_are_granted(room: int, epoch: int, group: str, pages: list[int]) -> None:
    with pytest.raises(TransferError):
        opened().begin(room, epoch, group, as_pages(pages), 1, "tcp")


def test_progress_counts_pages_once_and_bytes_as_they_come() -> None:
    table = opened()
    for _ in range(2):
        table.finish(table.begin(1, 0, "full", as_pages([9, 5]), 20, "tcp"), landed=True)
    table.finish(table.begin(1, 0, "full", as_pages([3]), 10, "shm"), landed=False)
    landed = table.landed(1, 0)
    assert (landed.nbytes, landed.missing, landed.backend) == ({"full": 40}, {"full": 1}, "tcp")


def test_the_seconds_are_those_with_a_write_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 14.0, 20.0, 21.5]).__next__
    monkeypatch.setattr("kvtransfer.rooms.time.monotonic", clock)
    table = opened()
    first, second = (table.begin(1, 0, "full", as_pages([page]), 1, "tcp") for page in (3, 5))  # from 10 on
    table.finish(first, landed=True)
    assert table.landed(1, 0).seconds == 0.0
    table.finish(second, landed=True)  # at 14
    table.finish(table.begin(1, 0, "full", as_pages([9]), 1, "tcp"), landed=True)  # at 20, for 1.5 s
    assert table.landed(1, 0).seconds == 5.5


def test_pages_land_in_any_order() -> None:
    table = opened()
    for left, page in ((2, 9), (1, 3), (0, 5)):
        table.finish(table.begin(1, 0, "full", as_pages([page]), 10, "tcp"), landed=True)
        assert table.landed(1, 0).missing == ({"full": left} if left else {})


def test_every_group_is_counted_for_itself() -> None:
    table = RoomTable()
    table.open(1, 0, {"full": PAGES, "window": as_pages([5]), "state": as_pages([])})
    assert table.landed(1, 0).missing == {"full": 3, "window": 1}
    with pytest.raises(TransferError, match="group window"):
        table.begin(1, 0, "window", as_pages([3]), 7, "tcp")
    table.finish(table.begin(1, 0, "window", as_pages([5]), 7, "tcp"), landed=True)
    landed = table.landed(1, 0)
    assert (landed.nbytes, landed.missing) == ({"full": 0, "window": 7, "state": 0}, {"full": 3})
    assert landed.total == 7


def test_a_fence_waits_for_every_grant_and_interrupts_them() -> None:
    table = opened()
    interrupted: list[str] = []
    one = table.begin(1, 0, "full", as_pages([3]), 1, "tcp", lambda: interrupted.append("one"))
    two = table.begin(1, 0, "full", as_pages([5]), 1, "tcp", lambda: interrupted.append("two"))
    table.finish(one, landed=True)
    fence = table.close_room(1, 0)
    assert interrupted == ["two"]
    assert two.revoked
    assert not fence.passed
    assert table.close_room(1, 0) is fence, "closing again is the same closing"
    table.finish(two, landed=True)
    assert fence.passed
    assert table.close_room(1, 0).passed


class Rooms(RuleBasedStateMachine):
    """Any interleaving of owners and writers: a fence has passed exactly when no grant of its room is out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = RoomTable()
        self.open_rooms: set[int] = set()
        self.grants: list[Grant] = []
        self.fences: dict[int, Fence] = {}
        self.next_room = 0

    @rule()
    def open(self) -> None:
        self.table.open(self.next_room, 0, {"full": np.arange(4)})
        self.open_rooms.add(self.next_room)
        self.next_room += 1

    @precondition(lambda self: self.next_room > 0)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        room = data.draw(st.integers(0, self.next_room - 1))
        if room in self.open_rooms:
            self.grants.append(self.table.begin(room, 0, "full", np.arange(2), 1, "tcp"))
        else:
            with pytest.raises(TransferError):
                self.table.begin(room, 0, "full", np.arange(2), 1, "tcp")

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), landed=st.booleans())
    def finish(self, data: st.DataObject, landed: bool) -> None:
        grant = self.grants.pop(data.draw(st.integers(0, len(self.grants) - 1)))
        self.table.finish(grant, landed)

    @precondition(lambda self: self.open_rooms)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        room = data.draw(st.sampled_from(sorted(self.open_rooms)))
        self.open_rooms.remove(room)
        self.fences[room] = self.table.close_room(room, 0)

    @invariant()
    def fences_tell_the_truth(self) -> None:
        writing = {grant.key[0] for grant in self.grants}
        for room, fence in self.fences.items():
            assert fence.passed == (room not in writing)
        assert all(grant.revoked == (grant.key[0] not in self.open_rooms) for grant in self.grants)
        assert grants_out(self.table) == len(self.grants)


TestRooms = Rooms.TestCase
TestRooms.settings = settings(max_examples=30, stateful_step_count=30)
