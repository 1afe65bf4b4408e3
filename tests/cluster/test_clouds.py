"""deploy/aws.yaml and deploy/gcp.yaml: through Ray's own checks, and their nodes against the clouds' APIs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest

from tests.cluster.schemas import errors

ROOT = Path(__file__).parents[2]
SCHEMAS = {"aws": "aws-run-instances", "gcp": "gcp-instance"}
OF_RAY = {"aws": {"SubnetIds": "SubnetId"}, "gcp": {}}
"""Keys of a node that Ray itself replaces: SubnetIds, by the SubnetId that it chose from it."""


def raw(cloud: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / f"{cloud}.yaml").read_text())
    return loaded


def prepared(cloud: str) -> dict[str, Any]:
    config: dict[str, Any] = prepare_config(raw(cloud))
    validate_config(config)
    return config


def as_sent(cloud: str, node: dict[str, Any]) -> dict[str, Any]:
    """A node's configuration as Ray sends it, as far as it is in the file."""
    renamed = OF_RAY[cloud]
    return {renamed.get(key, key): value[0] if key in renamed else value for key, value in node.items()}


def faults(cloud: str, node: dict[str, Any]) -> list[str]:
    schema = json.loads((ROOT / "tests" / "data" / "clouds" / f"{SCHEMAS[cloud]}.json").read_text())
    return errors(as_sent(cloud, node), schema)


@pytest.mark.parametrize("cloud", SCHEMAS)
def test_the_cloud_knows_every_key_of_every_node(cloud: str) -> None:
    for name, kind in prepared(cloud)["available_node_types"].items():
        assert faults(cloud, kind["node_config"]) == [], name


@pytest.mark.parametrize(
    ("cloud", "change", "says"),
    [
        ("aws", {"InstanceTyp": "p5.48xlarge"}, "InstanceTyp"),
        ("aws", {"InstanceType": "p5.49xlarge"}, "p5.49xlarge"),
        ("aws", {"NetworkInterfaces": [{"NetworkCard": 0}]}, "NetworkCard"),
        ("gcp", {"machinType": "n2-standard-8"}, "machinType"),
        ("gcp", {"networkInterfaces": [{"nicType": "RDMA"}]}, "RDMA"),
        ("gcp", {"scheduling": [{"preemptible": True}]}, "not of type 'object'"),
    ],
)
def test_a_wrong_key_or_value_of_a_node_is_seen(cloud: str, change: dict[str, Any], says: str) -> None:
    (fault,) = faults(cloud, raw(cloud)["available_node_types"]["head"]["node_config"] | change)
    assert says in fault


@pytest.mark.parametrize("cloud", SCHEMAS)
def test_one_node_of_each_kind_of_worker_is_started(cloud: str) -> None:
    autoscaling = AutoscalingConfig(prepared(cloud), skip_content_hash=True)
    request = SchedulingRequest(
        disable_launch_config_check=True,
        node_type_configs=autoscaling.get_node_type_configs(),
        max_num_nodes=autoscaling.get_max_num_nodes(),
    )
    launches = ResourceDemandScheduler(None).schedule(request).to_launch
    assert {launch.instance_type: launch.count for launch in launches} == {"prefill": 1, "decode": 1}


@pytest.mark.parametrize("cloud", SCHEMAS)
def test_no_replica_is_on_the_head(cloud: str) -> None:
    config = prepared(cloud)
    assert config["available_node_types"][config["head_node_type"]]["resources"] == {"CPU": 0}
    (start,) = (line for line in config["head_start_ray_commands"] if "ray start" in line)
    assert " --num-cpus=0 " in start


@pytest.mark.parametrize("cloud", SCHEMAS)
def test_secrets_are_mounted_and_models_are_kept(cloud: str) -> None:
    config = prepared(cloud)
    assert config["file_mounts"]["/etc/baton"] == "~/.baton"
    (volume,) = (option for option in config["docker"]["run_options"] if ":/models" in option)
    host = volume.removeprefix("--volume=").partition(":")[0]
    assert config["initialization_commands"] == [f"sudo install --directory --owner=1000 {host}"]


@pytest.mark.parametrize("cloud", SCHEMAS)
def test_every_node_asks_for_the_token(cloud: str) -> None:
    config = prepared(cloud)
    assert "/home/baton/.ray/auth_token" in config["file_mounts"]
    for kind in ("head", "worker"):
        (start,) = (line for line in config[f"{kind}_start_ray_commands"] if "ray start" in line)
        assert "RAY_AUTH_MODE=token" in start


@pytest.mark.parametrize("cloud", SCHEMAS)
def test_nothing_is_installed_into_the_image(cloud: str) -> None:
    config = prepared(cloud)  # with the defaults of Ray's provider, which install clients
    commands = [*config["head_setup_commands"], *config["worker_setup_commands"]]
    assert not [line for line in commands if "pip install" in line]
