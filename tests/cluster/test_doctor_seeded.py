"""`baton doctor` finds faults that are seeded at their source: a clock, a mount, installed packages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import common
from cluster.config import parse_config
from cluster.doctor import gather as gathering
from cluster.doctor import nodes
from cluster.doctor.checks import judge
from cluster.doctor.facts import Case, Finding, Grade, NodeFacts
from cluster.doctor.gather import gather

ROOT = Path(common.__file__).parents[1]
CONFIG = parse_config({"model": "m", "worker": {"engine": "fake"}})
OFF_S = 90.0
CLOCK = """
import sys
from cluster.doctor.nodes import Probe
probe = Probe("b")
for _ in sys.stdin:
    print(probe.clock(), flush=True)
"""
VERSIONS = """
import json
from cluster.doctor.gather import gather
print(json.dumps(gather("c", None, b"").versions))
"""


def faults(check: str, *facts: NodeFacts) -> list[Finding]:
    found = judge(Case(facts, [], CONFIG))
    return [one for one in found if one.grade is Grade.FAULT and one.check == check]


def three_nodes() -> list[NodeFacts]:
    """This one, thrice."""
    facts = gather("a", None, b"")
    return [replace(facts, node=name) for name in "abc"]


# -- the clock -------------------------------------------------------------------------------------


@contextmanager
def clock_of_a_node(*before: str) -> Iterator[nodes.Probes]:
    """A probe's clock in a process that is started with `before` in front. It answers as one of Ray would."""
    process = subprocess.Popen(
        [*before, sys.executable, "-c", CLOCK],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "FAKETIME_DONT_FAKE_MONOTONIC": "1"},
    )  # fmt: skip

    def ask(method: str, arguments: Mapping[str, tuple[()]], bound_s: float) -> dict[str, float]:
        assert method == "clock"
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        return {name: float(process.stdout.readline()) for name in arguments}

    try:
        yield cast("nodes.Probes", SimpleNamespace(ask=ask))
    finally:
        process.communicate(timeout=20.0)


def seen_from_here(probes: nodes.Probes, node: NodeFacts) -> NodeFacts:
    ahead, error = nodes._clock(probes, node.node)
    return replace(node, clock_ahead_s=ahead, clock_error_s=error)


@pytest.mark.skipif(shutil.which("faketime") is None, reason="setting a clock off needs faketime")
@pytest.mark.parametrize(("off", "says"), [(OFF_S, "ahead of"), (-OFF_S, "behind")])
def test_a_clock_that_is_off_by_90_s(off: float, says: str) -> None:
    a, b, c = three_nodes()
    with clock_of_a_node("faketime", "-f", f"{off:+g}s") as wrong, clock_of_a_node() as right:
        (fault,) = faults("clock", a, seen_from_here(wrong, b), seen_from_here(right, c))
    assert fault.node == "b"
    assert abs(float(fault.found.partition(" ")[0]) - OFF_S) < 1.0
    assert f" s {says} the others" in fault.found
    assert "run a time service there (chrony, systemd-timesyncd)" in fault.remedy


def test_a_clock_that_is_right() -> None:
    a, b, c = three_nodes()
    with clock_of_a_node() as right:
        assert faults("clock", a, seen_from_here(right, b), c) == []


# -- /dev/shm --------------------------------------------------------------------------------------


def doctor_with_shared_memory(size: str) -> list[dict[str, Any]]:
    """What it finds on a machine whose /dev/shm has this size. Ours is not touched: the mount is seen by no
    process but these."""
    inside = 'mount -t tmpfs -o "size=$0" tmpfs /dev/shm && exec "$@"'
    doctor = [sys.executable, "-m", "cluster.cli", "doctor", "--json"]
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", inside, size, *doctor],
        capture_output=True, text=True, cwd=ROOT, timeout=120.0,
    )  # fmt: skip
    assert done.stdout, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    wrong = [one for one in found if one["grade"] == "FAULT"]
    assert done.returncode == int(bool(wrong))
    return wrong


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="a mount namespace needs root and unshare"
)
def test_shared_memory_that_is_too_small_for_rays_store() -> None:
    before = os.statvfs("/dev/shm")
    (fault,) = doctor_with_shared_memory("64m")
    assert fault["check"] == "shared memory"
    assert fault["found"] == "64 MiB in /dev/shm, 100 MiB for Ray's object store"
    assert "docker: --shm-size" in fault["remedy"]
    assert doctor_with_shared_memory("200m") == []
    assert os.statvfs("/dev/shm").f_blocks == before.f_blocks


# -- versions --------------------------------------------------------------------------------------


def installed(directory: Path, distribution: str, version: str) -> None:
    """A distribution's metadata, as a package of another version would have it."""
    metadata = directory / f"{distribution.replace('-', '_')}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")


def versions_with(directory: Path) -> dict[str, str]:
    """What a process finds that looks for packages there first."""
    done = subprocess.run(
        [sys.executable, "-c", VERSIONS],
        capture_output=True, text=True, cwd=directory, timeout=120.0, check=True,
        env={**os.environ, "PYTHONPATH": str(directory)},
    )  # fmt: skip
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def copy_of_baton(directory: Path) -> None:
    """Its sources."""
    for name in gathering._SOURCES:
        shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))


def test_another_version_of_baton(tmp_path: Path) -> None:
    a, b, c = three_nodes()
    copy_of_baton(tmp_path)
    same = versions_with(tmp_path)
    assert same["Baton"] == a.versions["Baton"]
    assert faults("versions", a, b, replace(c, versions=same)) == []
    source = tmp_path / "wire" / "messages" / "rooms.py"
    source.write_text(source.read_text() + "# one line more\n")
    changed = versions_with(tmp_path)["Baton"]
    installed(tmp_path, "baton-serve", "9.9.9")
    other = versions_with(tmp_path)
    assert other["Baton"] == f"9.9.9 {changed.rpartition(' ')[2]}"
    for spoilt in (changed, other["Baton"]):
        (fault,) = faults("versions", a, b, replace(c, versions={**c.versions, "Baton": spoilt}))
        assert fault.node == "c"
        assert fault.found == f"Baton {spoilt} here, {a.versions['Baton']} on other nodes"
        assert "copy the same source or image to every node" in fault.remedy


def test_another_version_of_ray(tmp_path: Path) -> None:
    a, b, c = three_nodes()
    copy_of_baton(tmp_path)
    installed(tmp_path, "ray", "2.1.0")
    (fault,) = faults("versions", a, b, replace(c, versions=versions_with(tmp_path)))
    assert (fault.node, fault.found) == ("c", f"Ray 2.1.0 here, {a.versions['Ray']} on other nodes")
    assert "install the same Ray on every node, and start Ray there again" in fault.remedy
