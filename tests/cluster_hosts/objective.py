"""Scaling by objectives: replicas of the fake engine follow the load."""

from __future__ import annotations

import time

from tests.chaos_ray.streams import Streams
from tests.cluster_hosts.fake_load import BOTH, CLIENTS, GIVE_UP_S, LITTLE, FakeLoad, slow_configuration
from tests.cluster_hosts.scene import Scene

_FEW_CLIENTS = 2
_GROW_S, _SHRINK_S = 180.0, 240.0
_MOST = {"prefill": 3, "decode": 2}
_SCALING = {"min_replicas": 1, "start_s": 5.0, "downscale_delay_s": 20.0, "look_back_period_s": 11.0}
_OBJECTIVES = {"prefill": 2.0, "decode": 0.1}  # p95 of TTFT and of ITL, in seconds


def scale_by_objective(scene: Scene) -> tuple[float, float, list[Streams]]:
    """Serve with one replica of each role until clients have made it three and two, then fewer clients until
    one of each is left. Returns the seconds of both, and the clients."""
    routers = {"router": len(scene.cluster.hosts)}
    fewest = {**routers, **dict.fromkeys(_MOST, 1)}
    sections = {
        role: {"autoscaling_config": {**_SCALING, "max_replicas": _MOST[role], "objective_s": objective_s}}
        for role, objective_s in _OBJECTIVES.items()
    }
    scene.deploy_anew(slow_configuration(routers["router"], **sections), fewest)
    scene.cluster.wait_for_ingress(_GROW_S)
    began = time.monotonic()
    with Streams(scene.urls, CLIENTS, FakeLoad(BOTH).draw, GIVE_UP_S) as many:
        scene.cluster.wait_for_replicas({**routers, **_MOST}, _GROW_S)
        grown_s = time.monotonic() - began
        many.wait_for_more(CLIENTS, GIVE_UP_S)
    began = time.monotonic()
    with Streams(scene.urls, _FEW_CLIENTS, FakeLoad(LITTLE).draw, GIVE_UP_S) as few:
        scene.cluster.wait_for_replicas(fewest, _SHRINK_S)
        shrunk_s = time.monotonic() - began
        few.wait_for_more(_FEW_CLIENTS, GIVE_UP_S)
    return grown_s, shrunk_s, [many, few]
