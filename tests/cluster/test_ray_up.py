"""deploy/cluster.yaml through Ray's own code: its schema, its preparation, workers that it starts."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.commands import _bootstrap_config
from ray.autoscaler._private.local.config import LOCAL_CLUSTER_NODE_TYPE
from ray.autoscaler._private.resource_demand_scheduler import _add_min_workers_nodes
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.schema import AutoscalerInstance
from ray.core.generated.autoscaler_pb2 import NodeState, NodeStatus
from ray.core.generated.instance_manager_pb2 import Instance, NodeKind

CLUSTER = Path(__file__).parents[2] / "deploy" / "cluster.yaml"


def bootstrapped(workers: int) -> dict[str, Any]:
    """The file as `ray up` sees it, with that many workers."""
    raw = yaml.safe_load(CLUSTER.read_text())
    raw["provider"]["worker_ips"] = [f"10.0.0.{number}" for number in range(2, 2 + workers)]
    del raw["auth"]["ssh_private_key"]  # Ray looks for the file, which is the operator's
    config: dict[str, Any] = _bootstrap_config(raw, no_config_cache=True)
    return config


def started_by_the_first_autoscaler(config: dict[str, Any]) -> int:
    """Workers that Ray's older autoscaler adds to a lone head."""
    _, _, to_add = _add_min_workers_nodes(
        node_resources=[],
        node_type_counts={LOCAL_CLUSTER_NODE_TYPE: 1},
        node_types=config["available_node_types"],
        max_workers=config["max_workers"],
        head_node_type=config["head_node_type"],
        ensure_min_cluster_size=[],
        utilization_scorer=lambda *_: None,
    )
    return int(to_add.get(LOCAL_CLUSTER_NODE_TYPE, 0))


def started_by_the_second_autoscaler(config: dict[str, Any]) -> int:
    """Workers that autoscaler v2 adds to a lone head."""
    node = NodeState(ray_node_type_name=LOCAL_CLUSTER_NODE_TYPE, status=NodeStatus.IDLE, node_id=b"head")
    instance = Instance(
        instance_type=LOCAL_CLUSTER_NODE_TYPE,
        status=Instance.RAY_RUNNING,
        instance_id="head",
        node_kind=NodeKind.HEAD,
        cloud_instance_id="head",
        node_id=b"head".hex(),
    )
    autoscaling = AutoscalingConfig(config, skip_content_hash=True)
    request = SchedulingRequest(
        disable_launch_config_check=True,
        node_type_configs=autoscaling.get_node_type_configs(),
        max_num_nodes=autoscaling.get_max_num_nodes(),
        current_instances=[AutoscalerInstance("head", node, instance)],
    )
    return sum(launch.count for launch in ResourceDemandScheduler(None).schedule(request).to_launch)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_every_listed_worker_is_started(workers: int) -> None:
    config = bootstrapped(workers)
    (start,) = (line for line in config["head_start_ray_commands"] if "ray start" in line)
    assert " RAY_enable_autoscaler_v2=0 " in start, "the first autoscaler: see the next test"
    assert started_by_the_first_autoscaler(config) == workers


def test_the_second_autoscaler_still_counts_the_head_as_a_worker() -> None:
    # When this fails, Ray has been corrected and deploy/cluster.yaml needs no RAY_enable_autoscaler_v2=0.
    assert started_by_the_second_autoscaler(bootstrapped(3)) == 2


def test_the_setup_of_a_node_builds_the_kernels() -> None:
    setup = bootstrapped(1)["setup_commands"]
    made, built = (setup.index(line) for line in setup if "make setup" in line or "engine.cpu.build" in line)
    assert made < built
    assert "||" not in setup[built], "a kernel that cannot be built ends ray up"


def test_what_apt_get_installs_is_what_is_looked_for() -> None:
    (command,) = (line for line in bootstrapped(1)["setup_commands"] if "apt-get" in line)
    looked_for, _, missing = command.partition("||")
    packages = looked_for.removeprefix("dpkg -s ").partition(" > ")[0].split()
    installed = missing.partition("apt-get install -y -qq ")[2].rstrip("; }").split()
    assert sorted([*packages, "libcurl4"]) == sorted(installed)
    assert "libcurl.so.4" in looked_for


def test_a_node_gets_no_environment_of_the_machine_that_started_it() -> None:
    assert {".venv", ".git"} <= set(bootstrapped(1)["rsync_exclude"])


@pytest.mark.parametrize(("works_at", "starts", "code"), [(1, 1, 0), (3, 3, 0), (4, 3, 1)])
def test_a_worker_that_does_not_start_is_started_again(
    tmp_path: Path, works_at: int, starts: int, code: int
) -> None:
    # Ray's autoscaler runs these commands once, and never again for a worker on which they failed.
    script = f"""
    echo "$1" >> {tmp_path}/log
    [ "$1" = stop ] || [ "$(grep -c start {tmp_path}/log)" -ge {works_at} ]
    """
    ray = tmp_path / "baton" / ".venv" / "bin" / "ray"
    ray.parent.mkdir(parents=True)
    ray.write_text(f"#!/bin/sh{script}")
    ray.chmod(0o755)
    command = bootstrapped(1)["worker_start_ray_commands"][-1]
    done = subprocess.run(
        ["bash", "-c", f"({command})"], env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    )
    assert done.returncode == code
    assert (tmp_path / "log").read_text().split() == (["start", "stop"] * starts)[:-1]
