"""Seen: moves of rooms and changes of roles, counted while routers and workers come and go."""

from __future__ import annotations

from tests.cluster_hosts.cluster import Cluster


class Seen:
    """Counts grow with each `look`."""

    def __init__(self, cluster: Cluster) -> None:
        self.moves = 0  # rooms that went on on another decode worker with their KV
        self.switches = 0  # of a worker's role
        self._cluster = cluster
        self._moved: dict[str, int] = {}  # by router
        self._roles: dict[str, str] = {}  # by worker

    def look(self) -> None:
        """Look at everything. What a router counts between the last look and its end is not seen."""
        for router, count in self._cluster.moved().items():
            before = self._moved.get(router, 0)
            self.moves += count - before if count >= before else count  # another router has taken its place
            self._moved[router] = count
        self.look_at_roles()

    def look_at_roles(self) -> dict[str, int]:
        """Returns how many workers each role has now."""
        roles = {record["id"]: record["role"] for record in self._cluster.workers()}
        self.switches += sum(self._roles.get(worker, role) != role for worker, role in roles.items())
        self._roles.update(roles)
        found = list(roles.values())
        return {role: found.count(role) for role in found}
