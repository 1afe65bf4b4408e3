"""The rows that one program of a kernel multiplies."""

from __future__ import annotations


def tile_rows(rows: int) -> int:
    """For so many rows with the same weights: a power of two, from the 16 of tensor cores to 128."""
    return min(128, max(16, 1 << (rows - 1).bit_length()))
