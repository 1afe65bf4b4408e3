"""deploy/cluster.yaml: Ray itself checks it."""

from __future__ import annotations

from pathlib import Path

import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

CLUSTER = Path(__file__).parents[2] / "deploy" / "cluster.yaml"


def test_ray_accepts_the_cluster_file() -> None:
    config = prepare_config(yaml.safe_load(CLUSTER.read_text()))
    validate_config(config)
    assert config["max_workers"] == len(config["provider"]["worker_ips"])
