"""deploy/kuberay.yaml against KubeRay's own schemas, and what it serves against Serve's and ours."""

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

ROOT = Path(__file__).parents[2]
MANIFEST: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "kuberay.yaml").read_text())
VERSIONS = ("1.5.1", "1.7.0")


def schema(version: str) -> Any:
    return json.loads((ROOT / "tests" / "data" / "kuberay" / f"rayservices-{version}.json").read_text())


def changed(*path: str | int, value: Any) -> dict[str, Any]:
    """The manifest with another value at a path."""
    manifest = copy.deepcopy(MANIFEST)
    place: Any = manifest
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return manifest


@pytest.mark.parametrize("version", VERSIONS)
def test_kuberay_accepts_the_manifest(version: str) -> None:
    assert errors(MANIFEST, schema(version)) == []


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


def test_the_version_of_ray_is_the_one_that_is_tested() -> None:
    lock = (ROOT / "requirements.lock").read_text().splitlines()
    assert f"ray=={MANIFEST['spec']['rayClusterConfig']['rayVersion']}" in lock


def test_serve_and_baton_accept_what_it_deploys() -> None:
    config = yaml.safe_load(MANIFEST["spec"]["serveConfigV2"])
    (application,) = ServeDeploySchema.model_validate(config).applications
    assert application.import_path == "cluster.app:build"
    assert parse_config(application.args).model
