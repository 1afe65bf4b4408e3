"""Compressed attention: which entries end with a step, and what no query may see."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from engine.backends.closing_tokens import ClosingTokens
from engine.backends.compressed_triton import check_entries
from engine.backends.pick import BackendUnavailable
from engine.batch import WindowPages
from engine.config import EngineConfig
from engine.cuda import triton_kernels
from engine.errors import UnsupportedModel
from engine.gate import check_model
from engine.loader import load_model
from engine.paged_layers import Compression
from kvcache.entry_layout import EntryGroupSpec, LayerRows
from kvcache.pool import EntryKVCache
from tests.engine.conftest import PROMPTS, Drawn
from tests.engine.test_attention_chunks import SEQUENCES, batch_of
from tests.support.driver import Driver, open_pools
from tests.support.tiny_configs import MIXED

ENTRIES = EntryGroupSpec((LayerRows(1, 32 + 16, 4), LayerRows(2, 32, 32)), torch.bfloat16)
CPU = torch.device("cpu")
SPARSE, HEAVY = Compression(4, 8, 6), Compression(8, 8, None)


@pytest.mark.parametrize("compression", [SPARSE, HEAVY])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@given(sequences=SEQUENCES)
def test_each_entry_that_ends_with_a_new_token_is_made_of_its_tokens(
    compression: Compression, page_size: int, sequences: list[tuple[int, int]]
) -> None:
    batch = batch_of(sequences, page_size)
    window = batch.page_table + 1000
    batch = replace(batch, window=WindowPages(window, batch.out_slots))
    closing = ClosingTokens(compression, page_size, CPU)
    closing.fill(batch, batch.window.page_table)
    tokens, span, _ = compression
    expected = [
        (table, last)
        for table, (before, new) in enumerate(sequences)
        for last in range(before, before + new)
        if (last + 1) % tokens == 0
    ]
    assert closing.count == len(expected)
    assert closing.firsts.tolist() == [last + 1 - tokens for _, last in expected]
    for (table, last), page, row, pages, offsets in zip(
        expected, closing.pages, closing.rows, closing.source_pages, closing.source_offsets, strict=True
    ):
        assert page == batch.page_table[table, last // page_size]
        assert row == (last % page_size) // tokens
        sources = [max(0, one) for one in range(last + 1 - span, last + 1)]
        assert pages.tolist() == [window[table, one // page_size] for one in sources]
        assert offsets.tolist() == [one % page_size for one in sources]


@given(positions=st.lists(st.integers(0, 70), min_size=3, max_size=3))
def test_recorded_rows_with_which_no_entry_ends_write_to_the_scratch_page(positions: list[int]) -> None:
    batch = batch_of([(before, 1) for before in positions], 16)
    batch = replace(batch, window=WindowPages(batch.page_table, batch.out_slots))
    closing = ClosingTokens(SPARSE, 16, CPU, fixed=3)
    address = closing.pages.data_ptr()
    closing.fill(batch, batch.window.page_table)
    assert closing.pages.data_ptr() == address
    own = [int(batch.page_table[i, last // 16]) for i, last in enumerate(positions)]
    ends = [(last + 1) % 4 == 0 for last in positions]
    assert closing.pages.tolist() == [page if end else 0 for page, end in zip(own, ends, strict=True)]


@pytest.mark.parametrize("page_size", [4, 16])
def test_no_query_sees_what_nobody_wrote(page_size: int, drawn: Drawn) -> None:
    """All of it is NaN."""
    path, expected = drawn("deepseek_v4")
    runner, pools = open_pools(path, page_size, 512 // page_size)
    for pool in pools.values():
        pool.data.fill_(torch.nan)
    driver = Driver(runner, 512 // page_size, page_size)
    lanes = [driver.add(prompt) for prompt in PROMPTS]
    driver.generate(lanes, len(expected[0]), chunk=13, stagger=5)
    assert [lane.outputs for lane in lanes] == expected


def test_groups_are_entries_and_a_window(drawn: Drawn) -> None:
    path, _ = drawn("deepseek_v4")
    entries, window = load_model(EngineConfig(str(path))).spec.groups
    assert (entries.kind, entries.layer_ids) == ("entries", (1, 2, 3, 4))
    assert (window.kind, window.layer_ids, window.window) == ("window", (0, 1, 2, 3, 4), 24)
    # In a page of 16: heads of 32, and indexers of 16; the heavy layers' entries are of 8 tokens.
    assert entries.page_shape(16) == (2 * 2 * 32 + 2 * 4 * (32 + 16),)
    assert window.page_shape(16) == (16 * (32 + 2 * (32 + 2 * 32) + 2 * (32 + 4 * (32 + 16))),)


def test_a_window_shorter_than_an_entry_is_refused() -> None:
    config = MIXED["deepseek_v4"]()
    config.sliding_window = 7
    with pytest.raises(UnsupportedModel, match="compressed_sparse_attention is made of 8 tokens"):
        check_model(config)
    config.compress_rates = {"compressed_sparse_attention": 2, "heavily_compressed_attention": 8}
    with pytest.raises(UnsupportedModel, match="heavily_compressed_attention is made of 8 tokens"):
        check_model(config)
    config.sliding_window = 8
    check_model(config)


@pytest.mark.parametrize(
    ("entries", "head_dim", "tokens", "said"),
    [
        (ENTRIES, 32, 4, None),
        (replace(ENTRIES, dtype=torch.float32), 32, 4, "bfloat16 and float16"),
        (
            replace(ENTRIES, rows=(LayerRows(0, 24, 8),)),
            24,
            None,
            "power of two values from 16 on are read, not of 24",
        ),
        (replace(ENTRIES, rows=(LayerRows(0, 40, 4),)), 32, 4, "not of 8"),
        (replace(ENTRIES, rows=(LayerRows(0, 48, 32),)), 32, 32, "a page of 16 tokens has no entry of 32"),
    ],
)
def test_what_our_kernels_cannot_read_is_said(
    entries: EntryGroupSpec,
    head_dim: int,
    tokens: int | None,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_kernels, "available", lambda: True)
    pool = EntryKVCache(entries, 2, 16)
    if said is None:
        check_entries(pool, head_dim, tokens)
        monkeypatch.setattr(triton_kernels, "available", lambda: False)
        said = "Triton"
    with pytest.raises(BackendUnavailable, match=said):
        check_entries(pool, head_dim, tokens)


def test_a_backend_that_is_named_and_has_no_kernel_is_refused(drawn: Drawn) -> None:
    path, _ = drawn("deepseek_v4")
    with pytest.raises(ConfigError, match="there is no kernel of compressed attention"):
        open_pools(path, 16, 8, attention="cpu")
