"""The ports in deploy/ are those of the firewall table in docs/security.md."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from ray.scripts.scripts import start

from common.ports import Ports
from tests.cluster.test_deploy_files import DEPLOY, KUBERAY
from wire.options import PortOptions

TABLE = (DEPLOY.parent / "docs" / "security.md").read_text().split("## Firewall")[1].split("\n## ")[0]
RAY_FLAGS = {
    "node-manager-port", "object-manager-port", "runtime-env-agent-port", "dashboard-agent-grpc-port",
    "metrics-export-port", "min-worker-port", "max-worker-port",
}  # fmt: skip


def serve_config(name: str) -> Any:
    config = yaml.safe_load((DEPLOY / name).read_text())
    return yaml.safe_load(config["spec"]["serveConfigV2"]) if is_kuberay(name) else config


def is_kuberay(name: str) -> bool:
    return name in {file.name for file in KUBERAY}


@pytest.mark.parametrize("name", ["cluster-serve.yaml", "gpu-serve.yaml", "kuberay.yaml", "kuberay-gpu.yaml"])
def test_batons_ranges(name: str) -> None:
    (application,) = serve_config(name)["applications"]
    assert application["args"]["ports"] == dict(re.findall(r"`ports\.(\w+)` \((\d+-\d+)\)", TABLE))


def test_batons_ranges_are_apart_and_below_those_of_outgoing_connections() -> None:
    ports = PortOptions(**dict(re.findall(r"`ports\.(\w+)` \((\d+-\d+)\)", TABLE)))
    choices = [ports.of(use).choice for use in PortOptions.model_fields]
    choices.append(Ports(re.findall(r"`admin_ports` \((\d+-\d+)\)", TABLE)[0]).choice)
    taken = [port for choice in choices for port in choice]
    assert len(taken) == len(set(taken))
    assert max(taken) < 32768


def test_ray_knows_the_flags() -> None:
    assert {f"--{flag}" for flag in RAY_FLAGS} <= {option for one in start.params for option in one.opts}


def start_flags(name: str) -> list[dict[str, str]]:
    """Of `ray start`, which name ports, on the head and on a worker."""
    config = yaml.safe_load((DEPLOY / name).read_text())
    if is_kuberay(name):
        cluster = config["spec"]["rayClusterConfig"]
        groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
        return [{f: v for f, v in one["rayStartParams"].items() if f.endswith("-port")} for one in groups]
    starts = [config[f"{kind}_start_ray_commands"] for kind in ("head", "worker")]
    commands = [line for lines in starts for line in lines if "ray start" in line]
    return [dict(re.findall(r"--([a-z-]+-port)=(\d+)", command)) for command in commands]


@pytest.mark.parametrize("name", ["cluster.yaml", "aws.yaml", "gcp.yaml", "kuberay.yaml", "kuberay-gpu.yaml"])
def test_rays_ports(name: str) -> None:
    (said,) = re.findall(r"6379 \(head\), (\d+-\d+).*\((\d+-\d+)\)", TABLE)
    fixed, workers = (Ports(text).choice for text in said)
    nodes = start_flags(name)
    assert len(nodes) == (3 if name == "kuberay-gpu.yaml" else 2)
    for flags in nodes:
        assert flags.keys() == RAY_FLAGS
        assert (int(flags.pop("min-worker-port")), int(flags.pop("max-worker-port"))) == (
            workers[0], workers[-1],
        )  # fmt: skip
        assert sorted(map(int, flags.values())) == list(fixed)
