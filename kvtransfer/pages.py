"""PageWrite: which page goes where; and runs of neighbouring pages, which are copied at once."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PageIds = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PageWrite:
    """Page `src_pages[i]` of this worker's pool goes to page `dst_pages[i]` of the peer's, for one room,
    epoch and group.

    Both arrays are one-dimensional, of equal length and int64; a page occurs at most once in `dst_pages`.
    """

    room: int
    epoch: int
    group: str
    src_pages: PageIds
    dst_pages: PageIds

    def __post_init__(self) -> None:
        assert self.src_pages.shape == self.dst_pages.shape, "a page write pairs every source with a target"
        assert self.src_pages.ndim == 1, "page ids are one-dimensional"

    def __len__(self) -> int:
        return len(self.src_pages)


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

    One memcpy per run, by ctypes, which releases the GIL. process_vm_writev would take all runs in one call,
    but measured 20% slower; gathers in numpy and torch copy twice.
    """
    for first, target, pages in zip(
        *(column.tolist() for column in coalesce(src_pages, dst_pages)), strict=True
    ):
        ctypes.memmove(dst + target * page_bytes, src + first * page_bytes, pages * page_bytes)


def stretches(pages: PageIds) -> list[tuple[int, int]]:
    """Maximal stretches of consecutive pages, in order, as half-open (first, end)."""
    runs = coalesce(pages, pages)
    return list(zip(runs.src.tolist(), (runs.src + runs.length).tolist(), strict=True))
