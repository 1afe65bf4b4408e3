"""Pages of a pool that the CPU cannot address, through two buffers and a queue of copies."""

from __future__ import annotations

import zlib
from contextlib import closing

import pytest
import torch

from common.errors import TransferError
from kvcache.page_runs import as_pages, copy_pages
from kvtransfer.checksum import Sample, checksums
from kvtransfer.copies import CudaCopies, Unsettled
from kvtransfer.region import GroupRegion, region_of
from tests.kvtransfer.stand_in_copies import StandInCopies
from tools.fake_cuda import FakeCuda, GpuFault

PAGE = 64
PAGES = as_pages([7, 8, 1, 19, 4, 5, 6, 2, 11, 3])
KINDS = pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])


@pytest.fixture(autouse=True)
def _three_pages_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.region._STAGE_BYTES", 3 * PAGE)


def a_pool(copies: StandInCopies, seed: int | None = None) -> GroupRegion:
    tensor = torch.zeros((20, PAGE), dtype=torch.uint8)
    if seed is not None:
        tensor.random_(0, 256, generator=torch.Generator().manual_seed(seed))
    return GroupRegion(tensor, copies=copies)


@KINDS
def test_pages_arrive_whole_and_in_order(late: bool) -> None:
    reading, writing = StandInCopies(late), StandInCopies(late)
    source, target = a_pool(reading, seed=1), a_pool(writing)
    there = PAGES[::-1].copy()
    for out, into in zip(source.to_host(PAGES), target.from_host(there), strict=True):
        copy_pages(out.ptr, out.pages, into.ptr, into.pages, PAGE)
    assert torch.equal(target.tensor[there], source.tensor[PAGES])
    untouched = [page for page in range(20) if page not in PAGES]
    assert not target.tensor[untouched].any()
    assert not reading.queued
    assert not writing.queued


@KINDS
def test_a_checksum_is_of_what_is_on_the_device(late: bool) -> None:
    source = a_pool(StandInCopies(late), seed=2)
    wanted = [Sample(i, 8, 40) for i in range(len(PAGES))]
    expected = [zlib.crc32(source.tensor[page, 8:48].numpy().tobytes()) for page in PAGES]
    assert checksums(source, PAGES, wanted) == expected


def test_the_next_buffer_is_on_its_way_while_one_is_read() -> None:
    copies = StandInCopies(late=True)
    with closing(a_pool(copies, seed=3).to_host(PAGES)) as batches:
        next(batches)
        assert (copies.done, len(copies.queued)) == (1, 1)
    assert copies.most_queued == 2


def test_two_transfers_of_one_pool_share_no_buffer() -> None:
    region = a_pool(StandInCopies(late=False), seed=4)
    with closing(region.to_host(PAGES)) as first, closing(region.to_host(PAGES)) as second:
        a, b = next(first), next(second)
        assert a.ptr != b.ptr
        assert bytes(a.view()) == bytes(b.view())


@KINDS
def test_nothing_is_read_after_a_reader_has_closed(late: bool) -> None:
    copies = StandInCopies(late)
    batches = a_pool(copies, seed=5).to_host(PAGES)
    next(batches)
    batches.close()
    assert not copies.queued, "the pages may be freed now"


@KINDS
def test_nothing_is_written_after_a_writer_has_closed(late: bool) -> None:
    copies = StandInCopies(late)
    region = a_pool(copies)
    batches = region.from_host(PAGES)
    for _ in range(2):
        view = next(batches).view()
        view[:] = b"x" * len(view)
    batches.close()
    assert not copies.queued, "the pages may be given to another room now"
    assert region.tensor[PAGES[:3]].all()
    assert not region.tensor[PAGES[3:]].any(), "a batch that was not finished is not applied"


@pytest.mark.parametrize("direction", ["to_host", "from_host"])
def test_copies_are_waited_for_though_one_is_late(direction: str) -> None:
    copies = StandInCopies(late=True)
    copies.late_waits = 1
    with pytest.raises(TransferError, match="not done in time"):
        list(getattr(a_pool(copies), direction)(PAGES[:2]))
    assert not copies.queued, "the pages may be given to another room now"


@pytest.mark.parametrize("direction", ["to_host", "from_host"])
@pytest.mark.parametrize("closes", [False, True])
def test_copies_without_an_end_are_told(direction: str, closes: bool) -> None:
    copies = StandInCopies(late=True)
    batches = getattr(a_pool(copies), direction)(PAGES)
    if closes:
        next(batches)
    copies.late_waits = 99
    with pytest.raises(Unsettled):
        batches.close() if closes else list(batches)


def test_copies_of_a_cuda_pool_wait_for_nothing_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.region._staged", lambda stage, _: stage.shape)  # fakes have no address
    with FakeCuda() as device:
        region = region_of(torch.zeros((20, PAGE), dtype=torch.uint8, device="cuda"))
        assert isinstance(region.copies, CudaCopies)
        assert list(region.to_host(PAGES)) == list(region.from_host(PAGES)) == [(3, PAGE)] * 4
    assert device.seen["copies"] == 4 * 4  # of page ids and pages, each way


def test_a_copy_from_pageable_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.region._staged", lambda stage, _: stage.shape)
    monkeypatch.setattr(CudaCopies, "pinned", lambda _, *shape: torch.empty(shape, dtype=torch.uint8))
    with FakeCuda():
        region = region_of(torch.zeros((20, PAGE), dtype=torch.uint8, device="cuda"))
        with pytest.raises(GpuFault, match="pageable"):
            list(region.to_host(PAGES))
