"""How the bytes of a page lie in several memories, and what goes where from one such pool to another.

page     [block, byte of all heads]       a block: K or V of a layer
part n   [block, byte of its heads]       of each block one range of heads; of what has no heads all
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class PageParts(NamedTuple):
    """Every block is divided into `ranges` of the same size, and a range is in `copies` parts that follow one
    another. A pool in one memory has one part."""

    blocks: int = 1
    ranges: int = 1
    copies: int = 1

    @property
    def total(self) -> int:
        """How many parts there are."""
        return self.ranges * self.copies

    def range_of(self, part: int) -> int:
        """The range that a part has."""
        return part // self.copies

    def part_bytes(self, page_bytes: int) -> int:
        """Bytes of a page in each part."""
        return page_bytes // self.ranges

    def divides(self, page_bytes: int) -> bool:
        """Whether pages of so many bytes can lie in such parts."""
        return min(self) > 0 and page_bytes % (self.blocks * self.ranges) == 0


ONE_PART = PageParts()
"""Pages that nobody divides."""


class RowsCopy(NamedTuple):
    """`rows` runs of `width` bytes: addresses of the first, and bytes from one to the next. Rows that follow
    one another without a gap are one."""

    target: int
    source: int
    width: int
    rows: int
    target_pitch: int
    source_pitch: int


class Piece(NamedTuple):
    """What goes from part `source` of one side to part `target` of the other: `width` bytes of each block,
    which begin `source_start` and `target_start` bytes into the part's page."""

    source: int
    target: int
    source_start: int
    target_start: int
    width: int
    source_pitch: int
    target_pitch: int
    blocks: int

    def copy(self, source: int, source_page: int, target: int, target_page: int, pages: int) -> RowsCopy:
        """The copy of `pages` pages that follow one another; `source` and `target` are where the parts'
        pools begin."""
        first = source + source_page * self.blocks * self.source_pitch + self.source_start
        there = target + target_page * self.blocks * self.target_pitch + self.target_start
        rows = pages * self.blocks
        if self.source_pitch == self.target_pitch == self.width:
            return RowsCopy(there, first, rows * self.width, 1, 0, 0)
        return RowsCopy(there, first, self.width, rows, self.target_pitch, self.source_pitch)


def pieces(page_bytes: int, source: PageParts, target: PageParts) -> Iterator[Piece]:
    """What each part of the target gets, from the first part, or another copy of it, that has the bytes.

    Both have the same blocks. Copies of a range are read in turn, so that no memory is read for all.
    """
    assert source.blocks == target.blocks, "one model's pages"
    block = page_bytes // source.blocks
    from_width, to_width = block // source.ranges, block // target.ranges
    for part in range(target.total):
        start = target.range_of(part) * to_width
        end = start + to_width
        for number in range(start // from_width, -(-end // from_width)):
            first, last = max(start, number * from_width), min(end, (number + 1) * from_width)
            yield Piece(
                source=number * source.copies + part % source.copies,
                target=part,
                source_start=first - number * from_width,
                target_start=first - start,
                width=last - first,
                source_pitch=from_width,
                target_pitch=to_width,
                blocks=source.blocks,
            )
