"""Returns freed memory to the operating system."""

from __future__ import annotations

import ctypes

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; other C libraries have none


def return_freed_memory() -> None:
    """Give back pages that were freed but that the allocator keeps for later: gigabytes, after weights.

    glibc takes blocks of up to 32 MiB from a heap, of which a block freed in the middle stays resident. An
    allocator of fixed threshold (mallopt) would give back every block, but activations, too.
    """
    if _trim is not None:
        _trim(0)
