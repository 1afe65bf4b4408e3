"""The largest element of each row on a CPU: argmax.cpp.

torch.argmax does not use vector instructions: eight rows of 151,936 bfloat16 take it longer than a tenth of a
decode step of a small model. This reads them once, as fast as the caches give them.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from engine.cpu.op import STORAGE, KernelsUnavailable, kernels
from engine.cpu.threads import kernel_threads


def argmax_by_kernel(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Of rows [N, columns] the place of each one's largest element, int64 [N] (of equal ones the first; of a
    row with a NaN any), and whether all of the row are finite, bool [N].

    None without kernels, and for an element type that they do not know.
    """
    library = _library()
    if library is None or rows.dtype not in STORAGE:
        return None
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    places = torch.empty(len(rows), dtype=torch.int64)
    is_finite = torch.empty(len(rows), dtype=torch.bool)
    library.baton_argmax(
        *(rows.data_ptr(), STORAGE[rows.dtype], len(rows), rows.shape[1], rows.stride(0)),
        *(places.data_ptr(), is_finite.data_ptr(), kernel_threads()),
    )
    return places, is_finite


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        return kernels()
    except KernelsUnavailable:
        return None
