"""Pools of keys and values with an indexer's keys beside them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.errors import ConfigError
from kvcache.indexed_layout import IndexedKVGroupSpec
from kvcache.indexed_pool import HeadsAsPages, IndexedKVCache
from kvcache.layout import stored_as
from kvcache.quant import KVFormat

SPEC = IndexedKVGroupSpec((0, 3), 2, 16, torch.bfloat16, index_dim=32)
FORMATS = list(KVFormat)


def test_a_page_has_heads_and_then_index_keys() -> None:
    assert SPEC.page_shape(4) == (2 * 2 * (2 * 2 * 4 * 16 + 4 * 32),)
    assert SPEC.page_bytes(4) == 1536
    pool = IndexedKVCache(SPEC, 3, 4)
    k, v = torch.full((1, 2, 16), 2.0).bfloat16(), torch.full((1, 2, 16), 3.0).bfloat16()
    pool.set_kv_buffer(3, torch.tensor([9]), k, v)
    pool.write_index(1, torch.tensor([2]), torch.tensor([1]), torch.full((1, 32), 4.0).bfloat16())
    page = pool.bytes[2].view(torch.bfloat16)
    tiles, index = page[:512].view(2, 2, 2, 4, 16), page[512:].view(2, 4, 32)
    assert tiles[1, 0, :, 1].unique().tolist() == [2]
    assert tiles[1, 1, :, 1].unique().tolist() == [3]
    assert index[1, 1].unique().tolist() == [4]
    assert page.count_nonzero() == 2 * 32 + 32
    assert not pool.bytes[[0, 1, 3]].any()


def test_index_keys_are_aligned() -> None:
    odd = replace(SPEC, layer_ids=(0,), kv_heads=1, stored=KVFormat.FP4_E2M1, dtype=torch.float32)
    with pytest.raises(ConfigError, match="page_size: 18 bytes of fp4_e2m1 heads"):
        odd.page_bytes(1)
    assert odd.page_bytes(2) == 2 * (18 + 32 * 4)


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_index_keys_are_stored_as_the_model_computes_them(
    stored: KVFormat, page_size: int, dtype: torch.dtype
) -> None:
    [spec] = stored_as((replace(SPEC, dtype=dtype),), stored)
    pool = IndexedKVCache(spec, 3, page_size)
    keys, k = torch.randn(1, 32).to(dtype), torch.randn(1, 2, 16).to(dtype)
    page, first = torch.tensor([2]), torch.tensor([0])
    for place in (0, 1):
        pool.write(place, page, first, k, 2 * k)
        pool.write_index(place, page, first, keys)
    assert pool.index[2, :, 0].equal(keys.expand(2, -1))
    read = pool.read_pages(1, page)[0, :, :, 0]
    tolerance = 0 if stored is KVFormat.AUTO else 0.3
    torch.testing.assert_close(read, torch.stack((k[0], 2 * k[0])), rtol=tolerance, atol=tolerance)


def test_layouts_differ_where_keys_do() -> None:
    other = replace(SPEC, kv_heads=1, index_dim=64)  # as many values of a token
    assert other.page_bytes(4) == SPEC.page_bytes(4)
    assert other.to_layout(4) != SPEC.to_layout(4)
    assert replace(SPEC, stored=KVFormat.FP8_E4M3).to_layout(4) != SPEC.to_layout(4)


@pytest.mark.parametrize("stored", [KVFormat.AUTO, KVFormat.FP8_E4M3])
def test_a_head_of_a_page_and_layer_is_a_page(stored: KVFormat) -> None:
    """Written by the heads, read by the pages, and the other way round."""
    [spec] = stored_as((SPEC,), stored)
    pool = IndexedKVCache(spec, 3, 4)
    heads = HeadsAsPages(pool)
    values = torch.arange(4 * 2 * 2 * 2 * 2 * 16).remainder(13).bfloat16().view(4, 2, 2, 2, 2, 16)
    offsets = torch.tensor([0, 2])
    for page in range(4):
        for place in (0, 1):
            k, v = values[page, place]
            pool.write(place, torch.tensor([page, page]), offsets, k.transpose(0, 1), v.transpose(0, 1))
    index = pool.index.clone()
    for page in range(4):
        for place in (0, 1):
            for head in (0, 1):
                tile = torch.tensor([page * heads.tiles_of_page + head])
                [read] = heads.read_pages(place * heads.tiles_of_layer, tile)
                assert read[:, 0, offsets].equal(values[page, place, :, head])
                heads.write(place * heads.tiles_of_layer, tile, offsets[:1], *(read[:, :, 0][:, None] + 1))
    assert pool.index.equal(index), "index keys lie behind the heads"
    for page in range(4):
        for place in (0, 1):
            [both] = pool.read_pages(place, torch.tensor([page]))
            assert both[:, :, 0].equal(values[page, place, :, :, 0] + 1)


def test_keys_that_are_no_whole_tiles_are_not_pages_of_heads() -> None:
    assert IndexedKVCache(replace(SPEC, index_dim=24), 3, 4).has_whole_tiles()
    assert not IndexedKVCache(replace(SPEC, index_dim=20), 3, 4).has_whole_tiles()
    assert not IndexedKVCache(replace(SPEC, stored=KVFormat.FP4_E2M1), 3, 4).has_whole_tiles()
