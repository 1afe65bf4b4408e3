"""Scaling by objectives: replicas of the fake engine follow the load."""

from __future__ import annotations

import time

from tests.chaos_ray.streams import Streams
from tests.cluster_hosts.fake_load import BOTH, CLIENTS, GIVE_UP_S, FakeLoad, slow_configuration
from tests.cluster_hosts.scene import Scene

_GROW_S, _SHRINK_S = 180.0, 240.0
_MOST = {"prefill": 3, "decode": 2}
_SCALING = {"min_replicas": 1, "start_s": 5.0, "downscale_delay_s": 20.0, "look_back_period_s": 11.0}
_OBJECTIVES = {"prefill": 0.4, "decode": 0.1}  # p95 of TTFT and of ITL, in seconds


def scale_by_objective(scene: Scene) -> tuple[float, float, Streams]:
    """Serve with one replica of each role until clients have made it three and two, and then with no clients
    until one of each is left. Returns the seconds of both, and the clients."""
    routers = {"router": len(scene.cluster.hosts)}
    fewest = {**routers, **dict.fromkeys(_MOST, 1)}
    sections = {
        role: {"autoscaling_config": {**_SCALING, "max_replicas": _MOST[role], "objective_s": objective_s}}
        for role, objective_s in _OBJECTIVES.items()
    }
    scene.deploy_anew(slow_configuration(routers["router"], **sections), fewest)
    scene.cluster.wait_for_ingress(_GROW_S)
    began = time.monotonic()
    with Streams(scene.urls, CLIENTS, FakeLoad(BOTH).draw, GIVE_UP_S) as streams:
        scene.cluster.wait_for_replicas({**routers, **_MOST}, _GROW_S)
        grown_s = time.monotonic() - began
        streams.wait_for_more(CLIENTS, GIVE_UP_S)
    began = time.monotonic()
    scene.cluster.wait_for_replicas(fewest, _SHRINK_S)
    return grown_s, time.monotonic() - began, streams
