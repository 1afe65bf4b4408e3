"""`baton doctor --ray-address`: every node of a Ray cluster is asked, and reached from the others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.ray_cluster import ROOT, ray_environment, short_temporary_directory
from tests.support.members import write_secret

pytestmark = pytest.mark.e2e

TWO_NODES = """
import sys
from ray.cluster_utils import Cluster
from cluster.cli import main

node = {"num_cpus": 1, "object_store_memory": 80_000_000}
cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
try:
    cluster.add_node(**node)
    sys.exit(main(["doctor", sys.argv[1], "--ray-address", cluster.address, "--json"]))
finally:
    cluster.shutdown()
"""


def test_two_nodes_and_one_fault(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    settings = {
        "model": str(ROOT / "deploy" / "demo_model"),
        "interface": "auto",
        "ports": {"mailboxes": "28500-28549", "events": "28550-28599", "kv": "28600-28649"},
        "cluster_secret_file": str(write_secret(tmp_path)),
        "worker": {"max_total_tokens": 4096},
        "decode": {"num_gpus": 1, "resources": {"baton_test": 1}},
    }
    config.write_text(json.dumps(settings))
    with short_temporary_directory() as temporary:
        done = subprocess.run(
            [sys.executable, "-c", TWO_NODES, str(config)],
            capture_output=True, text=True, timeout=240, cwd=ROOT, env=ray_environment(temporary),
        )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    faults = [one for one in found if one["grade"] == "FAULT"]
    assert {one["found"].rpartition(",")[0] for one in faults} >= {"decode asks for baton_test 1"}
    assert {one["check"] for one in faults} == {"resources"}
    nodes = {one["node"] for one in found} - {"all nodes"}
    assert len(nodes) == 2
    for check in ("versions", "clock", "address", "ports", "reachable", "secret", "model", "shared memory"):
        assert {one["node"] for one in found if one["check"] == check} == nodes, check
    for one in found:
        if one["check"] == "reachable":
            assert one["found"].endswith("from 1 node(s)")
