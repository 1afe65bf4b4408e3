"""GPUs are found by their device files, else by nvidia-smi, which may fail or hang."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common import gpus
from common.gpus import gpus_found


def put_smi(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = directory / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}{os.pathsep}/usr/bin{os.pathsep}/bin")


def test_device_files_are_enough(tmp_path: Path) -> None:
    for name in ("nvidia1", "nvidia0", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert gpus_found(tmp_path) == [str(tmp_path / "nvidia0"), str(tmp_path / "nvidia1")]


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'", ["GPU 0: NVIDIA H100"]),
        ("echo 'NVIDIA-SMI has failed because it could not reach the driver.'; exit 9", []),
        ("exec sleep 60", []),
    ],
)
def test_else_what_nvidia_smi_lists(
    script: str, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "_SMI_TIMEOUT_S", 0.5)
    put_smi(tmp_path, monkeypatch, script)
    assert gpus_found(tmp_path) == found


def test_without_both_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus_found(tmp_path) == []
