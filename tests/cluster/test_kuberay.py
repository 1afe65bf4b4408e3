"""KubeRay's manifests of deploy/ against its own schemas, and what they serve against Serve's and ours."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.autoscaler_pb2 import ResourceRequestByCount
from ray.core.generated.common_pb2 import LabelSelectorOperator
from ray.serve.schema import ServeDeploySchema

from cluster.config import most_replicas, parse_config
from tests.cluster.schemas import errors
from tests.cluster.test_deploy_files import KUBERAY

ROOT = Path(__file__).parents[2]
MANIFESTS: dict[str, dict[str, Any]] = {file.name: yaml.safe_load(file.read_text()) for file in KUBERAY}
VERSIONS = ("1.5.1", "1.7.0")


def schema(version: str) -> Any:
    return json.loads((ROOT / "tests" / "data" / "kuberay" / f"rayservices-{version}.json").read_text())


def changed(*path: str | int, value: Any) -> dict[str, Any]:
    """A manifest with another value at a path."""
    manifest = copy.deepcopy(MANIFESTS["kuberay.yaml"])
    place: Any = manifest
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return manifest


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", MANIFESTS)
def test_kuberay_accepts_the_manifest(name: str, version: str) -> None:
    assert errors(MANIFESTS[name], schema(version)) == []


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("spec", "rayClusterConfig", "authOption"), {}, "authOption"),
        (("spec", "rayClusterConfig", "authOptions", "mode"), "tokens", "'tokens' is not one of"),
        (("spec", "rayClusterConfig", "workerGroupSpecs", 0, "replicas"), "two", "not of type 'integer'"),
        (
            (
                "spec",
                "rayClusterConfig",
                "headGroupSpec",
                "template",
                "spec",
                "containers",
                0,
                "imagePull",
            ),
            "Always",
            "imagePull",
        ),
    ],
)
def test_a_wrong_key_or_value_is_seen(path: tuple[str | int, ...], value: Any, says: str) -> None:
    found = errors(changed(*path, value=value), schema("1.7.0"))
    assert found
    assert all(says in error for error in found)  # more than one where head and workers share a template


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_version_of_ray_is_the_one_that_is_tested(name: str) -> None:
    lock = (ROOT / "requirements.lock").read_text().splitlines()
    assert f"ray=={MANIFESTS[name]['spec']['rayClusterConfig']['rayVersion']}" in lock


def cluster(name: str) -> Any:
    return MANIFESTS[name]["spec"]["rayClusterConfig"]


def application(name: str) -> Any:
    config = yaml.safe_load(MANIFESTS[name]["spec"]["serveConfigV2"])
    (only,) = ServeDeploySchema.model_validate(config).applications
    return only


@pytest.mark.parametrize("name", MANIFESTS)
def test_serve_and_baton_accept_what_it_deploys(name: str) -> None:
    assert application(name).import_path == "cluster.app:build"
    assert parse_config(application(name).args).model


def test_each_gpu_has_a_replica_of_its_role_and_room_for_a_router() -> None:
    config = parse_config(application("kuberay-gpu.yaml").args)
    groups = {group["groupName"]: group for group in cluster("kuberay-gpu.yaml")["workerGroupSpecs"]}
    sections = {"prefill": config.prefill, "decode": config.decode}
    assert groups.keys() == sections.keys()
    for role, section in sections.items():
        (container,) = groups[role]["template"]["spec"]["containers"]
        limits, scaling = container["resources"]["limits"], section.autoscaling_config
        assert scaling is not None
        assert section.num_gpus == int(limits["nvidia.com/gpu"])
        assert section.num_cpus + config.router.num_cpus <= int(limits["cpu"])
        assert scaling.min_replicas == groups[role]["replicas"] == groups[role]["minReplicas"]
        assert section.labels.items() <= groups[role]["labels"].items()
    assert config.router.num_replicas <= sum(group["replicas"] for group in groups.values())


def launched(name: str) -> dict[str, int]:
    """Pods that Ray's autoscaler adds, by group, for all replicas that may run, by Ray's own code."""
    config = parse_config(application(name).args)
    about = {"metadata": {"name": "baton", "namespace": "default"}, "status": {}}
    derived = _derive_autoscaling_config_from_ray_cr({**about, "spec": cluster(name)})
    autoscaling = AutoscalingConfig(derived, skip_content_hash=True)
    equals = LabelSelectorOperator.LABEL_OPERATOR_IN
    requests = []
    for section in (config.router, *config.worker_sections().values()):
        wanted = {"CPU": section.num_cpus, "GPU": section.num_gpus}
        selectors = [[(key, equals, [value]) for key, value in section.labels.items()]]
        request = ResourceRequestUtil.make(wanted, label_selectors=selectors)
        requests.append(ResourceRequestByCount(request=request, count=most_replicas(section)))
    asked = SchedulingRequest(
        disable_launch_config_check=True,
        node_type_configs=autoscaling.get_node_type_configs(),
        max_num_nodes=autoscaling.get_max_num_nodes(),
        resource_requests=requests,
    )
    answer = ResourceDemandScheduler(None).schedule(asked)
    assert not answer.infeasible_resource_requests
    return {launch.instance_type: launch.count for launch in answer.to_launch}


@pytest.mark.parametrize("name", MANIFESTS)
def test_there_are_pods_for_all_replicas_that_autoscaling_may_want(name: str) -> None:
    assert cluster(name)["enableInTreeAutoscaling"] is True, "else replicas wait for a pod that nobody adds"
    assert cluster(name)["autoscalerOptions"]["version"] == "v2", "the other does not know labels"
    assert launched(name) == {
        group["groupName"]: group["maxReplicas"] for group in cluster(name)["workerGroupSpecs"]
    }
