"""CRC-32 checksums of pages, computed by the sender and compared by the receiver.

With `all`, a checksum covers each page. With `sampled`, one covers BLOCK bytes of one page for every STRIDE
bytes of a group, and each group has at least one: it costs far less than the transfer, and finds pages that
went elsewhere, did not land or were written by another room, if a block lies in them. Both sides derive the
places of the blocks from room and epoch. So no message names them, and a restart looks elsewhere.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable
from typing import NamedTuple

import torch

from kvcache.page_runs import PageIds
from kvtransfer.copies import CopyQueue
from kvtransfer.region import GroupRegion, HostPages
from wire.checksums import ChecksumMode

BLOCK = 4 << 10
STRIDE = 64 << 20
_MASK = (1 << 64) - 1


class Sample(NamedTuple):
    """What one checksum covers: bytes [offset, offset + nbytes) of page number `page` of a room's pages."""

    page: int
    offset: int
    nbytes: int


def samples(mode: ChecksumMode, room: int, epoch: int, pages: int, page_bytes: int) -> list[Sample]:
    """What the checksums of a group with `pages` pages cover, in the order of the pages."""
    if mode is ChecksumMode.NONE or not pages:
        return []
    if mode is ChecksumMode.ALL:
        return [Sample(page, 0, page_bytes) for page in range(pages)]
    block, total = min(BLOCK, page_bytes), pages * page_bytes
    count = max(1, total // STRIDE)
    part = total // count
    places = [i * part + _mixed(room, epoch, i) % part for i in range(count)]
    return [Sample(at // page_bytes, min(at % page_bytes, page_bytes - block), block) for at in places]


def checksums(region: GroupRegion, pages: PageIds, wanted: Iterable[Sample]) -> list[int]:
    """CRC-32 of each sample of these pages. About 5 GB/s per thread; the GIL is released for each sample."""
    places = [(int(pages[sample.page]), sample.offset, sample.offset + sample.nbytes) for sample in wanted]
    if region.copies is not None:
        return _staged_checksums(region, region.copies, places)
    size, memory = region.page_bytes, HostPages(region.ptr, region.nbytes, pages).view()
    return [zlib.crc32(memory[page * size + start : page * size + end]) for page, start, end in places]


def _staged_checksums(
    region: GroupRegion, copies: CopyQueue, places: list[tuple[int, int, int]]
) -> list[int]:
    """One sample at a time: with `all` they are as large as the pages."""
    sums = []
    for page, start, end in places:
        here = copies.pinned(end - start)
        copies.put(functools.partial(_copy_piece, region, page, start, end, here)).wait()
        sums.append(zlib.crc32(here.numpy().data))
    return sums


def _copy_piece(region: GroupRegion, page: int, start: int, end: int, here: torch.Tensor) -> None:
    here.copy_(region.piece(page, start, end), non_blocking=True)


def _mixed(*numbers: int) -> int:
    """64 bits that all of the numbers decide."""
    mixed = 0
    for number in numbers:
        mixed = ((mixed ^ number) + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
    return mixed
