"""Suspicions: what is seen of a worker, and what follows for its rooms and for placement."""

from __future__ import annotations

from msgspec.structs import replace

from router.suspicions import SuspicionCause, Suspicions
from tests.router.directory.test_directory import record
from wire.peer_monitors import PeerState
from wire.records import Role

P, D = record("p"), record("d", role=Role.DECODE)
UP, DOWN = PeerState.UP, PeerState.DOWN


class Told:
    """Suspicions of P and D, and what it told."""

    def __init__(self) -> None:
        self.ended: list[str] = []  # whose rooms
        self.avoided: list[set[str]] = []
        self.suspicions = Suspicions(
            lambda worker, why, now: self.ended.append(worker.id),
            lambda suspected: self.avoided.append(set(suspected)),
        )
        self.suspicions.update([], [P, D], 0.0)


def test_a_worker_that_is_down_is_suspected_until_it_is_up() -> None:
    told = Told()
    told.suspicions.on_peer(D.mailbox, DOWN, 1.0)
    assert (told.ended, told.avoided) == (["d"], [{"d"}])
    assert told.suspicions.suspected == {"d"}
    told.suspicions.on_peer(D.mailbox, UP, 2.0)
    assert (told.ended, told.avoided) == (["d"], [{"d"}, set()])
    (kept,) = told.suspicions.history
    assert (kept.worker, kept.incarnation, kept.cause) == ("d", D.incarnation, SuspicionCause.UNREACHABLE)
    assert kept.at_monotonic == 1.0
    assert kept.cleared_at_unix is not None
    assert kept.cleared_at_unix >= kept.at_unix


def test_other_peers_are_not_suspected() -> None:
    told = Told()
    told.suspicions.on_peer("tcp://a-router", DOWN, 1.0)
    told.suspicions.on_peer(P.mailbox, UP, 1.0)
    assert (told.ended, told.avoided) == ([], [])


def test_a_new_process_is_not_suspected_for_what_the_old_one_did() -> None:
    told = Told()
    told.suspicions.on_peer(D.mailbox, DOWN, 1.0)
    newer = replace(D, incarnation=D.incarnation + 1, mailbox="tcp://newer")
    told.suspicions.update([D], [P, newer], 2.0)
    assert told.suspicions.suspected == frozenset()
    assert told.avoided == [{"d"}, set()]
    told.suspicions.on_peer(D.mailbox, DOWN, 3.0)
    assert told.suspicions.suspected == frozenset()


def test_a_worker_that_the_directory_lost_is_in_the_history_and_one_that_left_is_not() -> None:
    told = Told()
    told.suspicions.update([replace(P, draining=True), D], [], 5.0)
    (kept,) = told.suspicions.history
    assert (kept.worker, kept.cause, kept.at_monotonic) == ("d", SuspicionCause.LOST, 5.0)
    assert told.suspicions.counts == {SuspicionCause.LOST: 1}
    assert (told.ended, told.avoided) == ([], []), "the dispatcher is told by who read the view"


def test_several_causes_are_one_suspicion_that_ends_with_the_last() -> None:
    told = Told()
    told.suspicions.on_silence({D.mailbox}, 1.0)
    told.suspicions.on_peer(D.mailbox, DOWN, 2.0)
    assert told.ended == ["d"]
    told.suspicions.on_silence(set(), 3.0)
    assert told.suspicions.suspected == {"d"}
    told.suspicions.on_peer(D.mailbox, UP, 4.0)
    assert told.suspicions.suspected == frozenset()
    assert [one.cause for one in told.suspicions.history] == [SuspicionCause.SILENT]


def test_a_worker_whose_loop_does_not_turn_is_slow_and_not_silent() -> None:
    told = Told()
    slow = replace(D, load=replace(D.load, since_turn_s=4.0))
    told.suspicions.update([], [P, slow], 0.5)
    told.suspicions.on_silence({D.mailbox}, 1.0)
    assert told.suspicions.suspected == frozenset()


def test_an_exit_is_for_good() -> None:
    told = Told()
    told.suspicions.on_exit(D, 1.0)
    told.suspicions.on_peer(D.mailbox, UP, 1.0)
    told.suspicions.on_silence(set(), 1.0)
    assert told.suspicions.suspected == {"d"}
    told.suspicions.update([D], [P], 4.0)
    assert told.suspicions.suspected == frozenset()
    assert told.suspicions.counts == {SuspicionCause.EXITED: 1}, "its lost lease is not another suspicion"
