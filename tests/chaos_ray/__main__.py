"""2 routers, 2 prefill and 2 decode replicas on a Ray cluster, under 32 streams: one of each kind dies.

python -m tests.chaos_ray

Replica actors of prefill and decode are killed, one of decode is stopped, both are replaced by a changed
Serve config (a rolling update); a router replica is killed, and the directory's actor. No stream may break
off for a worker's fault; one that breaks off for a router's must be resumable with its Last-Event-ID. The
last line is JSON: {streams, incomplete, resumed, faults}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.chaos_ray.streams import Streams
from tests.e2e.ray_cluster import ROOT, RayCluster, free_ports, ray_cluster
from tests.e2e.served import Served, served
from tests.harness.leftovers import Run

_CLIENTS = 32
_REPLICAS = {"router": 2, "prefill": 2, "decode": 2}
_WORKERS = 4
_START_S, _RECOVER_S = 240.0, 480.0  # under load, a replica takes over a minute to start on two slow cores
_MODEL = ROOT / "deploy" / "demo_model"
_CPUS, _OTHER_CPUS = 0.2, 0.21  # a change of it is a rolling update of that deployment


class Scene:
    """The cluster, the application on it, and the clients."""

    def __init__(self, run: Run, cluster: RayCluster, client: Served, port: int) -> None:
        self._run, self._cluster, self._client, self._port = run, cluster, client, port
        self._cpus = dict.fromkeys(_REPLICAS, _CPUS)

    def deploy(self, timeout_s: float) -> None:
        """Returns when all replicas run and a router sees all workers."""
        self._cluster.deploy(self._config())
        self.whole(timeout_s)

    def whole(self, timeout_s: float = _RECOVER_S) -> None:
        """Wait until all replicas run and a router sees all workers."""
        self._cluster.wait_for(_REPLICAS, timeout_s)
        self._client.wait_for_workers(_WORKERS, timeout_s)

    def end_worker(self, role: str, number: signal.Signals) -> None:
        """Kill or stop a replica, and wait until its process has gone and another has taken its place."""
        before = {record["id"] for record in self._client.workers()}
        victim = next(record for record in self._client.workers() if record["role"] == role)
        os.kill(victim["pid"], number)
        deadline = time.monotonic() + _RECOVER_S
        while len({record["id"] for record in self._client.workers()} - {victim["id"]}) < len(before):
            assert time.monotonic() < deadline, f"{victim['id']} was not replaced"
            time.sleep(0.2)
        while _lives(victim["pid"]):
            assert time.monotonic() < deadline, f"the process of {victim['id']} is still there"
            time.sleep(0.2)
        self.whole()

    def update(self, deployment: str) -> None:
        """A changed Serve config: its replicas are replaced one after the other."""
        self._cpus[deployment] = _OTHER_CPUS
        self.deploy(_RECOVER_S)

    def kill_process(self, name: str) -> None:
        """Kill an actor by the name of its process."""
        self._run.look()
        alive = [pid for pid, called in self._run.processes.items() if name in called and _lives(pid)]
        assert alive, f"no process is called {name}: {sorted(set(self._run.processes.values()))}"
        os.kill(alive[0], signal.SIGKILL)
        time.sleep(1.0)  # Serve has noticed by the time that it is asked whether all is well
        self.whole()

    def settle(self) -> None:
        """No worker holds anything, and every pool balances."""
        self._client.settle()

    def _config(self) -> dict[str, object]:
        worker = {"engine": "fake", "fake_step_s": 0.02, "page_size": 16, "max_total_tokens": 32_768}
        router = {"admin_ports": self._client.admin.option}
        deployments = [
            {"name": name, "num_replicas": count, "ray_actor_options": {"num_cpus": self._cpus[name]}}
            for name, count in _REPLICAS.items()
        ]
        application = {
            "name": "baton", "route_prefix": "/", "import_path": "cluster.app:build",
            "args": {"model": str(_MODEL), "worker": worker, "router": {"options": router}},
            "deployments": deployments,
        }  # fmt: skip
        http = {"host": "127.0.0.1", "port": self._port}
        return {"proxy_location": "HeadOnly", "http_options": http, "applications": [application]}


def main() -> int:
    """Returns the exit code: 0 when no stream is incomplete."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the cluster is ended then, too
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="baton-chaos-ray-")))
        (port, admin_port), run = free_ports(2), Run.begin()
        cluster = cleanup.enter_context(ray_cluster(folder, run))
        client = cleanup.enter_context(served(f"http://127.0.0.1:{port}", admin_port))
        scene = Scene(run, cluster, client, port)
        scene.deploy(_START_S)
        result = _under_load(scene, client.url)
        scene.settle()
    sys.stdout.write(f"{json.dumps(result)}\n")
    return 1 if result["incomplete"] else 0


def _under_load(scene: Scene, url: str) -> dict[str, Any]:
    """One fault after the other, with streams before, in and after each."""
    worker_faults: dict[str, Callable[[], None]] = {
        "prefill killed": lambda: scene.end_worker("prefill", signal.SIGKILL),
        "decode killed": lambda: scene.end_worker("decode", signal.SIGKILL),
        "decode stopped": lambda: scene.end_worker("decode", signal.SIGSTOP),
        "prefill updated": lambda: scene.update("prefill"),
        "decode updated": lambda: scene.update("decode"),
    }
    router_faults: dict[str, Callable[[], None]] = {
        "directory killed": lambda: scene.kill_process("DirectoryActor"),
        "router killed": lambda: scene.kill_process("ServeReplica:baton:router"),
    }
    faults = []
    with Streams([url], _CLIENTS) as streams:
        for name, fault in {**worker_faults, **router_faults}.items():
            streams.wait_for_more(_CLIENTS, _RECOVER_S)
            streams.routers_fail = name == "router killed"
            began = time.monotonic()
            fault()
            streams.wait_for_more(_CLIENTS, _RECOVER_S)
            faults.append(name)
            say(f"{name}: whole again after {time.monotonic() - began:.0f} s; {streams.counts}")
    for problem in streams.problems[:20]:
        say(problem)
    counts = streams.counts
    return {
        "streams": counts.streams,
        "incomplete": counts.incomplete,
        "resumed": counts.resumed,
        "faults": faults,
    }


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").exists()


def say(line: str) -> None:
    """At once: a run takes minutes."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
