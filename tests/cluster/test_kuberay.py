"""KubeRay's manifests of deploy/ against its own schemas, and what they serve against Serve's and ours."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from cluster.config import parse_config
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
    groups = {
        group["groupName"]: group
        for group in MANIFESTS["kuberay-gpu.yaml"]["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    }
    sections = {"prefill": config.prefill, "decode": config.decode}
    assert groups.keys() == sections.keys()
    for role, section in sections.items():
        (container,) = groups[role]["template"]["spec"]["containers"]
        limits = container["resources"]["limits"]
        assert section.num_gpus == int(limits["nvidia.com/gpu"])
        assert section.num_cpus + config.router.num_cpus <= int(limits["cpu"])
        assert section.num_replicas == groups[role]["replicas"]
        assert section.labels.items() <= groups[role]["labels"].items()
    assert config.router.num_replicas <= sum(group["replicas"] for group in groups.values())
