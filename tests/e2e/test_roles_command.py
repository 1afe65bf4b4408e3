"""Four workers whose roles change, on a real Ray: `baton roles` shows and sets them while streams run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.e2e.ray_cluster import ROOT, RayCluster, free_ports, ray_cluster
from tests.e2e.served import Served, served
from tests.harness.leftovers import Run
from tests.router.conftest import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

START_S = 180.0
SWITCH_S = 60.0
QUESTIONS = [f"What does {name} do?" for name in ("os.path.join", "json.dumps", "re.sub", "heapq.merge")]


def config(port: int, admin_ports: str) -> dict[str, object]:
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": "baton",
                "route_prefix": "/",
                "import_path": "cluster.app:build",
                "args": {
                    "model": str(ROOT / "deploy" / "demo_model"),
                    "roles": "dynamic",
                    "router": {"options": {"admin_ports": admin_ports}},
                    "dynamic": {"num_replicas": 4, "num_cpus": 0.2, "drain_s": 30},
                    "worker": {
                        "page_size": 16,
                        "max_total_tokens": 16384,
                        "threads": 1,
                        "dtype": "float32",  # in bfloat16 an answer depends on its batch
                    },
                },
            }
        ],
    }


def baton_roles(cluster: RayCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cluster.cli", "roles", *arguments],
        env={**cluster.environment, "RAY_ADDRESS": cluster.address},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def wait_for_roles(client: Served, prefill: set[str] | int) -> None:
    """Until the router sees these prefill workers, or so many, and four workers in all."""
    deadline = time.monotonic() + SWITCH_S
    while True:
        workers = client.workers()
        found = {one["id"] for one in workers if one["role"] == "prefill"}
        if len(workers) == 4 and (found == prefill or len(found) == prefill):
            return
        assert time.monotonic() < deadline, workers
        time.sleep(0.2)


def running(cluster: RayCluster) -> list[dict[str, Any]]:
    return [replica for replica in cluster.replicas("router") if replica["state"] == "RUNNING"]


def ask_until(client: Served, question: str, stop: Event) -> list[str]:
    """The whole answers to one question, asked again and again."""
    answers = []
    while not stop.is_set():
        stream: Any = client.openai.chat.completions.create(
            model="demo_model", messages=[{"role": "user", "content": question}], temperature=0,
            max_tokens=60, stream=True, extra_body={"ignore_eos": True},
        )  # fmt: skip
        parts = [choice for chunk in stream for choice in chunk.choices]
        assert parts[-1].finish_reason == "length"
        answers.append("".join(part.delta.content or "" for part in parts))
    return answers


def test_roles_are_shown_and_set_while_streams_run(tmp_path: Path) -> None:
    port, admin_port = free_ports(2)
    run = Run.begin()
    with ray_cluster(tmp_path, run) as cluster, served(f"http://127.0.0.1:{port}", admin_port) as client:
        cluster.deploy(config(port, client.admin.option))
        cluster.wait_for({"router": 1, "worker": 4}, START_S)
        client.wait_for_workers(4)
        wait_for_roles(client, 2)
        pids = {one["id"]: one["pid"] for one in client.workers()}
        shown = baton_roles(cluster)
        assert (shown.returncode, shown.stdout.splitlines()[-1]) == (
            0,
            "worker: 2 prefill, 2 decode; roles: automatic",
        )
        stop = Event()
        with ThreadPoolExecutor(len(QUESTIONS)) as pool:
            streams = [pool.submit(ask_until, client, question, stop) for question in QUESTIONS]
            try:
                assert baton_roles(cluster, "--prefill", "1", "--decode", "3").returncode == 0
                wait_for_roles(client, 1)
                first = next(one["id"] for one in client.workers() if one["role"] == "prefill")
                other = next(one["id"] for one in client.workers() if one["role"] == "decode")
                assert baton_roles(cluster, f"{first}=decode", f"{other}=prefill").returncode == 0
                wait_for_roles(client, {other})
            finally:
                stop.set()
            answers = [one.result(120) for one in streams]
        assert all(len(set(one)) == 1 for one in answers), "each answer is the same in every role"
        assert {one["id"]: one["pid"] for one in client.workers()} == pids, "the processes are the same"
        (router,) = cluster.replicas("router")
        os.kill(router["pid"], signal.SIGKILL)  # the directory ends with it
        wait_until(lambda: [one["pid"] for one in running(cluster)] not in ([], [router["pid"]]), START_S)
        client.wait_for_workers(4)
        told = "worker: 1 prefill, 3 decode; roles: set"
        wait_until(lambda: baton_roles(cluster).stdout.splitlines()[-1:] == [told], START_S)
        refused = baton_roles(cluster, f"{other}=decode")
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "no prefill worker would be left" in refused.stderr
        client.settle()
