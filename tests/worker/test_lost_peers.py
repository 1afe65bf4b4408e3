"""A peer is lost when it goes down, not when it is reported down once more."""

from __future__ import annotations

from wire.peer_monitors import PeerState
from worker.lost_peers import LostPeers

UP, DOWN = PeerState.UP, PeerState.DOWN


def test_a_report_that_repeats_the_last_one_is_no_loss() -> None:
    peers = LostPeers()
    reports = [("a", DOWN), ("a", DOWN), ("b", UP), ("b", DOWN), ("a", UP), ("a", DOWN), ("a", DOWN)]
    lost = [peers.is_lost(address, state, 1.0) for address, state in reports]
    assert lost == [True, False, False, True, False, True, False]
    assert peers.is_down("a")
    assert not peers.is_lost("a", UP, 2.0)
    assert [peers.is_down(address) for address in "abc"] == [False, True, False]


def test_peers_that_are_gone_are_forgotten() -> None:
    peers = LostPeers()
    for number in range(100):
        assert peers.is_lost(str(number), DOWN, float(10 * number))
    assert len(peers._down) <= 30
