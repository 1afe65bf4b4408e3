"""Runs of neighbouring pages, which are copied at once."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.native.build import page_copies

PageIds = NDArray[np.int64]


class Runs(NamedTuple):
    """Maximal stretches where source and target pages both grow by one: `length[i]` pages each."""

    src: PageIds
    dst: PageIds
    length: PageIds


def as_pages(pages: object) -> PageIds:
    """Anything array-like as contiguous int64 page ids."""
    return np.ascontiguousarray(pages, dtype=np.int64)


def coalesce(src_pages: PageIds, dst_pages: PageIds) -> Runs:
    """The runs of a write, in the order of its pages."""
    if len(src_pages) == 0:
        return Runs(src_pages, dst_pages, src_pages)
    breaks = (np.diff(src_pages) != 1) | (np.diff(dst_pages) != 1)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    lengths = np.diff(np.append(starts, len(src_pages)))
    return Runs(src_pages[starts], dst_pages[starts], lengths)


def copy_pages(src: int, src_pages: PageIds, dst: int, dst_pages: PageIds, page_bytes: int) -> None:
    """Copy page `src_pages[i]` of the pool at address `src` to page `dst_pages[i]` of the one at `dst`.

    The GIL is released. Beside the compiled copy (kvcache/native) these were measured: one memcpy per run by
    ctypes, 1.4 times slower; process_vm_writev, which takes all runs in one call, 20% slower than that;
    gathers in numpy and torch copy twice.
    """
    runs = coalesce(src_pages, dst_pages)
    library = page_copies()
    if library is not None:
        columns = [np.ascontiguousarray(column) for column in runs]
        first, target, pages = (column.ctypes.data for column in columns)
        library.copy_runs(src, first, dst, target, pages, len(runs.length), page_bytes)
    else:
        copy_each(src, dst, runs, page_bytes)


def copy_each(src: int, dst: int, runs: Runs, page_bytes: int) -> None:
    """The same by one memcpy per run, where nothing is compiled."""
    for first, target, pages in zip(*(column.tolist() for column in runs), strict=True):
        ctypes.memmove(dst + target * page_bytes, src + first * page_bytes, pages * page_bytes)


def stretches(pages: PageIds) -> list[tuple[int, int]]:
    """Maximal stretches of consecutive pages, in order, as half-open (first, end)."""
    runs = coalesce(pages, pages)
    return list(zip(runs.src.tolist(), (runs.src + runs.length).tolist(), strict=True))
