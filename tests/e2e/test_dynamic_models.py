"""Two models whose workers change their roles, behind one router on a real Ray: each has a total and roles of
its own. The total of one follows its objectives, which no fleet can meet, and that of the other stays."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.e2e.ray_cluster import ROOT, RayCluster, free_ports, ray_cluster
from tests.e2e.served import Served, served
from tests.e2e.test_roles_command import baton_roles
from tests.harness.leftovers import Run
from tests.router.conftest import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

START_S = 180.0
SCALE_S = 180.0
SCALING = {"min_replicas": 2, "max_replicas": 3, "start_s": 1, "look_back_period_s": 11}


def _config(port: int, admin_ports: str) -> dict[str, object]:
    model = str(ROOT / "deploy" / "demo_model")
    small = {"num_cpus": 0.1, "drain_s": 20}
    args = {
        "roles": "dynamic",
        "models": [
            {"model": model, "served_model_name": "a", "dynamic": {**small, "num_replicas": 2}},
            {
                "model": model, "served_model_name": "b",
                "dynamic": {**small, "itl_s": 1e-6, "autoscaling_config": SCALING},
            },
        ],
        "router": {"num_cpus": 0.1, "options": {"admin_ports": admin_ports}},
        "worker": {"page_size": 16, "max_total_tokens": 8192, "threads": 1},
    }  # fmt: skip
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {"name": "baton", "route_prefix": "/", "import_path": "cluster.app:build", "args": args}
        ],
    }


def _roles(cluster: RayCluster) -> dict[str, Any]:
    shown = baton_roles(cluster, "--json")
    assert shown.returncode == 0, shown.stderr
    return dict(json.loads(shown.stdout))


def _counts(client: Served, model: str) -> dict[str, int]:
    found = [one["role"] for one in client.workers() if one["model"] == model]
    return {role: found.count(role) for role in ("prefill", "decode")}


def _answer_until(client: Served, model: str, stop: Event) -> str:
    """Ask a model again and again. Returns who has answered last."""
    while True:
        answer = client.openai.completions.create(
            model=model, prompt="Once", max_tokens=200, temperature=0, extra_body={"ignore_eos": True}
        )
        if stop.is_set():
            return answer.model


def test_each_model_has_its_own_total_and_roles(tmp_path: Path) -> None:
    port, admin_port = free_ports(2)
    run = Run.begin()
    with ray_cluster(tmp_path, run) as cluster, served(f"http://127.0.0.1:{port}", admin_port) as client:
        cluster.deploy(_config(port, client.admin.option))
        cluster.wait_for({"router": 1, "worker-a": 2, "worker-b": 2}, START_S)
        client.wait_for_workers(4)
        assert _counts(client, "a") == _counts(client, "b") == {"prefill": 1, "decode": 1}
        assert _roles(cluster)["decided"] == {"worker-a": "automatic", "worker-b": "automatic"}

        stop = Event()
        with ThreadPoolExecutor(4) as pool:
            streams = [pool.submit(_answer_until, client, model, stop) for model in ("a", "b", "b", "b")]
            try:
                wait_until(lambda: sum(_counts(client, "b").values()) == 3, SCALE_S)
            finally:
                stop.set()
            assert [one.result(60) for one in streams] == ["a", "b", "b", "b"]
        assert _counts(client, "a") == {"prefill": 1, "decode": 1}
        refused = baton_roles(cluster, "--prefill", "2", "--decode", "1")
        assert "name one deployment; there are worker-a, worker-b" in refused.stderr
        for prefill, decode in ((1, 2), (2, 1)):
            wanted = ("--prefill", str(prefill), "--decode", str(decode), "--deployment", "worker-b")
            assert baton_roles(cluster, *wanted).returncode == 0
            wait_until(lambda: _counts(client, "b") == {"prefill": prefill, "decode": decode}, START_S)  # noqa: B023
        assert _roles(cluster)["decided"] == {"worker-a": "automatic", "worker-b": "set"}
        client.settle()
