"""A Ray cluster for tests, started with Ray's own commands and ended by handle; never `ray stop`."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.harness.leftovers import Run

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
_OBJECT_STORE_BYTES = 100_000_000
_COMMAND_S = 120.0
_END_S = 60.0
_POLL_S = 0.5


def free_ports(count: int) -> list[int]:
    """Different ports that are free now: Ray's processes must be told numbers to stay off the defaults."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def ray_environment(temporary: Path) -> dict[str, str]:
    """Environment of a Ray that shares nothing with another one on this machine, not even its token."""
    return {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_TMPDIR": str(temporary),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }


@contextmanager
def short_temporary_directory() -> Iterator[Path]:
    """Directly below /tmp: Ray's Unix sockets live in it, and their paths have 107 characters at most."""
    directory = Path(tempfile.mkdtemp(prefix="baton-", dir="/tmp"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


@dataclass
class RayCluster:
    """A one-node cluster with its dashboard, through which `serve` commands go."""

    head: subprocess.Popen[bytes]
    dashboard: str
    environment: dict[str, str]
    directory: Path
    address: str

    def deploy(self, config: dict[str, object]) -> None:
        """`serve deploy`: also how a running application is changed. Waits for the dashboard to come up."""
        file = self.directory / "serve.yaml"
        file.write_text(yaml.safe_dump(config))
        deadline = time.monotonic() + _COMMAND_S
        while (done := self.serve("deploy", str(file))).returncode:
            assert time.monotonic() < deadline, done.stdout + done.stderr
            time.sleep(_POLL_S)

    def wait_for(self, replicas: dict[str, int], timeout_s: float) -> None:
        """Until exactly these replicas run, and none is starting or stopping."""
        deadline = time.monotonic() + timeout_s
        while (found := self.replica_states()) != {name: {"RUNNING": n} for name, n in replicas.items()}:
            assert time.monotonic() < deadline, f"wanted {replicas}, found {found}:\n{self.status()}"
            time.sleep(_POLL_S)

    def replica_states(self) -> dict[str, dict[str, int]]:
        """Replicas by deployment and state."""
        status = yaml.safe_load(self.status())
        if not isinstance(status, dict):  # a sentence: nothing is deployed
            return {}
        deployments = status.get("applications", {}).get("baton", {}).get("deployments", {})
        return {name: one["replica_states"] for name, one in deployments.items()}

    def replicas(self, deployment: str) -> list[dict[str, Any]]:
        """A deployment's replicas, with their state and their process."""
        token = {"Authorization": f"Bearer {self.environment['RAY_AUTH_TOKEN']}"}
        told = httpx.get(f"{self.dashboard}/api/serve/applications/", headers=token, timeout=_COMMAND_S)
        applications = told.raise_for_status().json()["applications"]
        return list(applications["baton"]["deployments"][deployment]["replicas"])

    def status(self) -> str:
        """`serve status`."""
        return self.serve("status").stdout

    def serve(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A `serve` command."""
        return subprocess.run(
            [str(BIN / "serve"), *arguments, "-a", self.dashboard],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
        )


@contextmanager
def ray_cluster(directory: Path, run: Run) -> Iterator[RayCluster]:
    """`ray start --head --block`, ended with SIGTERM; then nothing of the run may be left."""
    with short_temporary_directory() as temporary:
        environment = ray_environment(temporary)
        gcs, dashboard, agent, agent_grpc, client, metrics, runtime_env = free_ports(7)
        with (directory / "ray.log").open("wb") as log:
            head = subprocess.Popen(
                [
                    *(str(BIN / "ray"), "start", "--head", "--block", "--disable-usage-stats"),
                    *("--node-ip-address=127.0.0.1", f"--port={gcs}", f"--temp-dir={temporary}"),
                    *("--include-dashboard=true", f"--dashboard-port={dashboard}"),
                    *(f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={agent_grpc}"),
                    *(f"--ray-client-server-port={client}", f"--metrics-export-port={metrics}"),
                    *(f"--runtime-env-agent-port={runtime_env}", "--num-cpus=2"),
                    f"--object-store-memory={_OBJECT_STORE_BYTES}",
                ],
                env=environment,
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        cluster = RayCluster(
            head, f"http://127.0.0.1:{dashboard}", environment, directory, f"127.0.0.1:{gcs}"
        )
        try:
            yield cluster
            run.look()
            cluster.serve("shutdown", "-y")
            deadline = time.monotonic() + _END_S
            while cluster.replica_states() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        finally:
            head.send_signal(signal.SIGTERM)
            try:
                head.wait(_END_S)
            except subprocess.TimeoutExpired:
                head.kill()
                head.wait(_END_S)
                raise
    assert run.leftovers(10.0) == []
