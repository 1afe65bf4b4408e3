"""The device that a worker computes on. A GPU that is there and cannot be used is an error."""

from __future__ import annotations

import os

import torch

from common.errors import ConfigError
from common.gpus import gpus_found

_ON_CPU = "or set device to cpu to compute on the CPU"


def choose_device(wanted: str) -> torch.device:
    """The device of `auto`, `cpu`, `cuda` or `cuda:N`. A CUDA device has an index, and has computed.

    `auto` takes the first GPU that this process sees, and the CPU of a machine without one. Raises
    ConfigError, key `device`, if torch cannot use the GPU that is wanted, or that `auto` found.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    found = gpus_found() if wanted == "auto" else []
    if wanted == "auto" and not found and not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda" if wanted == "auto" else wanted)
    device = torch.device("cuda", device.index or 0)
    if problem := _why_unusable(device):
        machine = f"this machine has a GPU ({', '.join(found)}) that cannot be used: " if found else ""
        raise ConfigError("device", f"{machine}{problem[0]}", f"{problem[1]}, {_ON_CPU}")
    return device


def _why_unusable(device: torch.device) -> tuple[str, str] | None:
    """What keeps torch from computing on a CUDA device, and the remedy."""
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is built without CUDA",
            "install torch for CUDA (make setup does, on a machine with a GPU)",
        )
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return (
            f"CUDA_VISIBLE_DEVICES={hidden!r} hides it",
            "under Ray give its section num_gpus, elsewhere unset the variable",
        )
    seen = torch.cuda.device_count()
    if device.index is not None and device.index >= seen > 0:
        return f"{device} does not exist: torch sees {seen}", f"name one from cuda:0 to cuda:{seen - 1}"
    try:
        torch.ones(1, device=device).add_(1).item()
    except (RuntimeError, AssertionError) as error:  # torch asserts that it is compiled with CUDA
        return f"torch says: {str(error).strip().splitlines()[0]}", "repair the driver"
    return None
