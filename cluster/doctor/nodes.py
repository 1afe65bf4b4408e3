"""The facts of every node of a Ray cluster, and the preflight between all of them.

An actor on each node does it, with that node's own Baton: the class is imported there, not sent. Every answer
has a bound; a node that gives none is a finding.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.config import parse_config
from cluster.doctor.facts import Finding, Grade, NodeFacts, Reach, Target
from cluster.doctor.gather import gather, rdma_devices
from cluster.doctor.node_checks import uses_to_try
from cluster.doctor.preflight import Listeners, connect
from wire.options import PortOptions

_START_S = 90.0  # a Ray worker, and the import of torch
_ANSWER_S = 30.0
_CLOCK_TRIES = 3
_LOST = "see that Ray's ports are open to it and that the same Baton is installed there, then `ray status`"


class Examined(NamedTuple):
    """The nodes that answered, the connections between them, and findings about those that did not."""

    nodes: list[NodeFacts]
    reaches: list[Reach]
    lost: list[Finding]


class Probe:
    """Lives on the node that it looks at."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._listeners: Listeners | None = None

    def facts(self, raw: dict[str, Any] | None, challenge: bytes) -> NodeFacts:
        """What is known of this node, less what only Ray knows."""
        os.environ.pop(
            "CUDA_VISIBLE_DEVICES", None
        )  # Ray hides all GPUs from an actor that has reserved none
        return gather(self._node, raw, challenge, ray.util.get_node_ip_address())

    def clock(self) -> float:
        """Unix time here."""
        return time.time()

    def listen(self, raw: dict[str, Any] | None, host: str) -> list[Target]:
        """Listen until the actor ends."""
        self._listeners = _listen(self._node, raw, host)
        return self._listeners.targets

    def reach(self, targets: list[Target]) -> list[Reach]:
        """Connect to the targets from here."""
        return connect(self._node, targets)


class Probes:
    """A probe on each node. A node that does not answer in time is in `lost`, with the reason, and is not
    asked again. Close it, or use it as a context manager."""

    def __init__(self, node_ids: Mapping[str, str]) -> None:
        """`node_ids`: Ray's ids by the names that the report uses."""
        self._actors = {name: _start(name, node_id) for name, node_id in node_ids.items()}
        self.lost: dict[str, str] = {}

    def ask(self, method: str, arguments: Mapping[str, tuple[Any, ...]], bound_s: float) -> dict[str, Any]:
        """Call a method on each of the named nodes, all at once. Returns the answers that come in time."""
        asked = {
            name: getattr(self._actors[name], method).remote(*given)
            for name, given in arguments.items()
            if name not in self.lost
        }
        deadline = time.monotonic() + bound_s
        answers = {}
        for name, reference in asked.items():
            try:
                answers[name] = ray.get(reference, timeout=max(0.0, deadline - time.monotonic()))
            except GetTimeoutError:
                self.lost[name] = f"no answer within {bound_s:g} s"
            except RayError as error:
                self.lost[name] = str(error).strip().splitlines()[-1]
        return answers

    def close(self) -> None:
        """End the actors."""
        for actor in self._actors.values():
            ray.kill(actor)

    def __enter__(self) -> Probes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def examine(raw: dict[str, Any] | None, challenge: bytes) -> Examined:
    """All nodes of the Ray that is connected."""
    listed = {_name(node): node for node in ray.nodes() if node["Alive"]}
    with Probes({name: str(node["NodeID"]) for name, node in listed.items()}) as probes:
        everywhere = dict.fromkeys(listed, (raw, challenge))
        facts: dict[str, NodeFacts] = probes.ask("facts", everywhere, _START_S)
        for name in facts:
            ahead, error = _clock(probes, name)
            known = _with_ray(facts[name], listed[name])
            facts[name] = replace(known, clock_ahead_s=ahead, clock_error_s=error)
        reaches = _preflight(probes, facts, raw)
        findings = [Finding("answers", name, Grade.FAULT, why, _LOST) for name, why in probes.lost.items()]
    return Examined([one for name, one in facts.items() if name not in probes.lost], reaches, findings)


def examine_here(raw: dict[str, Any] | None, challenge: bytes, node: str) -> Examined:
    """This node alone, without Ray. It connects to itself."""
    facts = gather(node, raw, challenge)
    if not facts.address or "config" in facts.unusable:
        return Examined([facts], [], [])
    with _listen(node, raw, facts.address) as listeners:
        return Examined([facts], connect(node, listeners.targets), [])


def _listen(node: str, raw: dict[str, Any] | None, host: str) -> Listeners:
    config = None if raw is None else parse_config(raw)
    ports = PortOptions() if config is None else config.ports
    return Listeners(node, host, ports, uses_to_try(config, bool(rdma_devices())))


def _name(node: Mapping[str, Any]) -> str:
    """Its address, and where several nodes have one, as in Ray's tests, a part of its id."""
    address, node_id = str(node["NodeManagerAddress"]), str(node["NodeID"])
    shared = sum(one["NodeManagerAddress"] == address for one in ray.nodes() if one["Alive"]) > 1
    return f"{address} {node_id[:6]}" if shared else address


def _with_ray(facts: NodeFacts, node: Mapping[str, Any]) -> NodeFacts:
    resources = {name: float(amount) for name, amount in node["Resources"].items()}
    store = int(resources.get("object_store_memory", 0.0))
    return replace(facts, resources=resources, object_store=store, labels=dict(node.get("Labels", {})))


def _start(name: str, node_id: str) -> Any:
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(Probe).options(num_cpus=0, scheduling_strategy=strategy).remote(name)


def _clock(probes: Probes, name: str) -> tuple[float, float]:
    """How far a node's clock is ahead of this one, and to within what that is known: half a round trip."""
    best = (0.0, math.inf)
    for _ in range(_CLOCK_TRIES):
        before = time.time()
        there = probes.ask("clock", {name: ()}, _ANSWER_S)
        after = time.time()
        if name in there:
            measured = (there[name] - (before + after) / 2, (after - before) / 2)
            best = min(best, measured, key=lambda pair: pair[1])
    return best


def _preflight(probes: Probes, facts: Mapping[str, NodeFacts], raw: dict[str, Any] | None) -> list[Reach]:
    """Connections from each node to all others; to itself if there is no other."""
    usable = {
        name: (raw, one.address)
        for name, one in facts.items()
        if one.address and "config" not in one.unusable
    }
    targets: dict[str, list[Target]] = probes.ask("listen", usable, _ANSWER_S)
    alone = len(targets) == 1
    others = {
        name: ([one for node, some in targets.items() if alone or node != name for one in some],)
        for name in targets
    }
    return [reach for reaches in probes.ask("reach", others, _ANSWER_S).values() for reach in reaches]
