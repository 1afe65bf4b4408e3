"""RankGroup: what the ranks of one worker compute together; SharedMemoryGroup: ranks on CPUs."""

from __future__ import annotations

import socket
from typing import Protocol

import torch

from kvcache.buffers import SharedBuffer, allocate_shared

_SLOT_BYTES = 1 << 20  # of a rank's values that are exchanged at once


class RankGroup(Protocol):
    """Rank `rank` of `size`, one per process. Every rank calls the same functions in the same order, with
    tensors of equal shapes and dtypes. If one is gone, or does not come in time, the others' calls raise
    OSError or RuntimeError."""

    rank: int
    size: int

    def sum(self, summand: torch.Tensor) -> None:
        """Add up the ranks' summands, in place."""
        ...

    def share(self, values: torch.Tensor) -> None:
        """Overwrite the values of every rank with those of rank 0."""
        ...

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """[N, columns of this rank] -> [N, columns of all ranks], in the order of the ranks."""
        ...

    def close(self) -> None:
        """Part from the others. Idempotent."""
        ...


class SharedMemoryGroup:
    """A RankGroup over memory that all ranks map.

    Each rank writes what it has to a slot of its own, waits until all have, and reads. There are two sets of
    slots in turn, so that a rank may write again while another still reads. Sums are float32, in the order of
    the ranks, whatever the batch. Ranks wait for one another with a byte over sockets from rank 0 to each of
    the others, which nobody else can reach; torch's Gloo would listen on TCP, to whoever comes.
    """

    def __init__(self, rank: int, memory: SharedBuffer, others: list[socket.socket], size: int) -> None:
        """`memory` has `memory_bytes(size)`. `others`: of rank 0, sockets to ranks 1 to size - 1; of another
        rank, its socket to rank 0. Both are owned. The sockets' timeouts bound each wait."""
        self.rank = rank
        self.size = size
        self._memory = memory
        self._slots = memory.tensor.view(2, size, _SLOT_BYTES)
        self._others = others
        self._turn = 0

    def sum(self, summand: torch.Tensor) -> None:
        flat = summand.view(-1)
        step = _SLOT_BYTES // summand.element_size()
        for first in range(0, len(flat), step):
            part = flat[first : first + step]
            slots = self._exchanged(part)
            total = slots[0].to(torch.float32, copy=True)  # others read the slot
            for other in slots[1:]:
                total += other
            part.copy_(total)

    def share(self, values: torch.Tensor) -> None:
        flat = values.view(-1)
        step = _SLOT_BYTES // values.element_size()
        for first in range(0, len(flat), step):
            part = flat[first : first + step]
            part.copy_(self._exchanged(part)[0])

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        flat = part.reshape(-1)
        parts = flat.new_empty(self.size, len(flat))
        step = _SLOT_BYTES // part.element_size()
        for first in range(0, len(flat), step):
            slots = self._exchanged(flat[first : first + step])
            for rank, slot in enumerate(slots):
                parts[rank, first : first + step] = slot
        return side_by_side(parts.view(self.size, *part.shape))

    def close(self) -> None:
        for other in self._others:
            other.close()
        self._memory.close()

    def _exchanged(self, part: torch.Tensor) -> list[torch.Tensor]:
        """What each rank has."""
        nbytes = part.numel() * part.element_size()
        slots = [slot[:nbytes].view(part.dtype) for slot in self._slots[self._turn]]
        self._turn = 1 - self._turn
        slots[self.rank].copy_(part)
        self._wait_for_all()
        return slots

    def _wait_for_all(self) -> None:
        if self.rank:
            self._others[0].sendall(b"\0")
        for other in self._others:
            if not other.recv(1):
                raise ConnectionResetError("another rank has ended")
        if not self.rank:
            for other in self._others:
                other.sendall(b"\0")


def side_by_side(parts: torch.Tensor) -> torch.Tensor:
    """[size, N, columns] -> [N, size x columns]."""
    return parts.transpose(0, 1).flatten(1)


def memory_bytes(size: int) -> int:
    """What a group of `size` ranks exchanges values in."""
    return 2 * size * _SLOT_BYTES


def allocate_memory(size: int) -> SharedBuffer:
    """The same, in memory that other processes can map."""
    return allocate_shared(memory_bytes(size))
