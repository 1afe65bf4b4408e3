"""deploy/: Ray itself checks the cluster file; no file opens Ray to strangers or contains a secret."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from cluster.placeholders import PLACEHOLDERS

DEPLOY = Path(__file__).parents[2] / "deploy"
CLUSTER = DEPLOY / "cluster.yaml"
KUBERAY = DEPLOY / "kuberay.yaml"


def ray_cluster() -> Any:
    return yaml.safe_load(KUBERAY.read_text())["spec"]["rayClusterConfig"]


def placeholders(path: Path) -> set[str]:
    """Words in capitals of a file, without its comments, environment variables and words of the vendors."""
    text = re.sub("#.*", "", path.read_text())
    return set(re.findall(r"\b(?!RAY_|ONE_TO_ONE_NAT)(?:IMAGE\b|[A-Z]{2,}(?:_[A-Z0-9]+)+\b)(?!=)", text))


def test_the_placeholders_of_all_files_are_known_by_name_and_documented() -> None:
    page = (DEPLOY.parent / "docs" / "operations.md").read_text()
    found: dict[str, list[str]] = {}
    for path in sorted(DEPLOY.glob("*.yaml")):
        for word in placeholders(path) - {"CHANGE_ME"}:  # the refusal of this one is the secret's own
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


def test_kuberay_asks_for_the_token_and_keeps_the_gcs_in_redis() -> None:
    cluster = ray_cluster()
    assert cluster["authOptions"] == {"mode": "token"}
    options = cluster["gcsFaultToleranceOptions"]
    assert options["redisAddress"]
    assert "secretKeyRef" in options["redisPassword"]["valueFrom"], "not in the file"
    assert "auth_token" not in KUBERAY.read_text(), "the operator makes it"


def test_kuberays_replicas_are_not_on_the_head() -> None:
    assert ray_cluster()["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_kuberay_serves_what_the_cluster_file_serves() -> None:
    (theirs,) = yaml.safe_load((DEPLOY / "cluster-serve.yaml").read_text())["applications"]
    (ours,) = yaml.safe_load(yaml.safe_load(KUBERAY.read_text())["spec"]["serveConfigV2"])["applications"]
    for key in ("name", "route_prefix", "import_path"):
        assert ours[key] == theirs[key]
    assert ours["args"]["model"] == theirs["args"]["model"]
