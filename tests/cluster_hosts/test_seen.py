"""Seen: counts grow, although a router that takes another's place begins at 0."""

from __future__ import annotations

from typing import Any

from tests.cluster_hosts.cluster import Cluster
from tests.cluster_hosts.seen import Seen


class Told(Cluster):
    """A cluster whose routers say what they are told."""

    def __init__(self) -> None:
        super().__init__(())
        self.counts: dict[str, int] = {}
        self.roles: dict[str, str] = {}

    def moved(self) -> dict[str, int]:
        return self.counts

    def workers(self) -> list[dict[str, Any]]:
        return [{"id": worker, "role": role} for worker, role in self.roles.items()]


def test_moves_are_added_over_routers_that_come_and_go() -> None:
    cluster = Told()
    seen = Seen(cluster)
    for counts, moves in (
        ({"head:9110": 2}, 2),
        ({"head:9110": 5, "worker-1:9110": 1}, 6),
        ({"worker-1:9110": 1}, 6),  # the head is off
        ({"head:9110": 1, "worker-1:9110": 1}, 7),  # another router
    ):
        cluster.counts = counts
        seen.look()
        assert seen.moves == moves


def test_a_worker_that_has_another_role_than_before_has_switched() -> None:
    cluster = Told()
    seen = Seen(cluster)
    for roles, switches in (
        ({"a": "prefill", "b": "decode"}, 0),
        ({"a": "decode", "b": "decode", "c": "prefill"}, 1),
        ({"b": "decode"}, 1),  # between two incarnations
        ({"a": "prefill", "b": "decode"}, 2),
    ):
        cluster.roles = roles
        counted = seen.look_at_roles()
        assert sum(counted.values()) == len(roles)
        assert seen.switches == switches
