"""Scaling by objectives: replicas of the fake engine, which is slow without a core, follow the load."""

from __future__ import annotations

import time
from typing import Any

from common.host import HTTP_PORT
from tests.chaos_ray.streams import Streams
from tests.cluster_hosts.load import LARGE, SMALL, sized
from tests.cluster_hosts.scene import Scene

_CLIENTS = 12
_ROWS = 4  # of a decode worker: the clients need two, and a third of them waits
_GROW_S, _SHRINK_S, _GIVE_UP_S = 180.0, 240.0, 240.0
_CHUNK = 16  # a prompt takes some steps
_SCALING = {"min_replicas": 1, "start_s": 5.0, "downscale_delay_s": 20.0, "look_back_period_s": 11.0}
_OBJECTIVES = {"prefill": 0.4, "decode": 0.1}  # p95 of TTFT and of ITL, in seconds


def scale_by_objective(scene: Scene) -> tuple[float, float, Streams]:
    """Serve with one replica of each role, until clients have made it as many as LARGE has, and none of them
    for long enough that one is left. Returns the seconds of both, and the clients."""
    scene.deploy_anew(_objectives(), SMALL)
    scene.cluster.wait_for_ingress(_GROW_S)
    urls = [f"http://{host.address}:{HTTP_PORT}" for host in scene.cluster.hosts]
    began = time.monotonic()
    with Streams(urls, _CLIENTS, give_up_s=_GIVE_UP_S) as streams:
        scene.cluster.wait_for_replicas(LARGE, _GROW_S)
        grown_s = time.monotonic() - began
        streams.wait_for_more(_CLIENTS, _GIVE_UP_S)
    began = time.monotonic()
    scene.cluster.wait_for_replicas(SMALL, _SHRINK_S)
    return grown_s, time.monotonic() - began, streams


def _objectives() -> dict[str, Any]:
    """The configuration of the load, with objectives instead of numbers, and the fake engine."""
    config: dict[str, Any] = sized(SMALL)
    (application,) = config["applications"]
    arguments = application["args"]
    arguments["worker"].update(engine="fake", fake_step_s=0.05, max_total_tokens=8192)
    arguments["router"]["options"] = {"max_queue_s": _GIVE_UP_S, "prefill_on_decode_tokens": 0}
    for role, objective_s in _OBJECTIVES.items():
        scaling = {**_SCALING, "max_replicas": LARGE[role], "objective_s": objective_s}
        arguments[role]["autoscaling_config"] = scaling
    arguments["prefill"]["options"] = {"chunked_prefill_size": _CHUNK, "max_prefill_tokens": _CHUNK}
    arguments["decode"]["options"] = {"max_running_requests": _ROWS}
    application["deployments"] = [{"name": "router", "num_replicas": SMALL["router"]}]
    return config
