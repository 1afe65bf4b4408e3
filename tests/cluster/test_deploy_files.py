"""deploy/: Ray itself checks the cluster file; no file opens Ray to strangers or contains a secret."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema

from cluster.placeholders import PLACEHOLDERS

DEPLOY = Path(__file__).parents[2] / "deploy"
CLUSTER = DEPLOY / "cluster.yaml"
KUBERAY = (DEPLOY / "kuberay.yaml", DEPLOY / "kuberay-gpu.yaml")
each_kuberay = pytest.mark.parametrize("file", KUBERAY, ids=lambda file: file.stem)


def ray_cluster(file: Path) -> Any:
    return yaml.safe_load(file.read_text())["spec"]["rayClusterConfig"]


def placeholders(path: Path) -> set[str]:
    """Words in capitals of a file, without its comments, environment variables and words of the vendors."""
    text = re.sub("#.*", "", path.read_text())
    return set(re.findall(r"\b(?!RAY_|ONE_TO_ONE_NAT)(?:IMAGE\b|[A-Z]{2,}(?:_[A-Z0-9]+)+\b)(?!=)", text))


def test_the_placeholders_of_all_files_are_known_by_name_and_documented() -> None:
    page = (DEPLOY.parent / "docs" / "operations.md").read_text()
    found: dict[str, list[str]] = {}
    for path in sorted(DEPLOY.glob("*.yaml")):
        for word in placeholders(path):
            found.setdefault(word, []).append(path.name)
    assert found.keys() == PLACEHOLDERS.keys()
    for word, files in found.items():
        (row,) = (line for line in page.splitlines() if f"| `{word}` |" in line)
        assert row.split("|")[2].strip() == ", ".join(f"`{name}`" for name in files)


def test_ray_accepts_the_cluster_file() -> None:
    config = prepare_config(yaml.safe_load(CLUSTER.read_text()))
    validate_config(config)
    assert config["max_workers"] == len(config["provider"]["worker_ips"])


def test_every_node_of_ray_up_asks_for_the_token() -> None:
    config = yaml.safe_load(CLUSTER.read_text())
    assert "~/.ray/auth_token" in config["file_mounts"]
    for kind in ("head", "worker"):
        (start,) = (line for line in config[f"{kind}_start_ray_commands"] if "ray start" in line)
        assert "RAY_AUTH_MODE=token" in start


def test_the_gcs_of_ray_up_outlives_its_process() -> None:
    config = yaml.safe_load(CLUSTER.read_text())
    (start,) = (line for line in config["head_start_ray_commands"] if "ray start" in line)
    assert "RAY_REDIS_ADDRESS=" in start
    assert '--redis-password="$(cat ' in start, "the password is in a file of the head, not here"


@each_kuberay
def test_kuberay_asks_for_the_token_and_keeps_the_gcs_in_redis(file: Path) -> None:
    cluster = ray_cluster(file)
    assert cluster["authOptions"] == {"mode": "token"}
    options = cluster["gcsFaultToleranceOptions"]
    assert options["redisAddress"]
    assert "secretKeyRef" in options["redisPassword"]["valueFrom"], "not in the file"
    assert "auth_token" not in file.read_text(), "the operator makes it"


@each_kuberay
def test_kuberays_replicas_are_not_on_the_head(file: Path) -> None:
    assert ray_cluster(file)["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


@each_kuberay
def test_streams_can_end_before_kuberay_deletes_a_cluster_that_was_replaced(file: Path) -> None:
    delay = yaml.safe_load(file.read_text())["spec"]["rayClusterDeletionDelaySeconds"]
    assert delay >= 3600, "KubeRay's default is 60"


@each_kuberay
def test_what_kuberays_pods_download_goes_to_a_volume(file: Path) -> None:
    for group in ray_cluster(file)["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        (mount,) = (one for one in pod["containers"][0]["volumeMounts"] if one["mountPath"] == "/models")
        assert mount["name"] in {volume["name"] for volume in pod["volumes"]}
    for image in ("cpu", "cuda"):
        assert "HF_HOME=/models" in (DEPLOY / "docker" / f"{image}.Dockerfile").read_text()


@each_kuberay
def test_kuberay_serves_the_application_of_the_cluster_file(file: Path) -> None:
    (theirs,) = yaml.safe_load((DEPLOY / "cluster-serve.yaml").read_text())["applications"]
    (ours,) = yaml.safe_load(yaml.safe_load(file.read_text())["spec"]["serveConfigV2"])["applications"]
    for key in ("name", "route_prefix", "import_path"):
        assert ours[key] == theirs[key]


@pytest.mark.parametrize("name", ["local.yaml", "cluster-serve.yaml", "gpu-serve.yaml"])
def test_serve_accepts_its_configurations(name: str) -> None:
    assert ServeDeploySchema.model_validate(yaml.safe_load((DEPLOY / name).read_text())).applications


def test_every_deploy_file_is_checked_by_a_test() -> None:
    checked = {"aws", "cluster", "cluster-serve", "demo", "gcp", "gpu-serve", "local"}
    checked |= {file.stem for file in KUBERAY}
    assert {path.stem for path in DEPLOY.glob("*.yaml")} == checked, "add the new file's test, then its name"


def test_gpu_replicas_find_the_nodes_of_the_clouds() -> None:
    (application,) = yaml.safe_load((DEPLOY / "gpu-serve.yaml").read_text())["applications"]
    for cloud in ("aws", "gcp"):
        kinds = yaml.safe_load((DEPLOY / f"{cloud}.yaml").read_text())["available_node_types"]
        for role in ("prefill", "decode"):
            section = application["args"][role]
            assert section["labels"].items() <= kinds[role]["labels"].items()
            node = kinds[role]["resources"]
            wanted = {"CPU": section["num_cpus"], "GPU": section["num_gpus"]}
            fit = min(node[resource] // amount for resource, amount in wanted.items())
            assert fit == node["GPU"], "as many replicas as GPUs"
            least, most = (section["autoscaling_config"][f"{bound}_replicas"] for bound in ("min", "max"))
            assert least <= fit * kinds[role]["min_workers"]
            assert most <= fit * kinds[role]["max_workers"]
