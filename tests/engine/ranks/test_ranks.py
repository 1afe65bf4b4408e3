"""Models in several ranks, in real processes, against transformers.generate, token by token, in float32."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from common.errors import ConfigError
from engine.batch import ScoredPrompt
from engine.config import EngineConfig
from engine.errors import DeviceLost
from engine.loader import check_divisible, load_model
from engine.parallel.head import is_divided_head
from engine.parallel.shard import FAMILIES as DIVIDED
from engine.ranks.ranks import Ranks
from engine.runner import ModelRunner
from kvcache.layout import KVGroupSpec
from kvcache.pool import MHAKVCache
from tests.engine.conftest import PROMPTS, Drawn
from tests.engine.cpu.test_int8_weights import share
from tests.support.children import children_of
from tests.support.driver import Driver, open_pools
from tests.support.quantised_checkpoints import write
from tests.support.rank_rig import TIMEOUT_S, open_ranks
from tests.support.tiny_configs import FAMILIES, MIXED, SIMILAR
from tests.support.tiny_models import make_tiny
from wire.request import TokenLogprobs

PAGE, PAGES = 16, 40
CHOSEN = ("olmo3", "qwen3_next")
"""In `make test`. The served oracle has others."""


def families() -> list[object]:
    every = (*FAMILIES, *MIXED, *SIMILAR)
    named = [name for name in every if name.removesuffix("_window") in DIVIDED]
    return [
        pytest.param(name, marks=() if name in CHOSEN else pytest.mark.oracle_full) for name in sorted(named)
    ]


@pytest.mark.parametrize("family", families())
def test_tokens_equal_generate(family: str, drawn: Drawn) -> None:
    check_tokens(*drawn(family))


@pytest.mark.parametrize(
    "options",
    [
        {"divided": True},
        pytest.param({"overlap": True}, marks=pytest.mark.oracle_full),
        pytest.param({"attention": "torch"}, marks=pytest.mark.oracle_full),
    ],
    ids=lambda options: next(iter(options)),
)
def test_tokens_equal_generate_however_they_are_computed(options: dict[str, Any], drawn: Drawn) -> None:
    check_tokens(*drawn("gemma3_text"), **options)


@pytest.mark.oracle_full
@pytest.mark.parametrize(
    ("family", "divided"),
    [
        *(("qwen2", False), ("qwen2", True), ("minimax_m2", False), ("gemma4_text", True)),
        *(("minimax_m3_vl_text", False), ("minimax_m3_vl_text", True)),
    ],
)
def test_fewer_kv_heads_than_ranks(family: str, divided: bool, drawn: Drawn) -> None:
    """Each of the two belongs to two of the ranks; so do MiniMax's weights of norms and index heads."""
    check_tokens(*drawn(family), size=4, divided=divided)


def check_tokens(path: Path, expected: list[list[int]], size: int = 2, **options: Any) -> None:
    with open_ranks(path, size, PAGE, PAGES, **options) as (runner, _):
        driver = Driver(runner, PAGES, PAGE)
        lanes = [driver.add(prompt) for prompt in PROMPTS]
        driver.generate(lanes, len(expected[0]), chunk=7, stagger=9)
    assert [lane.outputs for lane in lanes] == expected


@pytest.mark.parametrize("family", ["qwen2", pytest.param("gemma2", marks=pytest.mark.oracle_full)])
def test_the_tokens_of_a_prompt_are_scored_as_by_one_rank(family: str, tmp_path: Path) -> None:
    """Through a head that all ranks have a part of: tied, with capped logits, more positions than it takes at
    once, beside a sequence that is sampled."""
    path = make_tiny(family, tmp_path, 0)
    prompt = np.random.default_rng(3).integers(0, 256, 130)

    def scores(runner: ModelRunner) -> list[TokenLogprobs]:
        driver = Driver(runner, PAGES, PAGE)
        lanes = [driver.add(prompt.tolist()), driver.add(PROMPTS[0])]
        batch = driver.batch([(lane, lane.prompt_len) for lane in lanes])
        scored = (ScoredPrompt(0, prompt[1:], 3),)
        found: list[TokenLogprobs] = runner.issue(replace(batch, scored=scored))().scored[0]
        return found

    with open_ranks(path, 2, PAGE, PAGES) as (runner, _):
        assert is_divided_head(runner._lm_head)
        got = scores(runner)
    alone, pools = open_pools(path, PAGE, PAGES)
    want = scores(alone)
    assert len(got) == len(want) == 129
    for one, other in zip(got, want, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
    del pools


@pytest.mark.parametrize(
    ("family", "form"),
    [("qwen3", "fp8_wide"), pytest.param("gpt_oss", "mxfp4", marks=pytest.mark.oracle_full)],
)
def test_weights_stay_stored_in_parts_of_them(family: str, form: str, tmp_path: Path) -> None:
    """Logits in bfloat16 are about as far from transformers' in float32 as transformers' own in bfloat16,
    which chooses other experts of gpt-oss near a tie, too. One rank is nearer: its decoder is fused."""
    stored, exact = write(family, tmp_path, 0, form)
    ids = np.random.default_rng(2).integers(0, 256, 120)
    with torch.inference_mode():
        want, theirs = (
            AutoModelForCausalLM.from_pretrained(exact, dtype=dtype)(torch.from_numpy(ids)[None])
            .logits[0]
            .float()
            for dtype in (torch.float32, torch.bfloat16)
        )
    with open_ranks(stored, 2, PAGE, PAGES, dtype="bfloat16", attention="auto") as (runner, _):
        assert runner.kept_formats == (form.removesuffix("_wide"),)
        driver = Driver(runner, PAGES, PAGE)
        batch = driver.batch([(driver.add(ids.tolist()), len(ids))])
        with torch.inference_mode():
            got = runner.logits(batch, np.arange(len(ids))).float()
    assert share(got, want) <= 1.5 * share(theirs, want)


@pytest.mark.parametrize(
    ("family", "size", "said"),
    [
        ("llama", 3, "tp_size: num_attention_heads is 4 in config.json; use a number that divides 4"),
        ("phi3", 4, "tp_size: num_key_value_heads is 2 in config.json; use a number that divides 2"),
        ("deepseek_v4", 4, "tp_size: o_groups is 2 in config.json; use a number that divides 2"),
        ("lfm2", 2, "tp_size: models of type lfm2 are not divided among ranks"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(family: str, size: int, said: str, tmp_path: Path) -> None:
    config = EngineConfig(str(make_tiny(family, tmp_path, 0)))
    with pytest.raises(ConfigError) as refused:
        check_divisible(config, size)
    assert str(refused.value).startswith(said)


def test_a_rank_that_cannot_load_the_model_says_why(tmp_path: Path) -> None:
    before = children_of("self")
    path = make_tiny("llama", tmp_path, 0)
    (path / "model.safetensors").write_bytes(b"no weights")
    ranks = Ranks(EngineConfig(str(path)), ["cpu"] * 2, TIMEOUT_S)
    with pytest.raises(ConfigError, match=r"model: .* cannot be loaded"), ranks:
        ranks.await_loaded()
    assert children_of("self") == before, "no rank stays"


def test_a_rank_that_ends_while_a_worker_starts_is_an_error_of_its_configuration(drawn: Drawn) -> None:
    path, _ = drawn("qwen2")
    before = children_of("self")
    with Ranks(EngineConfig(str(path)), ["cpu"] * 2, TIMEOUT_S) as ranks:
        ranks.await_loaded()
        end(children_of("self") - before)
        with pytest.raises(ConfigError, match="tp_size: rank 1 has ended"):
            ranks.give_back()


def end(ranks: set[int]) -> None:
    for rank in ranks:
        os.kill(rank, signal.SIGKILL)
        os.waitid(os.P_PID, rank, os.WEXITED | os.WNOWAIT)


def test_a_rank_that_is_killed_is_noticed_and_no_forward_hangs(drawn: Drawn) -> None:
    path, _ = drawn("qwen2")
    before = children_of("self")
    with open_ranks(path, 2, PAGE, PAGES, forks=False) as (runner, _):
        driver = Driver(runner, PAGES, PAGE)
        lane = driver.add(PROMPTS[0])
        driver.step([(lane, lane.prompt_len)])
        runner.check()
        end(children_of("self") - before)
        with pytest.raises(DeviceLost):
            driver.step([(lane, 1)])
        with pytest.raises(DeviceLost, match=r"rank 1 has ended, with status -9"):
            runner.check()
    assert children_of("self") == before


def test_a_forward_that_fails_on_rank_0_leaves_no_rank_waiting(drawn: Drawn) -> None:
    """Its error is no EngineError of one batch: the other ranks have computed something else."""
    path, _ = drawn("qwen2")
    before = children_of("self")
    with open_ranks(path, 2, PAGE, PAGES, forks=False) as (runner, _):
        driver = Driver(runner, PAGES, PAGE)
        with pytest.raises(DeviceLost, match="IndexError"):
            driver.step([(driver.add([10_000]), 1)])  # past the embedding
    assert children_of("self") == before


@pytest.mark.oracle_full
def test_a_quantised_pool_in_parts_says_the_same(tmp_path: Path) -> None:
    path = make_tiny("qwen3", tmp_path, 3)
    ids = np.random.default_rng(0).integers(0, 256, 100).tolist()
    config = EngineConfig(str(path), "float32", kv_cache_dtype="fp4_e2m1", overlap=False)
    loaded = load_model(config)
    (spec,) = loaded.spec.groups
    assert isinstance(spec, KVGroupSpec)
    one_rank = in_chunks(ModelRunner(loaded, {"full": MHAKVCache(spec, PAGES, PAGE)}, config), ids)
    with open_ranks(path, 2, PAGE, PAGES, divided=True, kv_cache_dtype="fp4_e2m1") as (runner, _):
        torch.testing.assert_close(in_chunks(runner, ids), one_rank, atol=1e-4, rtol=0)


def in_chunks(runner: ModelRunner, ids: list[int]) -> torch.Tensor:
    """Logits [len(ids), vocab]: all but the first chunk attend to what was stored."""
    driver, parts = Driver(runner, PAGES, PAGE), []
    lane = driver.add(ids)
    while lane.done < len(ids):
        batch = driver.batch([(lane, 20)])
        with torch.inference_mode():
            parts.append(runner.logits(batch, np.arange(20)))
    return torch.cat(parts)
