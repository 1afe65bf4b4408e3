"""NcclGroup: ranks on GPUs of one host, over torch's NCCL."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import torch
from torch import distributed

from engine.parallel.group import side_by_side

_LOOPBACK = {"NCCL_SOCKET_IFNAME": "lo"}  # only to meet: between GPUs of a host values go by NVLink or PCIe
_TIMEOUT_S = 1800.0  # FlashInfer may compile kernels on one rank while another waits


class NcclGroup:
    """A RankGroup whose calls queue work on the current stream, and can be recorded (engine/graphs.py). Of a
    rank that is gone they learn nothing: rank 0 watches the processes."""

    def __init__(self, rank: int, size: int, meeting: Path, device: torch.device) -> None:
        """Meet the other ranks in the file `meeting`, which only this user can reach. Blocks until all are
        there. Raises RuntimeError if they are not in time."""
        self.rank = rank
        self.size = size
        os.environ.update(_LOOPBACK)
        torch.cuda.set_device(device)
        distributed.init_process_group(
            "nccl",
            store=distributed.FileStore(str(meeting), size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=_TIMEOUT_S),
            device_id=device,
        )

    def sum(self, summand: torch.Tensor) -> None:
        distributed.all_reduce(summand)

    def share(self, values: torch.Tensor) -> None:
        distributed.broadcast(values, 0)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        parts = part.new_empty(self.size, *part.shape)
        if part.numel():
            distributed.all_gather_into_tensor(parts, part.contiguous())
        return side_by_side(parts)

    def close(self) -> None:
        """Nothing: NCCL ends a communicator together with the other ranks, and these have ended."""
