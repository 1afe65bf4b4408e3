"""Groups of rows that stand for several tokens each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.errors import ConfigError
from kvcache.config import CacheConfig
from kvcache.entry_layout import EntryGroupSpec, LayerRows
from kvcache.layout import stored_as
from kvcache.memory import build_memory
from kvcache.pool import EntryKVCache
from kvcache.quant import KVFormat

ENTRIES = EntryGroupSpec((LayerRows(1, 6, 4), LayerRows(2, 4, 32)), torch.bfloat16)
WINDOW = EntryGroupSpec(
    (LayerRows(0, 4), LayerRows(1, 28), LayerRows(2, 12)), torch.bfloat16, "window", window=32
)


@pytest.mark.parametrize(("page_size", "values"), [(1, 10), (2, 10), (4, 10), (16, 28), (32, 52), (64, 104)])
def test_a_page_has_a_row_for_each_entry_that_ends_in_it(page_size: int, values: int) -> None:
    assert ENTRIES.page_shape(page_size) == (values,)
    assert ENTRIES.page_bytes(page_size) == 2 * values
    assert WINDOW.page_bytes(page_size) == 2 * 44 * page_size
    assert (ENTRIES.kind, WINDOW.kind) == ("entries", "window")


def test_pages_and_entries_that_do_not_divide_each_other_are_refused() -> None:
    odd = replace(ENTRIES, rows=(LayerRows(0, 6, 6),))
    with pytest.raises(ConfigError, match="page_size: pages of 4 tokens and entries of 6 tokens"):
        odd.page_shape(4)


def test_layouts_differ_where_rows_do() -> None:
    """Both have as many values in a page."""
    other = replace(ENTRIES, rows=(LayerRows(1, 6, 4), LayerRows(2, 4, 16)))
    assert other.page_bytes(16) == ENTRIES.page_bytes(16)
    assert other.to_layout(16) != ENTRIES.to_layout(16)


def test_entries_are_not_quantised() -> None:
    assert stored_as((ENTRIES, WINDOW), KVFormat.AUTO) == (ENTRIES, WINDOW)
    with pytest.raises(ConfigError, match="kv_cache_dtype: entries of compressed attention"):
        stored_as((ENTRIES,), KVFormat.FP8_E4M3)


def test_rows_are_where_a_page_has_them() -> None:
    pool = EntryKVCache(ENTRIES, 3, 16)
    pool.rows(1)[2, 3] = torch.arange(6, dtype=torch.bfloat16)
    pool.rows(2)[2, 0] = torch.arange(10, 14, dtype=torch.bfloat16)
    assert pool.rows(1).shape == (4, 4, 6)
    assert pool.rows(2).shape == (4, 1, 4)
    page = pool.bytes[2].view(torch.bfloat16)
    assert page[18:].tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13]
    assert not page[:18].any()
    assert not pool.bytes[[0, 1, 3]].any()


def test_a_model_without_entries_has_pages_of_no_bytes() -> None:
    nothing = EntryGroupSpec((), torch.bfloat16)
    assert EntryKVCache(nothing, 3, 16).nbytes == 0


@pytest.mark.parametrize(("chosen", "pages"), [(None, 20), (0.5, 100)])
def test_few_windows_are_kept_beside_entries(chosen: float | None, pages: int) -> None:
    config = CacheConfig(
        total_tokens=3200,
        max_context_len=320,
        max_running_requests=2,
        page_size=16,
        max_chunk_tokens=64,
        swa_full_tokens_ratio=chosen,
    )
    with build_memory(config, (ENTRIES, WINDOW)) as memory:
        assert memory.kv_caches["entries"].num_pages == 200
        assert memory.kv_caches["window"].num_pages == pages
        memory.check_memory()
