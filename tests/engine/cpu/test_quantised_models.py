"""Whole models over quantised pools: what they compute, what memory they take, how an option is refused."""

from __future__ import annotations

import sys
import types
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.errors import ConfigError
from common.options import parse_options
from engine.backends.choose import build_attention
from engine.backends.flashinfer import FlashInferAttention
from engine.backends.latent_choose import build_latent
from engine.batch import ForwardBatch
from engine.config import EngineConfig
from engine.cpu.decoder import FusedDecoder
from engine.loader import AttentionLayer, load_model
from engine.runner import ModelRunner
from kvcache.layout import KVGroupSpec, LatentGroupSpec, StateGroupSpec
from kvcache.open_pool import open_pool
from kvcache.pool import MambaPool, MHAKVCache, MLAKVCache
from kvcache.quant import KVFormat
from tests.support.driver import STATE_SLOTS, Driver
from tests.support.oracle import pairwise
from tests.support.tiny_configs import MIXED
from tests.support.tiny_models import make_tiny, write_tiny
from worker.options import WorkerOptions

FORMATS = [form for form in KVFormat if form is not KVFormat.AUTO]
FAMILIES = ["qwen3", "gemma3_text", "gpt_oss", "deepseek_v2", "qwen3_next"]
"""Full, windowed, windowed with sinks, latent, and full beside states."""
PAGE_SIZE = 16
PROMPT = np.random.default_rng(5).integers(0, 256, 90).tolist()


def make_model(family: str, directory: Path) -> Path:
    """The tiny model, its latents made as wide as fp4 needs them: rows of whole blocks."""
    if not family.startswith("deepseek"):
        return make_tiny(family, directory, 0)
    config = MIXED[family]()
    config.kv_lora_rank = 40
    path = directory / f"{family}-rank40"
    if not path.is_dir():
        write_tiny(config, path, 0)
    return path


def open_quantised(path: Path, form: str, num_pages: int, **options):
    """A runner, and its pools by name; keys and values that nobody wrote are NaN, or of fp4 some number."""
    config = EngineConfig(str(path), kv_cache_dtype=form, overlap=False, **options)
    loaded = load_model(config)
    pools = {}
    for spec in loaded.spec.groups:
        if isinstance(spec, StateGroupSpec):
            pools[spec.name] = MambaPool(spec, STATE_SLOTS)
        else:
            pools[spec.name] = open_pool(spec, num_pages, PAGE_SIZE)
            pools[spec.name].bytes.fill_(127)
    return ModelRunner(loaded, pools, config), pools


def logits_of(runner, chunks, driver=None):
    """After every token of PROMPT, computed in chunks."""
    driver = driver or Driver(runner, 40, PAGE_SIZE)
    lane = driver.add(PROMPT)
    parts = []
    with torch.inference_mode():
        for chunk in chunks:
            batch = driver.batch([(lane, chunk)])
            parts.append(runner.logits(batch, np.arange(chunk)).float())
    return torch.cat(parts)


CHUNKS = {"whole": [90], "chunks": [7, 16, 41, 26], "decode": [60, *[1] * 30]}


@lru_cache(maxsize=4)
def plain_logits(path, attention):
    """Of CHUNKS["whole"], over a pool that is not quantised."""
    return logits_of(open_quantised(path, "auto", 40, attention=attention)[0], CHUNKS["whole"])


@pytest.mark.parametrize(
    ("family", "attention", "form"),
    [
        row
        for row in pairwise([*FAMILIES, "deepseek_v32", "minimax_m3_vl_text"], ["torch", "cpu"], FORMATS)
        # which are refused
        if row.values[:1] not in {("deepseek_v32",), ("minimax_m3_vl_text",)}
        or row.values[1:] != ("cpu", KVFormat.FP4_E2M1)
    ],
)
def test_the_current_chunk_is_read_back_as_stored(family, attention, form, tmp_path_factory):
    """However a prompt is cut, every token sees the same stored values: logits differ by rounding only, not
    by what quantising costs."""
    path = make_model(family, tmp_path_factory.getbasetemp())
    plain = plain_logits(path, attention)
    runner, _ = open_quantised(path, form, 40, attention=attention)
    driver, cost = Driver(runner, 40, PAGE_SIZE), None  # each way has pages of its own
    for chunks in CHUNKS.values():
        got = logits_of(runner, chunks, driver)
        if cost is None:
            whole, cost = got, (got - plain).abs().mean()
            assert cost > 1e-4, "nothing was quantised"
        assert (got - whole).abs().mean() < 0.02 * cost


@pytest.mark.parametrize("form", FORMATS)
def test_the_fused_decoder_runs_over_a_quantised_pool(form, tmp_path):
    path = make_tiny("qwen3", tmp_path, 0)
    fused, fused_pools = open_quantised(path, form, 40, dtype="bfloat16")
    assert isinstance(fused.forward.decoder, FusedDecoder)
    reference, reference_pools = open_quantised(
        path, form, 40, dtype="bfloat16", attention="torch", linear="torch"
    )
    plain = logits_of(open_quantised(path, "auto", 40, dtype="float32")[0], CHUNKS["decode"])
    errors = [(logits_of(runner, CHUNKS["decode"]) - plain).abs().mean() for runner in (fused, reference)]
    assert errors[0] < 1.3 * errors[1]
    same = fused_pools["full"].bytes == reference_pools["full"].bytes
    assert same.float().mean() > 0.9, "it stored other values"


@pytest.mark.covering
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", FORMATS)
def test_a_loaded_model_has_the_bytes_per_token_of_its_dtype(form, family, tmp_path):
    path = str(make_model(family, tmp_path))
    share = 9 / 32 if form is KVFormat.FP4_E2M1 else 1 / 2
    plain, small = (
        load_model(EngineConfig(path, dtype="bfloat16", kv_cache_dtype=name)).spec.groups
        for name in ("auto", form)
    )
    for before, after in zip(plain, small, strict=True):
        kept = 1 if after.kind == "state" else share
        assert after.page_bytes(PAGE_SIZE) == before.page_bytes(PAGE_SIZE) * kept


class LargestTensor(TorchDispatchMode):
    """The bytes of the largest tensor that an operation inside it gave; the pools do not count."""

    def __init__(self, known) -> None:
        super().__init__()
        self.nbytes = 0
        self._known = {pool.bytes.untyped_storage().data_ptr() for pool in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in self._known:
                self.nbytes = max(self.nbytes, made.untyped_storage().nbytes())
        return result


@pytest.mark.covering
@pytest.mark.parametrize("attention", ["torch", "cpu"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "deepseek_v2"])
@pytest.mark.parametrize("form", FORMATS)
def test_no_copy_of_the_cache_is_made(form, family, attention, tmp_path):
    """A chunk and a decode step of a short sequence in a large pool.

    The torch reference dequantises the pages of one sequence and layer, at most 4 bytes a value; the C++ op
    none (its own memory: test_quantised.py).
    """
    path = make_model(family, tmp_path)
    runner, pools = open_quantised(path, form, 20_000, attention=attention)
    [layer_values] = {
        2 * spec.kv_heads * spec.head_dim if isinstance(spec, KVGroupSpec) else spec.row_dim
        for spec in runner.spec.groups
        if isinstance(spec, KVGroupSpec | LatentGroupSpec)
    }
    driver = Driver(runner, 20_000, PAGE_SIZE)
    lane = driver.add(PROMPT * 20)
    known = list(pools.values())
    made = LargestTensor(known)
    with torch.inference_mode():
        runner.logits(driver.batch([(lane, 1160)]), np.array([1159]))
        for chunk in (40, 1):
            batch = driver.batch([(lane, chunk)])
            with made:
                runner.logits(batch, np.array([chunk - 1]))
    weights = max(weight.untyped_storage().nbytes() for weight in runner.forward.decoder.parameters())
    heads = 4  # latent attention: scores of every head, in the reference alone
    allowed = max(weights, 4 * layer_values * 1216 * (heads if family == "deepseek_v2" else 1))
    if attention == "cpu":
        allowed = max(weights, 4 * 1201)
    assert made.nbytes <= allowed
    assert made.nbytes < min(pool.bytes.nbytes for pool in known) / 20
    assert lane.done == 1201


def test_an_unknown_dtype_lists_the_valid_ones():
    with pytest.raises(ConfigError, match=r"kv_cache_dtype.*'int3'.*auto, fp8_e4m3, fp8_e5m2, fp4_e2m1"):
        EngineConfig("m", kv_cache_dtype="int3")
    with pytest.raises(ConfigError, match=r"kv_cache_dtype.*'auto', 'fp8_e4m3', 'fp8_e5m2' or 'fp4_e2m1'"):
        parse_options(WorkerOptions, {"model": "m", "kv_cache_dtype": "int3"})
    assert (
        parse_options(WorkerOptions, {"model": "m", "kv_cache_dtype": "fp4_e2m1"}).kv_cache_dtype
        == "fp4_e2m1"
    )


def pool_of(form, kind=KVGroupSpec):
    """A small pool of bfloat16 keys and values, or of latents."""
    if kind is LatentGroupSpec:
        return MLAKVCache(LatentGroupSpec((0,), 512, 64, torch.bfloat16, stored=KVFormat(form)), 2, PAGE_SIZE)
    return MHAKVCache(KVGroupSpec((0,), 2, 32, torch.bfloat16, stored=KVFormat(form)), 2, PAGE_SIZE)


def test_what_flashinfer_cannot_read_is_refused_by_name():
    config = EngineConfig("m", device="cuda", attention="flashinfer")
    with pytest.raises(ConfigError, match="FlashInfer does not read fp4_e2m1 pages"):
        build_attention(config, pool_of("fp4_e2m1"), 4, 1.0)
    with pytest.raises(ConfigError, match="FlashInfer does not read fp8_e4m3 pages with sinks"):
        build_attention(config, pool_of("fp8_e4m3"), 4, 1.0, sinks=True)
    layer = AttentionLayer(0, 4, 1.0, None)
    with pytest.raises(ConfigError, match="FlashInfer does not read fp8_e5m2 latents"):
        build_latent(config, pool_of("fp8_e5m2", LatentGroupSpec), [layer])


def test_flashinfer_is_told_that_pages_are_fp8_and_queries_are_not(monkeypatch):
    seen = {}

    class Wrapper:
        def __init__(self, workspace, **_):
            pass

        def plan(self, *_, **planned):
            seen.update(planned)

        def run(self, q, kv, out):
            seen["kv"] = kv
            out.copy_(q)

    module = types.ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    pool = pool_of("fp8_e4m3")
    backend = FlashInferAttention(pool, 4, 1.0)
    backend.prepare(one_token())
    k, v = torch.randn(2, 1, 2, 32).bfloat16()
    q = torch.zeros(1, 4, 32).bfloat16()
    backend.forward(0, q, k, v, torch.empty_like(q))
    assert (seen["q_data_type"], seen["kv_data_type"]) == (torch.bfloat16, torch.float8_e4m3fn)
    assert seen["kv"][0].dtype == torch.float8_e4m3fn
    assert torch.equal(seen["kv"][0][1, :, 0].float(), k[0].to(torch.float8_e4m3fn).float())
    assert torch.equal(seen["kv"][1][1, :, 0].float(), v[0].to(torch.float8_e4m3fn).float())


def one_token():
    """The first token of a sequence on page 1."""
    return ForwardBatch(
        input_ids=np.zeros(1, np.int64), positions=np.zeros(1, np.int64), out_slots=np.array([PAGE_SIZE]),
        rows=np.ones(1, np.int32), q_lens=np.ones(1, np.int32), seq_lens=np.ones(1, np.int32),
        page_table=np.ones((1, 1), np.int32), sampled=np.zeros(0, np.int32), sampling=[],
    )  # fmt: skip
