"""Cluster: what the head's dashboard and the routers' admin listeners say about the whole of it."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import httpx

from common.host import HTTP_PORT
from router.options import AdminOptions
from tests.cluster_hosts.host import Host

_DASHBOARD = (
    'curl -sf -m 10 -H "Authorization: Bearer $(cat ~/.ray/auth_token)" "http://127.0.0.1:8265{path}"'
)
_MOVED = re.compile(r'^baton_router_moves_total\{state="done"\} (\S+)$', re.MULTILINE)
_POLL_S = 1.0
_ADMIN_PORTS = AdminOptions().admin_port_range[:3]  # routers take the first free ones: a host has few


class Replica(NamedTuple):
    """A replica of Serve. `address`: of its host."""

    deployment: str
    state: str
    address: str
    id: str


class Cluster:
    """The first of the hosts is the head."""

    def __init__(self, hosts: Iterable[Host]) -> None:
        self.hosts = list(hosts)

    @property
    def head(self) -> Host:
        """Where the dashboard answers."""
        return self.hosts[0]

    def nodes(self) -> dict[str, str]:
        """Ids of the nodes that are alive, by address. Empty while the head does not answer."""
        answer = self._dashboard("/api/v0/nodes")
        nodes = [] if answer is None else answer["data"]["result"]["result"]
        return {node["node_ip"]: node["node_id"] for node in nodes if node["state"] == "ALIVE"}

    def replicas(self) -> list[Replica]:
        """Of all deployments. Empty while the head does not answer."""
        answer = self._dashboard("/api/serve/applications/")
        if answer is None or "baton" not in answer["applications"]:
            return []
        return [
            Replica(name, replica["state"], replica.get("node_ip") or "", replica["replica_id"])
            for name, deployment in answer["applications"]["baton"]["deployments"].items()
            for replica in deployment["replicas"]
        ]

    def addresses(self, deployment: str) -> list[str]:
        """Of the hosts that its running replicas are on."""
        return [one.address for one in self.replicas() if one[:2] == (deployment, "RUNNING")]

    def message(self) -> str:
        """Why Serve does not run the application; "" when it has nothing to say."""
        answer = self._dashboard("/api/serve/applications/")
        return "" if answer is None else json.dumps(answer["applications"], indent=1)[:6000]

    def wait_for_nodes(self, addresses: set[str], timeout_s: float) -> None:
        """Until these are alive and no others."""
        deadline = time.monotonic() + timeout_s
        while (found := self.nodes().keys()) != addresses:
            assert time.monotonic() < deadline, f"nodes: wanted {sorted(addresses)}, found {sorted(found)}"
            time.sleep(_POLL_S)

    def wait_for_replicas(
        self, wanted: Mapping[str, int], timeout_s: float, gone: Collection[str] = ()
    ) -> None:
        """Until exactly these replicas run, none is starting or stopping, none has an id of `gone`, and a
        router sees the workers."""
        expected = {(name, "RUNNING"): count for name, count in wanted.items() if count}
        workers = sum(count for name, count in wanted.items() if name != "router")
        deadline = time.monotonic() + timeout_s
        while not self._are(expected, workers, gone):
            assert time.monotonic() < deadline, (
                f"wanted {expected} and {workers} workers, found {self._counts()} and "
                f"{len(self.workers())}:\n{self.message()}"
            )
            time.sleep(_POLL_S)

    def wait_until_left(self, deployments: Collection[str], address: str, timeout_s: float) -> None:
        """Until none of their replicas is on that host."""
        deadline = time.monotonic() + timeout_s
        while left := [
            one for one in self.replicas() if one.address == address and one.deployment in deployments
        ]:
            assert time.monotonic() < deadline, f"on the drained host are {left}"
            time.sleep(_POLL_S)

    def wait_for_ingress(self, timeout_s: float) -> None:
        """Until every host answers clients. For the thread of a host of the network."""
        deadline = time.monotonic() + timeout_s
        for host in self.hosts:
            while not _answers(host.address):
                assert time.monotonic() < deadline, f"nothing answers clients at {host.name}"
                time.sleep(_POLL_S)

    def workers(self) -> list[dict[str, Any]]:
        """Records of the live workers, as the first router that answers sees them."""
        for _, answer in self._pages("/debug/workers"):
            return list(json.loads(answer)["workers"])
        return []

    def trace(self, request_id: str) -> dict[str, Any]:
        """What the routers know of one of their last requests."""
        for _, answer in self._pages(f"/debug/trace/{request_id}"):
            return dict(json.loads(answer)["otherData"])
        raise AssertionError(f"no router knows the request {request_id}")

    def moved(self) -> dict[str, int]:
        """Rooms that decode workers have handed to others with their KV, by the router that counted them."""
        return {
            router: sum(int(float(count)) for count in _MOVED.findall(page))
            for router, page in self._pages("/metrics")
        }

    def _are(self, expected: Mapping[tuple[str, str], int], workers: int, gone: Collection[str]) -> bool:
        if self._counts() != expected or any(one.id in gone for one in self.replicas()):
            return False
        return len(self.workers()) == workers

    def _counts(self) -> dict[tuple[str, str], int]:
        return dict(Counter((one.deployment, one.state) for one in self.replicas()))

    def _dashboard(self, path: str) -> Any:
        try:
            return json.loads(self.head.run(_DASHBOARD.format(path=path)))
        except (subprocess.SubprocessError, json.JSONDecodeError):
            return None

    def _pages(self, path: str) -> Iterator[tuple[str, str]]:
        """A page of every admin listener that has it, with the listener: each is on the loopback of its
        router's host."""
        for host in self.hosts:
            for port in _ADMIN_PORTS:
                with contextlib.suppress(subprocess.SubprocessError):
                    url = f"http://127.0.0.1:{port}{path}"
                    yield f"{host.name}:{port}", host.run(f"curl -sf -m 5 {url}")


def _answers(address: str) -> bool:
    try:
        return httpx.get(f"http://{address}:{HTTP_PORT}/-/healthz", timeout=5.0).is_success
    except httpx.HTTPError:
        return False
