"""NVIDIA GPUs that a process finds in its machine, whatever its torch can do with them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

_SMI_TIMEOUT_S = 20.0  # it wakes the driver


def gpus_found(dev: Path = Path("/dev")) -> list[str]:
    """Names of the GPUs: their device files, else what `nvidia-smi` lists (WSL has no device files)."""
    files = sorted(dev.glob("nvidia[0-9]*"))
    return [str(file) for file in files] or _listed()


def _listed() -> list[str]:
    """Without a driver `nvidia-smi` fails, or is not there."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        listed = subprocess.run(  # noqa: S603  the program is on the PATH, its argument is ours
            [program, "--list-gpus"], capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.partition(" (")[0] for line in listed.stdout.splitlines() if line.startswith("GPU ")]
