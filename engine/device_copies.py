"""Copies of small arrays between the host and the device of a forward, without waiting.

A copy from or to pageable memory makes the host wait on CUDA. So both directions go through pinned memory of
torch's caching host allocator. It hands a block out again only after the copies that use it are done, so
nothing here counts steps or alternates buffers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array on the device. On a CPU the tensor shares its memory."""
    host = torch.from_numpy(array)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def pinned(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array in host memory that `device` can copy from without the host waiting."""
    host = torch.from_numpy(array)
    return host if device.type == "cpu" else host.pin_memory()


class FetchedTensor:
    """A tensor's values on their way to the host. Read them after the completion of the forward."""

    def __init__(self, values: torch.Tensor, is_reused: bool = False) -> None:
        """`is_reused`: the tensor will have other values. Else it is not copied on a CPU."""
        self._host = values.clone() if is_reused and values.device.type == "cpu" else values
        if values.device.type != "cpu":
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)

    def numpy(self) -> npt.NDArray[Any]:
        """The values. On CUDA they are there only after the forward's completion."""
        array: npt.NDArray[Any] = self._host.numpy()
        return array


def flat(*arrays: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """One int64 array of all, so that a step needs one copy for them."""
    return np.concatenate([array.astype(np.int64, copy=False).ravel() for array in arrays])
