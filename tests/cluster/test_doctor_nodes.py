"""Facts that are gathered twice, as if by two nodes: what differs between them is found."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster.config import parse_config
from cluster.doctor import gather as gathering
from cluster.doctor import nodes
from cluster.doctor.checks import judge
from cluster.doctor.facts import Case, Finding, Grade, NodeFacts
from cluster.doctor.gather import gather, source_digest
from tests.support.members import OTHER_SECRET, SECRET, write_secret

RAW: dict[str, Any] = {"model": "m", "worker": {"engine": "fake"}}


@pytest.fixture(autouse=True)
def sound_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "_size_of", lambda path: 1 << 30)
    monkeypatch.setattr(gathering, "rdma_devices", lambda: ())
    monkeypatch.delenv("BATON_CLUSTER_SECRET", raising=False)


def faults(*facts: NodeFacts) -> list[Finding]:
    found = judge(Case(facts, [], parse_config(RAW)))
    return [one for one in found if one.grade is Grade.FAULT and one.check != "address"]


def with_secret(node: str, directory: Path, *lines: str) -> NodeFacts:
    directory.mkdir()
    return gather(node, {**RAW, "cluster_secret_file": str(write_secret(directory, *lines))}, b"challenge")


def test_equal_nodes_have_no_fault() -> None:
    assert faults(gather("a", RAW, b"1"), gather("b", RAW, b"1")) == []


def test_secrets_of_files_that_differ(tmp_path: Path) -> None:
    one, other = with_secret("a", tmp_path / "a", SECRET), with_secret("b", tmp_path / "b", OTHER_SECRET)
    assert [(fault.check, fault.node) for fault in faults(one, other)] == [("secret", "a"), ("secret", "b")]


def test_each_step_of_replacing_a_secret_is_sound(tmp_path: Path) -> None:
    """docs/security.md: a second line, then the first, then alone. Nodes are never more than a step apart."""
    steps = [(SECRET,), (SECRET, OTHER_SECRET), (OTHER_SECRET, SECRET), (OTHER_SECRET,)]
    facts = [with_secret(str(n), tmp_path / str(n), *lines) for n, lines in enumerate(steps)]
    for before, after in pairwise(facts):
        assert faults(before, after) == []
    assert faults(facts[0], facts[3])


def test_another_ray_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = gather("a", RAW, b"1"), gather("b", RAW, b"1")
    metadata = tmp_path / "ray-2.1.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    (fault,) = faults(*sound, gather("c", RAW, b"1"))
    assert (fault.check, fault.node) == ("versions", "c")
    assert fault.found.startswith("Ray 2.1.0 here, ")
    assert "start Ray there again" in fault.remedy


@pytest.mark.parametrize("name", ["wire/messages/rooms.py", "engine/cpu/linear.cpp", "engine/cpu/linear.h"])
def test_one_changed_line_is_another_baton(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    source = tmp_path / name
    source.parent.mkdir(parents=True)
    source.write_text("VERSION = 1\n")
    before = source_digest(tmp_path)
    assert source_digest(tmp_path) == before
    source.write_text("VERSION = 2\n")
    assert source_digest(tmp_path) != before
    sound = gather("a", RAW, b"1"), gather("b", RAW, b"1")
    monkeypatch.setattr(gathering, "source_digest", lambda: "another")
    (fault,) = faults(*sound, gather("c", RAW, b"1"))
    assert (fault.check, fault.node) == ("versions", "c")
    assert "another here, " in fault.found


@pytest.mark.parametrize("off", [90.0, -90.0])
def test_a_clock_is_read_to_within_half_a_round_trip(off: float) -> None:
    asked: list[str] = []

    def ask(method: str, arguments: dict[str, tuple[()]], bound_s: float) -> dict[str, float]:
        asked.append(method)
        return {name: time.time() + off for name in arguments}

    ahead, error = nodes._clock(cast("nodes.Probes", SimpleNamespace(ask=ask)), "b")
    assert asked == ["clock"] * 3
    assert abs(ahead - off) <= error + 1e-6
    assert error < 1.0


def test_a_configuration_that_only_another_baton_knows_is_named() -> None:
    """The doctor runs on a node with a newer one."""
    facts = gather("old", {**RAW, "from_the_future": 1}, b"1")
    assert "config" in facts.unusable
    (fault,) = faults(facts)
    assert (fault.check, fault.node) == ("configuration", "old")
    assert "unknown key" in fault.found
