"""Rooms: in any order of messages and with any repeats, a room runs at most once per epoch."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from wire.messages.transfer import Release
from worker.rooms import Rooms, StartVerdict


@dataclass
class State:
    room: int
    epoch: int


def rooms() -> Rooms[State]:
    return Rooms(tombstone_s=100.0, parking_s=10.0)


def test_a_repeat_is_recognised_and_an_older_epoch_is_stale() -> None:
    registry = rooms()
    assert registry.admission(7, 2) is StartVerdict.NEW
    registry.start(State(7, 2))
    assert registry.admission(7, 2) is StartVerdict.REPEATED
    assert registry.admission(7, 1) is StartVerdict.STALE
    assert registry.admission(7, 3) is StartVerdict.NEW
    assert registry.get(7, 1) is None
    assert registry.get(7) == State(7, 2)


def test_a_tombstone_refuses_what_comes_late_until_its_lease_ends() -> None:
    registry = rooms()
    assert registry.end(7, 1, now=0.0) is None, "an abort may come before the start it aborts"
    assert registry.admission(7, 1) is StartVerdict.STALE
    assert not registry.park(7, 1, "tcp://p", Release(7, 1), now=0.0)
    assert registry.admission(7, 2) is StartVerdict.NEW
    registry.sweep(99.0)
    assert registry.admission(7, 1) is StartVerdict.STALE
    registry.sweep(100.0)
    assert registry.admission(7, 1) is StartVerdict.NEW


def test_ending_an_old_epoch_spares_the_running_one() -> None:
    registry = rooms()
    registry.start(State(7, 2))
    assert registry.end(7, 1, now=0.0) is None
    assert registry.get(7, 2) is not None
    assert registry.end(7, 2, now=0.0) == State(7, 2)
    assert len(registry) == 0


def test_parked_mail_waits_for_its_room_and_no_longer_than_its_lease() -> None:
    registry = rooms()
    assert registry.park(7, 1, "tcp://d", Release(7, 1), now=0.0)
    assert registry.unpark(7, 2) is None
    assert registry.unpark(7, 1) == ("tcp://d", Release(7, 1))
    assert registry.unpark(7, 1) is None
    registry.park(8, 1, "tcp://d", Release(8, 1), now=0.0)
    registry.park(8, 1, "tcp://d", Release(8, 1), now=9.0)
    assert registry.take_unclaimed(9.9) == []
    assert registry.take_unclaimed(10.0) == [("tcp://d", Release(8, 1))], "a repeat extends no lease"
    assert registry.unpark(8, 1) is None


def test_the_end_of_an_epoch_leaves_what_is_parked_for_a_later_one() -> None:
    registry = rooms()
    registry.park(7, 1, "tcp://d", Release(7, 1), now=0.0)
    registry.park(7, 2, "tcp://d", Release(7, 2), now=0.0)
    registry.end(7, 1, now=0.0)
    assert registry.unpark(7, 1) is None
    assert registry.unpark(7, 2) == ("tcp://d", Release(7, 2))


@given(st.lists(st.tuples(st.sampled_from(["start", "end"]), st.integers(1, 3)), max_size=30))
def test_no_epoch_ever_starts_twice_or_after_its_end(messages: list[tuple[str, int]]) -> None:
    registry = rooms()
    started: list[int] = []
    ended = 0
    for kind, epoch in messages:
        if kind == "end":
            registry.end(1, epoch, now=0.0)
            ended = max(ended, epoch)
        elif registry.admission(1, epoch) is StartVerdict.NEW:
            older = registry.get(1)
            if older is not None:
                registry.end(1, older.epoch, now=0.0)
            assert epoch > ended
            registry.start(State(1, epoch))
            started.append(epoch)
    assert started == sorted(set(started))
