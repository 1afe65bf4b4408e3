"""Swapped models against transformers: within bfloat16's own rounding, and untouched in float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.batch import ForwardBatch
from engine.config import EngineConfig
from engine.cpu.attention import CpuAttention
from engine.cpu.decoder import FusedDecoder
from engine.cpu.linear import PackedLinear, check_packable
from engine.cpu.op import KernelsUnavailable, kernels, set_isa
from engine.loader import load_model
from engine.paged_cache import PagedCache
from kvcache.pool import MHAKVCache
from tests.support.tiny_models import FAMILIES, VOCAB_SIZE, make_tiny

try:
    check_packable()
except KernelsUnavailable as error:
    pytest.skip(f"no packed products: {error}", allow_module_level=True)
ISAS = ["avx512", "amx"][: kernels().baton_detected_isa() - 1]
FUSED = ("llama", "llama_yarn", "mistral", "qwen2", "qwen3")
PAGE = 16


@pytest.fixture(params=ISAS)
def isa(request):
    set_isa(request.param)
    yield request.param
    set_isa("amx")


def packed_batch(ids, firsts, lasts):
    """New tokens [first, last) of each sequence; sequence s has pages s * 16 + 1, ..."""
    table = np.arange(len(firsts) * 16, dtype=np.int32).reshape(len(firsts), 16) + 1
    positions = [np.arange(first, last) for first, last in zip(firsts, lasts, strict=True)]
    slots = [table[s, at // PAGE].astype(np.int64) * PAGE + at % PAGE for s, at in enumerate(positions)]
    lengths = np.array(lasts, np.int32)
    return ForwardBatch(
        np.concatenate([ids[s, at] for s, at in enumerate(positions)]),
        np.concatenate(positions),
        np.concatenate(slots),
        np.arange(1, len(firsts) + 1, dtype=np.int32),
        lengths - np.array(firsts, np.int32),
        lengths,
        table,
        np.zeros(0, np.int32),
        [],
    )


@torch.inference_mode()
def teacher_forced(loaded, ids):
    """Logits [sequence, token, vocab] by a packed prefill, mixed chunks and decode steps."""
    pool = MHAKVCache(loaded.spec.groups[0], 16 * len(ids), PAGE)
    attention = CpuAttention(pool, loaded.query_heads, loaded.scale)
    decoder = loaded.model.model
    total = ids.shape[1]
    logits = torch.empty(len(ids), total, VOCAB_SIZE)
    # One starts with all but a few tokens, the other with a few: then chunk and decode rows are in one pack.
    ends = [[total - 6, 3], [total - 5, total - 40], *([total - 4 + i, total - 39 + i] for i in range(4))]
    ends.append([total, total])
    firsts = [0, 0]
    for lasts in ends:
        active = [s for s in range(2) if lasts[s] > firsts[s]]
        assert active == list(range(len(active)))
        batch = packed_batch(ids, [firsts[s] for s in active], [lasts[s] for s in active])
        attention.prepare(batch)
        hidden = decoder(
            input_ids=torch.from_numpy(batch.input_ids)[None],
            position_ids=torch.from_numpy(batch.positions)[None],
            past_key_values=PagedCache(),
            use_cache=False,
            paged=attention,
        ).last_hidden_state
        rows = loaded.model.lm_head(hidden)[0].float()
        starts = batch.starts()
        for s in active:
            logits[s, firsts[s] : lasts[s]] = rows[starts[s] : starts[s + 1]]
            firsts[s] = lasts[s]
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_within_transformers_own_rounding(family, isa, tmp_path):
    path = make_tiny(family, tmp_path, 3)
    ids = np.random.default_rng(0).integers(0, 256, (2, 120))
    with torch.inference_mode():
        exact, rounded = (
            AutoModelForCausalLM.from_pretrained(path, dtype=dtype)(torch.from_numpy(ids)).logits.float()
            for dtype in (torch.float32, torch.bfloat16)
        )
    loaded = load_model(EngineConfig(str(path), dtype="bfloat16"))
    assert isinstance(loaded.model.model, FusedDecoder) == (family in FUSED)
    assert isinstance(loaded.model.lm_head, PackedLinear)
    ours, theirs = (teacher_forced(loaded, ids) - exact).abs(), (rounded - exact).abs()
    assert ours.mean() <= 1.5 * theirs.mean()
    assert ours.max() <= 1.5 * theirs.max()


def test_float32_keeps_transformers_modules(tmp_path):
    loaded = load_model(EngineConfig(str(make_tiny("qwen3", tmp_path, 0)), dtype="float32"))
    assert loaded.swapped == {}


@pytest.mark.parametrize(
    "options", [{"attention": "torch"}, {"linear": "torch"}], ids=["torch_attention", "torch_linear"]
)
def test_the_fused_decoder_needs_both_cpu_backends(options, tmp_path):
    path = str(make_tiny("qwen3", tmp_path, 0))
    loaded = load_model(EngineConfig(path, dtype="bfloat16", **options))
    assert not isinstance(loaded.model.model, FusedDecoder)
    assert ("Linear" in loaded.swapped) == ("linear" not in options)
