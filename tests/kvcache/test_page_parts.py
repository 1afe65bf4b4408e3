"""Pages that lie in parts: whatever the parts of both sides, each part gets its bytes of the page."""

from __future__ import annotations

import ctypes

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvcache.page_parts import PageParts, RowsCopy, pieces

Bytes = NDArray[np.uint8]
HEADS, PAGES = 12, 5


def divided(pages: Bytes, parts: PageParts) -> list[Bytes]:
    """Pages `[page, byte]` in these parts, from the definition."""
    end = pages.shape[1] - parts.tail
    split = pages[:, :end].reshape(len(pages), parts.blocks, parts.ranges, -1)
    return [
        np.concatenate((split[:, :, part // parts.copies].reshape(len(pages), -1), pages[:, end:]), axis=1)
        for part in range(parts.total)
    ]


def carry_out(copy: RowsCopy) -> None:
    for row in range(copy.rows):
        target, source = copy.target + row * copy.target_pitch, copy.source + row * copy.source_pitch
        ctypes.memmove(target, source, copy.width)


ranges = st.sampled_from([1, 2, 3, 4, 6, 12])


@given(
    st.integers(1, 4),
    *(ranges, ranges, st.integers(1, 3), st.integers(1, 3)),
    *(st.integers(1, 5), st.integers(0, 9)),
)
def test_every_part_gets_its_bytes_of_the_pages(
    blocks: int,
    from_ranges: int,
    to_ranges: int,
    from_copies: int,
    to_copies: int,
    head_bytes: int,
    tail: int,
) -> None:
    source = PageParts(blocks, from_ranges, from_copies, tail)
    target = PageParts(blocks, to_ranges, to_copies, tail)
    page_bytes = blocks * HEADS * head_bytes + tail
    rng = np.random.default_rng(0)
    pages = rng.integers(0, 256, (PAGES, page_bytes), np.uint8)
    mine = divided(pages, source)
    theirs = divided(np.zeros_like(pages), target)
    for piece in pieces(page_bytes, source, target):
        here, there = mine[piece.source].ctypes.data, theirs[piece.target].ctypes.data
        for copy in (*piece.copies(here, 3, there, 0, 2), *piece.copies(here, 0, there, 4, 1)):
            carry_out(copy)
    expected = np.zeros_like(pages)
    expected[0:2], expected[4] = pages[3:5], pages[0]
    for found, wanted in zip(theirs, divided(expected, target), strict=True):
        assert np.array_equal(found, wanted)


@given(st.integers(1, 4), ranges, st.integers(1, 3), st.integers(0, 9))
def test_parts_that_are_alike_are_copied_in_one_run(blocks: int, number: int, copies: int, tail: int) -> None:
    parts = PageParts(blocks, number, copies, tail)
    page_bytes = blocks * HEADS * 4 + tail
    found = list(pieces(page_bytes, parts, parts))
    assert [(piece.source, piece.target) for piece in found] == [(part, part) for part in range(parts.total)]
    for piece in found:
        size = parts.part_bytes(page_bytes)
        assert list(piece.copies(0, 1, 0, 2, 3)) == [RowsCopy(2 * size, size, 3 * size, 1, 0, 0)]


def test_which_pages_can_lie_in_parts() -> None:
    assert PageParts(2, 3).divides(12)
    assert not PageParts(2, 3).divides(8)
    assert not PageParts(1, 0).divides(8)
    assert not PageParts(1, 1, 0).divides(8)
    assert PageParts(2, 3, tail=2).divides(14)
    assert not PageParts(2, 3, tail=2).divides(12)
    assert not PageParts(1, 1, tail=9).divides(8)
