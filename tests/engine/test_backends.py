"""Which backend runs; FlashInfer's calls, read by stand-ins as its manual and its signatures say."""

from __future__ import annotations

import logging
import sys
from functools import partial
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from engine.attention_layers import AttentionLayer
from engine.backends.choose import build_attention
from engine.backends.latent_choose import build_latent
from engine.backends.latent_flashinfer import FlashInferLatentAttention
from engine.backends.latent_reference import TorchLatentAttention
from engine.backends.sparse_reference import TorchSparseAttention
from engine.backends.torch_reference import TorchAttention
from engine.config import EngineConfig
from engine.fake import fake_spec
from engine.largest_batch import largest_batch, largest_lens
from engine.paged_layers import IndexInputs
from engine.token_choice import TokenChoice
from kvcache.layout import KVGroupSpec, LatentGroupSpec
from kvcache.pool import MHAKVCache, MLAKVCache
from tests.engine.conftest import PROMPTS, Drawn
from tests.support.driver import Driver
from tests.support.flashinfer_stand_in import flashinfer_module, open_flashinfer
from tools.fake_cuda import FakeCuda


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    package, mla = flashinfer_module()
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", mla)
    return package


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    "family",
    [
        *("qwen3", "mistral_window", "gemma2", "gpt_oss", "llama4_text", "mimo_v2_flash"),
        *(
            "deepseek_v3",
            "deepseek_v32",
            "glm_moe_dsa",
            "deepseek_v4",
            "minimax_m3_vl_text",
            "glm5_next_text",
        ),
    ],
)
def test_flashinfer_is_planned_so_that_tokens_equal_generate(family: str, drawn: Drawn) -> None:
    path, expected = drawn(family)
    runner, pools = open_flashinfer(path, 16, 40)
    driver = Driver(runner, 40, 16, window_pool=pools.get("window"))
    lanes = [driver.add(prompt) for prompt in PROMPTS]
    driver.generate(lanes, 24, chunk=7, stagger=3)
    runner.close()
    assert [lane.outputs for lane in lanes] == [answer[:24] for answer in expected]


def pool_of(head_dim: int = 16, dtype: torch.dtype = torch.float32) -> MHAKVCache:
    return MHAKVCache(KVGroupSpec(layer_ids=(0,), kv_heads=2, head_dim=head_dim, dtype=dtype), 4, 16)


def test_auto_falls_back_to_torch_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        backend = build_attention(EngineConfig("m"), pool_of(head_dim=12), 4, 1.0)
    assert isinstance(backend, TorchAttention)
    assert "cpu cannot run" in caplog.text


def test_a_flashinfer_without_sinks_is_refused_by_name(
    stand_in: Any, caplog: pytest.LogCaptureFixture
) -> None:
    del stand_in.BatchAttentionWithAttentionSinkWrapper
    pool = pool_of(64, torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        backend = build_attention(EngineConfig("m", device="cuda"), pool, 4, 1.0, sinks=True)
    assert isinstance(backend, TorchAttention)
    assert "has no attention sinks" in caplog.text
    with pytest.raises(ConfigError, match="has no attention sinks"):
        build_attention(EngineConfig("m", device="cuda", attention="flashinfer"), pool, 4, 1.0, sinks=True)


def test_a_flashinfer_without_metadata_of_plans_is_refused_by_name(
    stand_in: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pool = MLAKVCache(LatentGroupSpec((0,), 512, 64, torch.bfloat16), 4, 16)
    layer = [AttentionLayer(layer=0, query_heads=16, scale=1.0, window=None)]
    config = EngineConfig("m", device="cuda")
    assert isinstance(build_latent(config, pool, layer), FlashInferLatentAttention)
    del stand_in.mla.MLAPlanMetadata
    with caplog.at_level(logging.WARNING):
        assert isinstance(build_latent(config, pool, layer), TorchLatentAttention)
    assert "MLAPlanMetadata" in caplog.text


@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
def test_plain_torch_does_not_wait_for_a_gpu(with_sinks: bool) -> None:
    """A prompt, and contexts with a chunk and a decode row, of keys and values and of latents."""
    lens = largest_lens(40, 40, 2)
    with FakeCuda():
        pool = MHAKVCache(KVGroupSpec((0,), 2, 16, torch.bfloat16), 8, 16, "cuda")
        latents = MLAKVCache(LatentGroupSpec((0,), 32, 8, torch.bfloat16), 8, 16, "cuda")
        heads, latent = TorchAttention(pool, 4, 1.0), TorchLatentAttention(latents, 4, 1.0)
        indexed = MLAKVCache(LatentGroupSpec((0,), 32, 8, torch.bfloat16, index_dim=16), 8, 16, "cuda")
        sparse = TorchSparseAttention(indexed, 4, 1.0, TokenChoice(12))
        made = partial(torch.zeros, dtype=torch.bfloat16, device="cuda")
        q, kv, out = made(sum(lens), 4, 16), made(sum(lens), 2, 16), made(sum(lens), 4, 16)
        sinks = made(4) if with_sinks else None
        for context in (None, 100):
            batch = largest_batch(fake_spec(256), lens, 16, context)
            heads.prepare(batch)
            heads.forward(0, q, kv, kv, out, sinks)
            latent.prepare(batch)
            queries, new = made(sum(lens), 4, 40).split((32, 8), -1), made(sum(lens), 40).split((32, 8), -1)
            latent.forward(0, *queries, *new, made(sum(lens), 4, 32))
            sparse.prepare(batch)
            scored = IndexInputs(made(sum(lens), 3, 16), made(sum(lens), 16), made(sum(lens), 3).float())
            sparse.select(0, scored)
            sparse.forward(0, *queries, *new, made(sum(lens), 4, 32))


@pytest.mark.parametrize(
    ("attention", "head_dim", "problem"),
    [("cpu", 12, "cannot run"), ("flashinfer", 16, "does not run on device cpu")],
)
def test_a_backend_that_was_named_runs_or_is_refused(attention: str, head_dim: int, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        build_attention(EngineConfig("m", attention=attention), pool_of(head_dim), 4, 1.0)
    assert refused.value.key == "attention_backend"


def test_on_cuda_float32_takes_torch_and_a_named_flashinfer_is_refused() -> None:
    config = EngineConfig("m", device="cuda", attention="auto")
    assert isinstance(build_attention(config, pool_of(), 4, 1.0), TorchAttention)
    with pytest.raises(ConfigError, match="float16 and bfloat16"):
        build_attention(EngineConfig("m", device="cuda", attention="flashinfer"), pool_of(), 4, 1.0)
