"""Runs, regions, checksums: the arithmetic of pages."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcache.native.build import page_copies
from kvcache.page_runs import PageIds, as_pages, coalesce, copy_each, copy_pages, stretches
from kvtransfer.checksum import Sample, checksums
from kvtransfer.pages import PageWrite
from tests.kvtransfer.peers import pool

page_lists = st.lists(st.integers(0, 40), max_size=30, unique=True)


@given(page_lists, st.randoms())
def test_runs_spell_out_the_write_and_are_maximal(dst: list[int], random: object) -> None:
    src = as_pages(dst[len(dst) // 2 :] + dst[: len(dst) // 2])
    runs = coalesce(src, as_pages(dst))
    pairs = [
        (s + i, d + i)
        for s, d, n in zip(*(column.tolist() for column in runs), strict=True)
        for i in range(n)
    ]
    assert pairs == list(zip(src.tolist(), dst, strict=True))
    ends = [(s + n, d + n) for s, d, n in zip(*(column.tolist() for column in runs), strict=True)]
    starts = list(zip(runs.src.tolist(), runs.dst.tolist(), strict=True))
    assert all(end != start for end, start in zip(ends, starts[1:], strict=False)), "two runs could be one"


def test_stretches_join_neighbours_only_upwards() -> None:
    assert stretches(as_pages([3, 4, 5, 9, 8, 0])) == [(3, 6), (9, 10), (8, 9), (0, 1)]
    assert stretches(as_pages([])) == []


def copy_one_by_one(src: int, src_pages: PageIds, dst: int, dst_pages: PageIds, page_bytes: int) -> None:
    copy_each(src, dst, coalesce(src_pages, dst_pages), page_bytes)


@pytest.mark.parametrize("copy", [copy_pages, copy_one_by_one])
@pytest.mark.parametrize("page_bytes", [96, 100_003], ids=["small", "past the caches"])
@settings(max_examples=30)
@given(page_lists)
@example(list(range(3, 20)))
def test_a_copy_moves_exactly_the_named_pages(
    copy: Callable[[int, PageIds, int, PageIds, int], None], page_bytes: int, dst: list[int]
) -> None:
    source, target = pool(41, page_bytes, seed=1), pool(41, page_bytes)
    src = np.roll(as_pages(dst), 1)
    copy(source.ptr, src, target.ptr, as_pages(dst), page_bytes)
    expected = torch.zeros_like(target.tensor)
    expected[dst] = source.tensor[torch.from_numpy(src)]
    assert torch.equal(target.tensor, expected)


def test_pages_are_copied_by_the_compiled_library() -> None:
    assert page_copies() is not None


def test_a_write_pairs_pages() -> None:
    with pytest.raises(AssertionError, match="pairs"):
        PageWrite(1, 0, "full", as_pages([1, 2]), as_pages([1]))


def test_a_region_in_host_memory_is_used_in_place() -> None:
    region = pool(20, 64, seed=2)
    pages = as_pages([7, 8, 1, 19, 4, 5, 6, 2])
    expected = [zlib.crc32(region.tensor[page].numpy().tobytes()) for page in pages]
    assert checksums(region, pages, [Sample(i, 0, 64) for i in range(len(pages))]) == expected
    target = pool(20, 64)
    for out, into in zip(region.to_host(pages), target.from_host(pages[::-1].copy()), strict=True):
        copy_pages(out.ptr, out.pages, into.ptr, into.pages, 64)
    assert torch.equal(target.tensor[pages[::-1].copy()], region.tensor[pages])
