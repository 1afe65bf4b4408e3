"""Dynamic roles: workers change between prefill and decode, as the load and an operator want."""

from __future__ import annotations

import time

from tests.chaos_ray.streams import Streams
from tests.cluster_hosts.fake_load import (
    CLIENTS,
    DOCUMENTS,
    GIVE_UP_S,
    PROBLEMS,
    FakeLoad,
    slow_configuration,
)
from tests.cluster_hosts.scene import Scene
from tests.cluster_hosts.seen import Seen

_WORKERS = 4
_FOLLOW_S, _SET_S, _INGRESS_S = 120.0, 90.0, 180.0
_POLL_S = 0.5
_DYNAMIC = {"num_replicas": _WORKERS, "ttft_s": 0.4, "itl_s": 0.1, "period_s": 2, "drain_s": 30}


def change_roles(scene: Scene, seen: Seen) -> Streams:
    """Two workers of each role. Long prompts make it three for prefill, long answers three for decode, and an
    operator two and two again. Returns the clients."""
    routers = len(scene.cluster.hosts)
    config = slow_configuration(routers, dynamic=_DYNAMIC)
    config["applications"][0]["args"]["roles"] = "dynamic"
    scene.deploy_anew(config, {"router": routers, "worker": _WORKERS})
    scene.cluster.wait_for_ingress(_INGRESS_S)
    load = FakeLoad(DOCUMENTS)
    with Streams(scene.urls, CLIENTS, load.draw, GIVE_UP_S) as streams:
        _wait_for(seen, {"prefill": 3, "decode": 1}, _FOLLOW_S)
        load.size = PROBLEMS
        _wait_for(seen, {"prefill": 1, "decode": 3}, _FOLLOW_S)
        scene.roles("--prefill 2 --decode 2")
        _wait_for(seen, {"prefill": 2, "decode": 2}, _SET_S)
        streams.wait_for_more(CLIENTS, GIVE_UP_S)
    return streams


def _wait_for(seen: Seen, roles: dict[str, int], timeout_s: float) -> None:
    """Until so many workers have each role."""
    deadline = time.monotonic() + timeout_s
    while (found := seen.look_at_roles()) != roles:
        assert time.monotonic() < deadline, f"roles: wanted {roles}, found {found}"
        time.sleep(_POLL_S)
