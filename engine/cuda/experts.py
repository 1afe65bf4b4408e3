"""Whether a mixture of experts can be computed without the host knowing how many tokens each expert has."""

from __future__ import annotations

from typing import Any

import torch

_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_ON_DEVICE = (9, 10)  # major compute capabilities


def experts_wait(config: Any, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the host waits in each layer of experts; such steps cannot be recorded.

    torch's grouped product, which transformers uses, is one kernel in bfloat16 on Hopper and Blackwell
    (compute capability 9 and 10). Elsewhere it copies the groups' ends to the host and loops over them
    (ATen/native/GroupedMMUtils.h of torch 2.13).
    """
    if device.type != "cuda" or not any(getattr(config, key, None) for key in _KEYS):
        return False
    return dtype != torch.bfloat16 or torch.cuda.get_device_capability(device)[0] not in _ON_DEVICE
