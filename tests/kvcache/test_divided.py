"""Pools whose heads lie in several memories: a page is the same blob as in one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvcache.divided import DividedKVCache
from kvcache.indexed_layout import IndexedKVGroupSpec
from kvcache.indexed_pool import IndexedKVCache
from kvcache.layout import KVGroupSpec, LatentGroupSpec, rank_heads
from kvcache.pool import MHAKVCache
from kvcache.quant import KVFormat
from kvcache.tiers.copier import open_copier
from kvcache.tiers.host_pool import HostPool
from tests.support.rank_rig import shared_pool, spread_pool

PAGE, PAGES = 4, 6


def spec_of(stored: KVFormat = KVFormat.AUTO) -> KVGroupSpec:
    return KVGroupSpec((0, 1, 5), 4, 32, torch.float32, stored=stored)


def filled(spec: KVGroupSpec, parts: int) -> tuple[MHAKVCache, DividedKVCache]:
    """The same tokens in a whole pool and in one of several parts, each of which was given its heads."""
    whole, divided = shared_pool(spec, PAGES, PAGE), spread_pool(spec, parts, PAGES, PAGE)
    assert isinstance(whole, MHAKVCache)
    assert isinstance(divided, DividedKVCache)
    for layer in spec.layer_ids:
        slots = torch.randperm(PAGES * PAGE)[:17] + PAGE
        k, v = torch.randn(2, len(slots), spec.kv_heads, spec.head_dim)
        whole.set_kv_buffer(layer, slots, k, v)
        for number, part in enumerate(divided.parts):
            assert isinstance(part, MHAKVCache)
            first = spec.kv_heads * number // parts
            own = slice(first, first + rank_heads(spec.kv_heads, parts))
            part.set_kv_buffer(layer, slots, k[:, own], v[:, own])
    return whole, divided


@pytest.mark.parametrize("stored", KVFormat)
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_pages_are_read_and_written_as_whole_ones(parts: int, stored: KVFormat) -> None:
    whole, divided = filled(spec_of(stored), parts)
    assert divided.page_bytes == whole.page_bytes
    ids = torch.tensor([3, 1, 6])
    assert torch.equal(divided.read(ids), whole.bytes[ids])
    divided.write(torch.tensor([2, 4]), whole.bytes[torch.tensor([1, 3])])
    assert torch.equal(divided.read(torch.tensor([1, 2, 3, 4])), whole.bytes[torch.tensor([1, 1, 3, 3])])


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_index_keys_are_whole_in_each_part(parts: int) -> None:
    spec = IndexedKVGroupSpec((0, 1, 5), 2, 32, torch.bfloat16, index_dim=16)
    whole, divided = shared_pool(spec, PAGES, PAGE), spread_pool(spec, parts, PAGES, PAGE)
    assert isinstance(whole, IndexedKVCache)
    whole.bytes.copy_(torch.randint(0, 256, whole.bytes.shape, dtype=torch.uint8))
    ids = torch.tensor([3, 1, 6])
    divided.write(ids, whole.bytes[ids])
    assert torch.equal(divided.read(ids), whole.bytes[ids])
    for number, part in enumerate(divided.parts):
        assert isinstance(part, IndexedKVCache)
        assert part.index.view(torch.uint8)[ids].equal(whole.index.view(torch.uint8)[ids])
        first = 2 * number // parts
        own = whole.data[:, :, :, first : first + rank_heads(2, parts)]
        assert part.data.view(torch.uint8)[ids].equal(own.contiguous().view(torch.uint8)[ids])


def test_pages_go_to_the_host_and_back() -> None:
    whole, divided = filled(spec_of(), 2)
    host = HostPool([spec_of()], PAGE, {"full": 5})
    copier = open_copier({"full": divided}, host, 0.0)
    device, there = np.array([1, 4, 2]), np.array([5, 1, 3])
    assert copier.to_host({"full": device}, {"full": there}) == 3 * whole.page_bytes
    assert torch.equal(host.arenas["full"].bytes[there], whole.bytes[device])
    assert copier.to_device({"full": np.array([6, 3, 5])}, {"full": there}) == 3 * whole.page_bytes
    assert torch.equal(divided.read(torch.tensor([6, 3, 5])), whole.bytes[device])
    host.close()


def test_what_has_no_heads_is_whole_in_each_part() -> None:
    spec = LatentGroupSpec((0, 1), 24, 8, torch.float32)
    pool = spread_pool(spec, 3, PAGES, PAGE)
    assert [part.page_bytes for part in pool.parts] == [pool.page_bytes] * 3 == [spec.page_bytes(PAGE)] * 3
    pages = torch.randint(0, 256, (2, pool.page_bytes), dtype=torch.uint8)
    pool.write(torch.tensor([5, 2]), pages)
    assert torch.equal(pool.read(torch.tensor([5, 2])), pages)
    for part in pool.parts:
        assert torch.equal(part.bytes[torch.tensor([5, 2])], pages)
