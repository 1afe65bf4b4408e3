"""Which bytes the checksums of a hand-off cover, and that a page that changed there is found."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.page_runs import as_pages
from kvtransfer.checksum import BLOCK, STRIDE, Sample, checksums, samples
from tests.kvtransfer.peers import pool
from wire.checksums import ChecksumMode

ALL, SAMPLED, NONE = ChecksumMode.ALL, ChecksumMode.SAMPLED, ChecksumMode.NONE


@settings(max_examples=100)
@given(st.integers(0, 2**63), st.integers(0, 50), st.integers(1, 3000), st.sampled_from([48, 4096, 1835008]))
def test_samples_are_spread_over_all_pages(room: int, epoch: int, pages: int, page_bytes: int) -> None:
    taken = samples(SAMPLED, room, epoch, pages, page_bytes)
    assert taken == samples(SAMPLED, room, epoch, pages, page_bytes)
    assert len(taken) == max(1, pages * page_bytes // STRIDE)
    assert [sample.page for sample in taken] == sorted(sample.page for sample in taken)
    assert all(0 <= sample.page < pages for sample in taken)
    assert all(sample.nbytes == min(BLOCK, page_bytes) for sample in taken)
    assert all(0 <= sample.offset <= page_bytes - sample.nbytes for sample in taken)
    share = sum(sample.nbytes for sample in taken) / (pages * page_bytes)
    assert share <= BLOCK / STRIDE or len(taken) == 1


def test_other_epochs_look_elsewhere_and_in_time_everywhere() -> None:
    seen = {samples(SAMPLED, 7, epoch, 16, 4096)[0].page for epoch in range(200)}
    assert seen == set(range(16))


def test_all_and_none() -> None:
    assert samples(ALL, 1, 0, 2, 96) == [Sample(0, 0, 96), Sample(1, 0, 96)]
    assert samples(NONE, 1, 0, 2, 96) == []
    assert samples(SAMPLED, 1, 0, 0, 96) == []


@pytest.mark.parametrize("staged", [False, True])
def test_a_checksum_covers_its_sample_and_nothing_else(staged: bool) -> None:
    region = pool(20, 10_000, seed=2, staged=staged)
    pages = as_pages([7, 3, 11])
    wanted = [Sample(0, 0, 10_000), Sample(2, 5000, 4096)]
    expected = [zlib.crc32(region.tensor[7].numpy()), zlib.crc32(region.tensor[11, 5000:9096].numpy())]
    assert checksums(region, pages, wanted) == expected
    region.tensor[11, 9096] ^= 1
    assert checksums(region, pages, wanted) == expected
    region.tensor[11, 9095] ^= 1
    assert checksums(region, pages, wanted) != expected


def test_the_stricter_of_two_settings_counts() -> None:
    assert NONE.stricter(ALL) is ALL.stricter(SAMPLED) is ALL
    assert SAMPLED.stricter(NONE) is SAMPLED
    assert NONE.stricter(NONE) is NONE
