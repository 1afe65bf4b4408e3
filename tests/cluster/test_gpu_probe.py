"""`baton doctor` asks torch for a GPU that is there, in a process that it can give up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster.doctor import gather as gathering
from cluster.doctor import gpu_probe
from cluster.doctor.facts import Problem
from cluster.doctor.gather import gather
from cluster.doctor.gpu_probe import gpu_problem


def program(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="this machine has a GPU")
def test_torch_for_cpus_beside_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "nvidia-smi", "echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = gpu_problem()
    assert found is not None
    assert found.problem.startswith("this machine has a GPU (GPU 0: NVIDIA H100) that cannot be used: torch ")
    assert "set device to cpu" in found.remedy


def test_a_driver_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_probe.sys, "executable", program(tmp_path / "hangs", "exec sleep 60"))
    monkeypatch.setattr(gpu_probe, "_BOUND_S", 0.2)
    found = gpu_problem()
    assert found is not None
    assert found.problem == "torch has not used the GPU within 0.2 s"
    assert "nvidia-smi" in found.remedy


def test_a_probe_that_dies_says_what_it_said_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dies = program(tmp_path / "dies", "echo one >&2; echo 'libcudart is broken' >&2; exit 3")
    monkeypatch.setattr(gpu_probe.sys, "executable", dies)
    found = gpu_problem()
    assert found is not None
    assert found.problem == "torch cannot be asked for the GPU: libcudart is broken"


def test_a_gpu_that_can_be_used_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_probe.sys, "executable", program(tmp_path / "fine", "echo noise; echo null"))
    assert gpu_problem() is None


@pytest.mark.parametrize("found", [[], ["/dev/nvidia0"]])
def test_torch_is_asked_only_where_there_is_a_gpu(found: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    unusable = Problem("torch says: no", "repair the driver")
    monkeypatch.setattr(gathering, "gpus_found", lambda: found)
    monkeypatch.setattr(gathering, "gpu_problem", lambda: unusable)
    assert gather("here", None, b"").unusable.get("gpu") == (unusable if found else None)
