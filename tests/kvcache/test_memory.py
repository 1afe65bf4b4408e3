"""Buffers, pools, and the balance of everything a worker holds."""

from __future__ import annotations

import dataclasses
import fcntl
import mmap
import os
import tempfile

import numpy as np
import pytest
import torch

from common.errors import ConfigError
from kvcache.buffers import SEALS, SharedBuffer, allocate_private, allocate_shared, check_sealed
from kvcache.chunk_cache import ChunkCache
from kvcache.common import alloc_for_decode, alloc_for_extend, alloc_token_slots, release_kv_cache
from kvcache.layout import KVGroupSpec, pages_in
from kvcache.memory import Memory, build_memory
from kvcache.pool import MHAKVCache, ReqToTokenPool
from kvcache.radix_key import Namespace
from tests.kvcache.support import SPEC, Request, cached_tokens, key, matched, memory, pages_of, put, request
from tests.support.pool_rows import read_kv


def test_a_shared_buffer_is_seen_through_its_descriptor_until_closed() -> None:
    with allocate_shared(10_000) as buffer:
        assert isinstance(buffer, SharedBuffer)
        assert int(buffer.tensor.sum()) == 0
        with SharedBuffer(os.dup(buffer.fd), 10_000) as peer:
            peer.tensor[9_999] = 7
        assert int(buffer.tensor[9_999]) == 7
        fd = buffer.fd
    with pytest.raises(OSError):
        os.fstat(fd)
    buffer.close()


def test_the_size_of_a_shared_buffer_is_final() -> None:
    with allocate_shared(10_000) as buffer:
        check_sealed(buffer.fd, 10_000)
        for nbytes in (0, 9_999, 10_001):
            with pytest.raises(PermissionError):
                os.ftruncate(buffer.fd, nbytes)
        with pytest.raises(PermissionError):
            fcntl.fcntl(buffer.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        for nbytes in (10_001, 0, -1):
            with pytest.raises(ValueError, match="announced"):
                check_sealed(buffer.fd, nbytes)


@pytest.mark.parametrize("seals", [0, SEALS & ~fcntl.F_SEAL_SHRINK, SEALS & ~fcntl.F_SEAL_GROW])
def test_a_memory_file_whose_size_can_change_is_refused(seals: int) -> None:
    fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 4096)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        with pytest.raises(ValueError, match="not sealed"):
            check_sealed(fd, 4096)
    finally:
        os.close(fd)


def test_a_descriptor_that_is_no_memory_file_is_refused() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(4096)
        with pytest.raises(OSError):
            check_sealed(file.fileno(), 4096)


def test_private_memory_is_zero_and_starts_on_a_huge_page_when_large() -> None:
    with allocate_private(3 << 20) as buffer:
        assert buffer.tensor.numel() == 3 << 20
        assert buffer.tensor.data_ptr() % (2 << 20) == 0
        assert int(buffer.tensor.sum()) == 0
        late = buffer.tensor
    late[0] = 1  # still mapped: a late write is no crash
    assert allocate_private(mmap.PAGESIZE).tensor.numel() == mmap.PAGESIZE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_kv_is_written_where_the_page_layout_says(dtype: torch.dtype, page_size: int) -> None:
    spec = KVGroupSpec(layer_ids=(3, 7), kv_heads=2, head_dim=4, dtype=dtype)
    cache = MHAKVCache(spec, 8, page_size)
    slots = torch.randperm(8 * page_size)[:5] + page_size
    k, v = torch.randn(2, 5, 2, 4).to(dtype)
    cache.set_kv_buffer(7, slots, k, v)
    for i, slot in enumerate(slots.tolist()):
        page, offset = divmod(slot, page_size)
        assert torch.equal(cache.data[page, 1, 0, :, offset], k[i])
        assert torch.equal(cache.data[page, 1, 1, :, offset], v[i])
    assert int(cache.data[:, 0].count_nonzero()) == 0, "another layer was written"
    got_k, got_v = read_kv(cache, 7, slots)
    assert torch.equal(got_k, k)
    assert torch.equal(got_v, v)
    assert cache.bytes.data_ptr() == cache.data.data_ptr()
    assert cache.bytes.shape == (9, spec.page_bytes(page_size))
    assert torch.equal(cache.bytes[3].view(dtype), cache.data[3].reshape(-1))
    with pytest.raises(AssertionError, match="into a pool of"):
        cache.set_kv_buffer(7, slots, k.double(), v.double())


def test_layout_and_capacity() -> None:
    layout = SPEC.to_layout(16)
    assert (layout.shape, layout.dtype, layout.page_bytes) == ((2, 2, 2, 16, 4), "float32", 2048)
    assert dataclasses.replace(SPEC, tile_order="pairs").to_layout(16).tile_order == "pairs"
    assert pages_in(2048 * 10 + 5, (SPEC,), 16) == 9
    with pytest.raises(ConfigError):
        dataclasses.replace(SPEC, v_head_dim=8)
    with pytest.raises(ConfigError, match="window"):
        build_memory(memory().config, [dataclasses.replace(SPEC, window=8)])


def test_rows_are_fifo_and_row_zero_is_never_given() -> None:
    pool = ReqToTokenPool(2, 8, pre_alloc_size=1)
    assert pool.req_to_token.shape == (4, 8)
    assert pool.alloc(4) is None
    assert pool.alloc(2) == [1, 2]
    pool.free(1)
    assert pool.alloc(2) == [3, 1]
    with pytest.raises(AssertionError):
        pool.free(0)
    pool.free([1, 2])
    with pytest.raises(AssertionError, match="already"):
        pool.free(2)


def test_quarantined_pages_balance_and_are_not_handed_out_until_released() -> None:
    built = memory(pages=4)
    pages = built.allocator.alloc_pages(2)
    assert pages is not None
    built.quarantine({"full": pages[:1]}, (7, 1))
    built.quarantine({"full": pages[1:]}, (7, 1))
    assert built.check_memory().quarantined_pages == 2
    assert built.allocator.alloc_pages(3) is None
    assert built.release_quarantine((8, 1)) == 0
    assert built.release_quarantine((7, 1)) == 2
    assert built.check_memory().free_pages == 4


def test_lost_and_shared_pages_and_rows_are_named() -> None:
    built = memory(pages=4)
    pages = built.allocator.alloc_pages(2)
    assert pages is not None
    with pytest.raises(AssertionError, match=r"2 pages lost, first \[1, 2\]"):
        built.check_memory()
    assert built.check_memory({"full": pages.tolist()}).held_pages == 2
    with pytest.raises(AssertionError, match="1 pages owned twice"):
        built.check_memory({"full": [1, 2, 3]})
    built.allocator.free_page_ids(pages)
    built.req_to_token_pool.alloc(1)
    with pytest.raises(AssertionError, match="1 rows lost"):
        built.check_memory()
    assert built.check_memory(held_rows=[1]).held_rows == 1


def test_allocation_evicts_what_it_needs_and_is_all_or_nothing() -> None:
    built = memory(page_size=4, pages=4)
    put(built, [1] * 8)
    put(built, [2] * 8)
    slots = alloc_token_slots(built, 12)
    assert slots is not None
    assert (cached_tokens(built), built.allocator.available_size()) == (0, 4)
    req = with_row(built, request(range(9)))
    assert not alloc_for_extend(built, req, 9)
    assert req.kv_allocated_len == 0
    rows = np.array([1, 2], np.int32)
    assert alloc_for_decode(built, rows, np.array([4, 8])) is None
    assert not built.req_to_token_pool.req_to_token.any()
    built.allocator.free(slots)
    built.check_memory(held_rows=[1])


def with_row(built: Memory, req: Request) -> Request:
    """The request, with a row and no slots."""
    (req.req_pool_idx,) = built.req_to_token_pool.alloc(1) or [None]
    return req


@pytest.mark.parametrize("page_size", [1, 4])
def test_extend_goes_on_behind_the_prefix_in_whole_pages(page_size: int) -> None:
    built = memory(page_size, 8 // page_size * 4)
    put(built, range(8))
    match = built.cache.match_prefix(key(range(11)))
    built.cache.inc_lock_ref(match.last_device_node)
    req = with_row(built, request(range(11), prefix_indices=match.device_indices, cache_protected_len=8))
    req.last_node = match.last_device_node
    assert alloc_for_extend(built, req, 11)
    assert req.kv_allocated_len == (11 if page_size == 1 else 12)
    row = built.req_to_token_pool.req_to_token[req.req_pool_idx]
    assert row[:8].tolist() == match.device_indices.tolist()
    slots = row[8 : req.kv_allocated_len].tolist()
    assert not row[req.kv_allocated_len :].any()
    assert len({slot // page_size for slot in slots} - set(pages_of(built, match))) == len(slots) // page_size
    assert [slot % page_size for slot in slots] == [i % page_size for i in range(len(slots))]
    release_kv_cache(built, req, is_insert=False)
    assert built.check_memory().free_pages == built.num_pages - 8 // page_size


@pytest.mark.parametrize("page_size", [1, 4])
def test_decode_takes_each_row_s_next_page_and_the_rows_name_all_its_slots(page_size: int) -> None:
    built = memory(page_size, 64)
    reqs = [with_row(built, request(range(n))) for n in (4, 8, 12)]
    for req in reqs:
        assert alloc_for_extend(built, req, len(req.fill_ids))
    rows, lens = np.array([1, 3], np.int32), np.array([4, 12])
    before = built.req_to_token_pool.req_to_token.copy()
    pages = alloc_for_decode(built, rows, lens)
    assert pages is not None
    after = built.req_to_token_pool.req_to_token
    for row, start, page in zip(rows, lens, pages, strict=True):
        end = start + page_size
        assert after[row, start:end].tolist() == [*range(page * page_size, (page + 1) * page_size)]
        before[row, start:end] = after[row, start:end]
    assert (after == before).all(), "nothing else was written"
    for req in (reqs[0], reqs[2]):
        req.kv_allocated_len += page_size
    for req in reqs:
        release_kv_cache(built, req, is_insert=False)
    assert built.check_memory().free_pages == 64


def test_rows_name_the_last_page_s_slots_beyond_the_longest_context() -> None:
    built = memory(page_size=4, pages=4, max_context_len=6)
    req = with_row(built, request(range(6)))
    assert alloc_for_extend(built, req, 6)
    assert built.req_to_token_pool.req_to_token.shape[1] == req.kv_allocated_len == 8
    release_kv_cache(built, req, is_insert=False)
    assert built.check_memory().free_pages == 4


def test_without_prefix_caching_nothing_is_kept() -> None:
    built = memory(prefix_cache="none")
    assert isinstance(built.cache, ChunkCache)
    req = with_row(built, request(range(10)))
    assert alloc_for_extend(built, req, 10)
    req.kv_committed_len = 6
    built.cache.cache_unfinished_req(req)
    row = built.req_to_token_pool.req_to_token[req.req_pool_idx]
    assert req.prefix_indices.tolist() == row[:6].tolist()
    assert matched(built, range(10)) == 0
    release_kv_cache(built, req)
    assert built.check_memory().free_pages == 64


def test_two_requests_with_one_prompt_end_on_one_copy() -> None:
    built = memory(page_size=4, pages=16)
    both = [request(range(8), tenant="a") for _ in range(2)]
    for req in both:
        assert alloc_for_extend(built, with_row(built, req), 8)
        req.kv_committed_len = 8
    for req in both:
        built.cache.cache_unfinished_req(req)
    rows = built.req_to_token_pool.req_to_token
    assert np.array_equal(rows[both[0].req_pool_idx, :8], rows[both[1].req_pool_idx, :8])
    assert built.allocator.available_pages() == 14
    other = request(range(8), namespace=Namespace("model", cache_salt="x"))
    assert matched(built, other.fill_ids, other.namespace, "a") == 0
    for req in both:
        release_kv_cache(built, req)
    report = built.check_memory()
    assert (report.free_pages, report.evictable_pages) == (14, 2)
