"""Passes the arrays of a batch to the C++ attention ops."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.cpu.threads import kernel_threads

if TYPE_CHECKING:
    from engine.batch import ForwardBatch


class BatchArrays:
    """Puts the addresses of a batch's arrays into a call struct, and keeps the arrays alive meanwhile."""

    def __init__(self) -> None:
        self._kept: tuple[np.ndarray[Any, Any], ...] = ()

    def fill(self, call: ctypes.Structure | Any, batch: ForwardBatch) -> None:
        """Set page table, starts, lengths and slots, in the types that the kernels read."""
        table = np.ascontiguousarray(batch.page_table, dtype=np.int32)
        starts = batch.starts()
        lens = np.ascontiguousarray(batch.seq_lens, dtype=np.int32)
        slots = np.ascontiguousarray(batch.out_slots, dtype=np.int64)
        self._kept = (table, starts, lens, slots)
        call.page_table, call.table_stride = table.ctypes.data, table.shape[1]
        call.starts, call.seq_lens, call.slots = starts.ctypes.data, lens.ctypes.data, slots.ctypes.data
        call.seqs = len(lens)
        call.threads = kernel_threads()
