"""MiniMax-M3, whose indexers choose the blocks that attention sees, against transformers.generate token by
token, in float32."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MiniMaxM3VLTextConfig

from engine.backends.block_choose import build_blocks
from engine.backends.block_cpu import CpuBlockAttention
from engine.backends.block_limits import check_blocks
from engine.backends.block_reference import TorchBlockAttention
from engine.backends.pick import BackendUnavailable
from engine.batch import ForwardBatch
from engine.block_choice import BlockChoice, BlockInputs
from engine.config import EngineConfig
from engine.errors import UnsupportedModel
from engine.gate import check_model
from engine.loader import load_model
from kvcache.indexed_layout import IndexedKVGroupSpec
from kvcache.indexed_pool import IndexedKVCache
from tests.engine.conftest import PROMPTS, Drawn
from tests.engine.latent_checks import check_greedy, check_pages_elsewhere, ways_to_pack
from tests.support.driver import Driver, open_runner
from tests.support.reference import draw_model
from tests.support.spoilt import Spoilt, nothing
from tests.support.tiny_configs import MIXED

FAMILY = "minimax_m3_vl_text"
PAGE, TOKENS = 16, 24
_random = random.Random(5)
PROMPT = [_random.randrange(256) for _ in range(70)]


@pytest.mark.parametrize("attention", ["torch", "cpu"])
@ways_to_pack
def test_greedy_tokens_equal_generate(
    attention: str, page_size: int, chunk: int, stagger: int, drawn: Drawn
) -> None:
    if (attention, page_size) == ("cpu", 64):
        attention = "auto"  # a page has several blocks: plain torch
    check_greedy(drawn(FAMILY), attention, page_size, chunk, stagger)


@pytest.mark.parametrize("attention", ["torch", "cpu"])
def test_chunks_are_computed_in_parts(attention: str, drawn: Drawn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.backends.query_blocks.SCORES_AT_ONCE", 1000)
    path, expected = drawn(FAMILY)
    runner, _ = open_runner(path, PAGE, 12, attention=attention)
    driver = Driver(runner, 12, PAGE)
    lane = driver.add(PROMPTS[2])
    driver.generate([lane], 8)
    assert lane.outputs == expected[2][:8]


def test_pages_hold_all_that_another_engine_needs(drawn: Drawn) -> None:
    check_pages_elsewhere(drawn(FAMILY), 2)


def test_a_layer_ends_with_the_index_keys(drawn: Drawn) -> None:
    path, _ = drawn(FAMILY)
    spec = load_model(EngineConfig(str(path))).spec
    assert spec.groups == (IndexedKVGroupSpec((0, 1, 2, 3), 2, 16, torch.float32, index_dim=16),)
    runner, pool = open_runner(path, PAGE, 12)
    driver = Driver(runner, 12, PAGE)
    pool.bytes.zero_()
    lane = driver.add(PROMPT)
    driver.generate([lane], 2, chunk=40)
    keys = pool.index[lane.pages[0]]
    assert keys[1:].all()
    assert not keys[0].any(), "the layer without an indexer has no keys"


# What a spoilt choice does


def stale_index_keys(batch: ForwardBatch, pool: IndexedKVCache) -> ForwardBatch:
    """The tokens of a page have the index keys of an earlier page, and all else of their own."""
    page, earlier = batch.page_table[0, [2, 1]].tolist()
    pool.index[page] = pool.index[earlier]
    return batch


def new_row_not_written(batch: ForwardBatch, _pool: IndexedKVCache) -> ForwardBatch:
    return replace(batch, out_slots=np.zeros_like(batch.out_slots))


@pytest.mark.parametrize("attention", ["torch", "cpu"])
def test_spoilt_pages_are_seen(attention: str, tmp_path: Path) -> None:
    path, [answer] = draw_model(FAMILY, tmp_path, 0, [PROMPT], TOKENS)
    right = {}
    for spoil in (nothing, stale_index_keys, new_row_not_written):
        runner, pool = open_runner(path, PAGE, 12, attention=attention)
        driver = Driver(Spoilt(runner, pool, spoil), 12, PAGE)
        lane = driver.add(PROMPT)
        driver.generate([lane], TOKENS, chunk=40)
        right[spoil.__name__] = lane.outputs == answer
    assert [name for name, equal in right.items() if equal] == ["nothing"]


@pytest.mark.parametrize("change", [{"top": 1}, {"top": 3}, {"top": 100}, {"local": 2}, {"tokens": 32}])
@pytest.mark.parametrize("attention", ["torch", "cpu"])
def test_another_choice_is_seen(attention: str, change: dict[str, int], drawn: Drawn) -> None:
    path, expected = drawn(FAMILY)
    runner, _ = open_runner(path, PAGE, 12, attention=attention)
    backend: Any = runner.forward.attention.full
    backend._choice = backend._choice._replace(**change)
    driver = Driver(runner, 12, PAGE)
    lane = driver.add(PROMPTS[2])
    driver.generate([lane], len(expected[2]))
    assert lane.outputs != expected[2]


# The choice alone


def test_local_blocks_are_chosen_whatever_they_score() -> None:
    """Queries in blocks 0, 1 and 4, of 5 blocks."""
    scores = torch.tensor([5.0, 4, 3, 2, 1]).repeat(3, 2, 1)
    scores[:, 1] = torch.tensor([1.0, 2, 3, 4, 5])
    own = torch.tensor([0, 1, 4])
    scores.masked_fill_(torch.arange(5) > own[:, None, None], -torch.inf)
    chosen = BlockChoice(heads=2, tokens=8, top=3, local=2).choose(scores, own)
    assert chosen[:, 0].tolist() == [[0, 5, 5], [0, 1, 5], [0, 3, 4]]
    assert chosen[:, 1].tolist() == [[0, 5, 5], [0, 1, 5], [2, 3, 4]]


def test_the_host_knows_how_many_tokens_a_query_sees() -> None:
    choice = BlockChoice(heads=2, tokens=8, top=3, local=1)
    seen = choice.tokens_seen(np.array([0, 7, 8, 23, 24, 100]))
    assert seen.tolist() == [1, 8, 9, 24, 17, 21]
    assert [choice.holds(context) for context in (24, 25)] == [True, False]


# Which backend runs


SPEC = IndexedKVGroupSpec((0, 1), 2, 16, torch.float32, index_dim=32)
CHOICE = BlockChoice(heads=2, tokens=16, top=2, local=1)


@pytest.mark.parametrize(
    ("spec", "page_size", "choice", "why"),
    [
        (SPEC, 16, CHOICE._replace(heads=1), "1 index heads choose for 2 KV heads"),
        (SPEC, 16, CHOICE._replace(local=0), "may not see its own block"),
        (SPEC, 32, CHOICE, "blocks of 16 tokens have no whole pages of 32"),
        (replace(SPEC, index_dim=20), 16, CHOICE, "heads of 16 values and index keys of 20"),
    ],
)
def test_what_kernels_do_not_attend_to_is_said_by_name(
    spec: IndexedKVGroupSpec, page_size: int, choice: BlockChoice, why: str
) -> None:
    pool = IndexedKVCache(spec, 4, page_size)
    with pytest.raises(BackendUnavailable, match=why):
        check_blocks(pool, choice)
    assert isinstance(build_blocks(EngineConfig("m"), pool, 4, 0.25, choice), TorchBlockAttention)


@pytest.mark.parametrize("local", [0, 1, 2])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_a_query_sees_what_each_head_chooses(heads: int, local: int) -> None:
    """Values say by their one 1 which token they are of; keys are equal. In plain torch, and where there is
    one, in the kernel."""
    tokens, context = 4, 22
    choice = BlockChoice(heads=heads, tokens=tokens, top=2, local=local)
    spec = IndexedKVGroupSpec((0,), 2, 32, torch.float32, index_dim=32)
    torch.manual_seed(heads)
    index = BlockInputs(torch.randn(context, heads, 32), torch.randn(context, 32))
    q, k = torch.zeros(context, 4, 32), torch.zeros(context, 2, 32)
    v = torch.eye(context, 32)[:, None].repeat(1, 2, 1)
    scores = torch.einsum("nhd,kd->hnk", index.q, index.k)
    for page_size in (2, 4):
        pool = IndexedKVCache(spec, 12, page_size)
        batch = one_prompt(context, page_size)
        backends = [TorchBlockAttention(pool, 4, 1.0, choice)]
        if heads == 2 and local:
            backends.append(CpuBlockAttention(pool, 4, 1.0, choice))
        for backend in backends:
            out = torch.empty(context, 4, 32)
            backend.prepare(batch)
            backend.attend_blocks(0, q, k, v, out, index)
            for head in range(4):
                for i in range(context):
                    seen = set(out[i, head].nonzero().flatten().tolist())
                    assert seen == expected(scores[head * heads // 4, i], i, choice)


def one_prompt(tokens: int, page_size: int) -> ForwardBatch:
    pages = np.arange(1, -(-tokens // page_size) + 1, dtype=np.int32)
    positions = np.arange(tokens)
    return ForwardBatch(
        input_ids=np.zeros(tokens, np.int64),
        positions=positions,
        out_slots=pages[positions // page_size].astype(np.int64) * page_size + positions % page_size,
        page_table=pages[None],
        seq_lens=np.array([tokens], np.int32),
        q_lens=np.array([tokens], np.int32),
        rows=np.ones(1, np.int32),
        sampled=np.zeros(0, np.int64),
        sampling=None,  # type: ignore[arg-type]
    )


def expected(scores: torch.Tensor, position: int, choice: BlockChoice) -> set[int]:
    own = position // choice.tokens
    best = {
        block: float(scores[block * choice.tokens : min(position + 1, (block + 1) * choice.tokens)].max())
        for block in range(own + 1)
    }
    best |= {block: float("inf") for block in range(max(0, own - choice.local + 1), own + 1)}
    if choice.local == 0:
        best[own] = float(scores[own * choice.tokens : position + 1].max())
    chosen = sorted(best, key=lambda block: -best[block])[: choice.top]
    return {token for token in range(position + 1) if token // choice.tokens in chosen}


# The gate


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"index_n_heads": 3}, "3 heads of an indexer choose for 4 query heads"),
        ({"index_local_blocks": 3}, "index_local_blocks is 3 in config.json, and index_topk_blocks 2"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types in config.json holds linear_attention"),
    ],
)
def test_variants_that_are_not_served_are_refused_by_name(keys: dict[str, Any], named: str) -> None:
    config = MiniMaxM3VLTextConfig(**{**MIXED[FAMILY]().to_dict(), **keys})
    with pytest.raises(UnsupportedModel, match=named):
        check_model(config)
