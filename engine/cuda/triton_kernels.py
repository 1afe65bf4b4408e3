"""Whether our Triton kernels can be used, and how they are launched."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch


@functools.cache
def available() -> bool:
    """Whether Triton, which torch for CUDA brings along, is installed."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def early_launch(device: torch.device) -> dict[str, Any]:
    """Options of a kernel that may start before the one ahead of it is over: EARLY, and Triton's for a
    "programmatic dependent launch" (CUDA's manual), which GPUs have from compute capability 9.0 on."""
    capable = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if capable else {"EARLY": False}
