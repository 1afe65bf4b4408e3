"""How the bytes of a page lie in several memories, and what goes where from one such pool to another.

page     [block, byte of all heads], tail   a block: K or V of a layer
part n   [block, byte of its heads], tail   of each block one range of heads; of what has no heads all
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class PageParts(NamedTuple):
    """Every block is divided into `ranges` of the same size, and a range is in `copies` parts that follow one
    another. The last `tail` bytes of a page are in every part. A pool in one memory has one part."""

    blocks: int = 1
    ranges: int = 1
    copies: int = 1
    tail: int = 0

    @property
    def total(self) -> int:
        """How many parts there are."""
        return self.ranges * self.copies

    def range_of(self, part: int) -> int:
        """The range that a part has."""
        return part // self.copies

    def part_bytes(self, page_bytes: int) -> int:
        """Bytes of a page in each part."""
        return (page_bytes - self.tail) // self.ranges + self.tail

    def divides(self, page_bytes: int) -> bool:
        """Whether pages of so many bytes can lie in such parts."""
        if min(self.blocks, self.ranges, self.copies) < 1 or not 0 <= self.tail <= page_bytes:
            return False
        return (page_bytes - self.tail) % (self.blocks * self.ranges) == 0


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
    """What goes from part `source` of one side to part `target` of the other: `width` bytes of each of so
    many `blocks`, which begin `source_start` and `target_start` bytes into the part's page."""

    source: int
    target: int
    source_start: int
    target_start: int
    width: int
    source_pitch: int
    target_pitch: int
    blocks: int
    source_page_bytes: int
    target_page_bytes: int

    def copies(
        self, source: int, source_page: int, target: int, target_page: int, pages: int
    ) -> Iterator[RowsCopy]:
        """The copies of `pages` pages that follow one another; `source` and `target` are where the parts'
        pools begin. Blocks of pages with a tail do not follow one another from page to page."""
        first = source + source_page * self.source_page_bytes + self.source_start
        there = target + target_page * self.target_page_bytes + self.target_start
        if self.blocks == 1:
            yield _rows(there, first, self.width, pages, self.target_page_bytes, self.source_page_bytes)
        elif (
            self.source_page_bytes == self.blocks * self.source_pitch
            and self.target_page_bytes == self.blocks * self.target_pitch
        ):
            rows = pages * self.blocks
            yield _rows(there, first, self.width, rows, self.target_pitch, self.source_pitch)
        else:
            for page in range(pages):
                to, here = there + page * self.target_page_bytes, first + page * self.source_page_bytes
                yield _rows(to, here, self.width, self.blocks, self.target_pitch, self.source_pitch)


def _rows(target: int, source: int, width: int, rows: int, target_pitch: int, source_pitch: int) -> RowsCopy:
    if target_pitch == source_pitch == width:
        return RowsCopy(target, source, rows * width, 1, 0, 0)
    return RowsCopy(target, source, width, rows, target_pitch, source_pitch)


def pieces(page_bytes: int, source: PageParts, target: PageParts) -> Iterator[Piece]:
    """What each part of the target gets, from the first part, or another copy of it, that has the bytes.

    Both have the same blocks. Copies of a range are read in turn, so that no memory is read for all.
    """
    assert (source.blocks, source.tail) == (target.blocks, target.tail), "one model's pages"
    if source.ranges == target.ranges:
        for part in range(target.total):
            number = target.range_of(part) * source.copies + part % source.copies
            yield _tail_from(0, page_bytes, source, number, target, part)
        return
    for part in range(target.total):
        yield from _from_ranges(page_bytes, source, target, part)
        if source.tail:
            start = source.part_bytes(page_bytes) - source.tail
            yield _tail_from(start, page_bytes, source, part % source.total, target, part)


def _tail_from(
    start: int, page_bytes: int, source: PageParts, number: int, target: PageParts, part: int
) -> Piece:
    """All of a page in part `number` from `start` on, to the end of a page in `part`."""
    from_page, to_page = source.part_bytes(page_bytes), target.part_bytes(page_bytes)
    width = from_page - start
    return Piece(
        source=number,
        target=part,
        source_start=start,
        target_start=to_page - width,
        width=width,
        source_pitch=from_page,
        target_pitch=to_page,
        blocks=1,
        source_page_bytes=from_page,
        target_page_bytes=to_page,
    )


def _from_ranges(page_bytes: int, source: PageParts, target: PageParts, part: int) -> Iterator[Piece]:
    """What a part gets of the blocks, from each range of the source that has some of it."""
    block = (page_bytes - source.tail) // source.blocks
    from_width, to_width = block // source.ranges, block // target.ranges
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
            source_page_bytes=source.part_bytes(page_bytes),
            target_page_bytes=target.part_bytes(page_bytes),
        )
