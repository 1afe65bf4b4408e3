"""tools/setup.sh installs for CUDA on a machine with a GPU. pip and the machine are stand-ins."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ("requirements.lock", "pyproject.toml", "tools/setup.sh", "deploy/docker/cuda.lock")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What setup.sh reads, and programs that note how they are called."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    log = tmp_path / "calls"
    for name, script in {
        ".venv/bin/pip": f'echo "pip $*" >> {log}',
        ".venv/bin/python": f'echo "python $*" >> {log}; [ "$1" != -c ]',  # there is no torch yet
        "bin/id": "echo 1000",  # not root: no system package is installed
        "bin/python3": f'exec {sys.executable} "$@"',
    }.items():
        put(tmp_path / name, script)
    return tmp_path


def put(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def set_up(checkout: Path) -> list[str]:
    """What was called."""
    calls = checkout / "calls"
    calls.write_text("")
    path = os.pathsep.join([str(checkout / "bin"), "/usr/sbin", "/usr/bin", "/sbin", "/bin"])
    environment = {"PATH": path, "TORCH_INDEX": "https://torch.example/whl/cpu"}
    command = ["sh", str(checkout / "tools" / "setup.sh")]
    subprocess.run(command, env=environment, check=True, timeout=60, stdout=subprocess.DEVNULL)
    return calls.read_text().splitlines()


def installed(calls: list[str]) -> list[str]:
    return [call.removeprefix("pip install ") for call in calls if call.startswith("pip install ")]


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="this machine has a GPU")
def test_without_a_gpu_torch_is_the_one_for_cpus(checkout: Path) -> None:
    torch, packages, _ = installed(set_up(checkout))
    assert "--index-url https://torch.example/whl/cpu torch==" in torch
    assert packages.endswith("-r requirements.lock")


def test_with_a_gpu_torch_flashinfer_and_mooncake_are_those_for_cuda(checkout: Path) -> None:
    put(checkout / "bin" / "nvidia-smi", "echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'")
    calls = set_up(checkout)
    torch, packages, _ = installed(calls)
    assert torch.startswith("torch===")
    assert "pip uninstall -q -y mooncake-transfer-engine-non-cuda" in calls
    wanted = (checkout / packages.split()[-1]).read_text().splitlines()
    pins = {line.partition("==")[0] for line in wanted}
    assert {"accelerate", "cuda-bindings", "flashinfer-python", "torch"} <= pins
    assert "mooncake-transfer-engine-cuda13" in pins
    assert "mooncake-transfer-engine-non-cuda" not in pins
    assert len(wanted) == len(pins)


def test_it_is_done_once_until_a_gpu_is_put_in(checkout: Path) -> None:
    assert set_up(checkout)
    assert set_up(checkout) == []
    put(checkout / "bin" / "nvidia-smi", "echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'")
    assert installed(set_up(checkout))
    assert set_up(checkout) == []
