"""The fused decoder over FlashInfer's operators computes what transformers' layers do. The operators are
stand-ins by FlashInfer's manual, bound to its signatures."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from engine.argmax import finite_rows
from engine.backends.decode_attention import DecodeAttention
from engine.backends.flashinfer import FlashInferAttention
from engine.batch import ForwardBatch, PooledPrompt, ScoredPrompt
from engine.config import EngineConfig
from engine.cuda import triton_kernels
from engine.cuda.decoder import FlashInferDecoder, fusible
from engine.graphs import DecodeLimits
from engine.loader import LoadedModel, load_model
from engine.module_replacements import replacement_table
from engine.ranks.messages import LoadPart
from engine.ranks.pools import own_part
from engine.ranks.rank import ModelPart
from engine.replacement_table import apply_replacements
from engine.runner import ModelRunner
from kvcache.layout import KVGroupSpec
from tests.engine.conftest import PROMPTS
from tests.engine.test_not_finite import poison
from tests.support.driver import Driver, pools_of
from tests.support.eager_recorder import EagerRecorder
from tests.support.flashinfer_stand_in import flashinfer_layers, flashinfer_module
from tests.support.rank_rig import spread_pool
from tests.support.reference import reference_answers
from tests.support.thread_ranks import ThreadRanks, two_groups
from tests.support.tiny_configs import FAMILIES
from tests.support.tiny_models import make_tiny
from tests.support.wide_models import DENSE, MIXTURES, make_wide

OUTPUTS = 16


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    package, mla = flashinfer_module()
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", mla)


def load(path: Path, dtype: str = "float32") -> tuple[LoadedModel, EngineConfig]:
    config = EngineConfig(str(path), dtype=dtype, attention="torch", linear="torch", overlap=False)
    return load_model(config), config


def fused(loaded: LoadedModel) -> FlashInferDecoder:
    prefix = loaded.model.base_model_prefix
    decoder = FlashInferDecoder(getattr(loaded.model, prefix))
    setattr(loaded.model, prefix, decoder)
    return decoder


@pytest.fixture(params=[False, True], ids=["flashinfer", "own"])
def own(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether recorded steps are computed by our kernels' definitions."""
    monkeypatch.setattr(triton_kernels, "available", lambda: request.param)
    monkeypatch.setattr("engine.backends.decode_attention.DTYPES", (torch.float32,))
    return bool(request.param)


def check_recorded(runner: ModelRunner, path: Path) -> EagerRecorder:
    """Its tokens, with recorded decode steps, are generate's."""
    recorder = EagerRecorder()
    runner.record_decode(DecodeLimits(sequences=3, context_pages=10, rows=8), recorder)
    driver = Driver(runner, 40, 16)
    lanes = [driver.add(prompt) for prompt in PROMPTS]
    driver.generate(lanes, OUTPUTS, chunk=30, stagger=4)
    runner.close()
    expected = [answer.tokens for answer in reference_answers(path, PROMPTS, OUTPUTS)]
    assert [lane.outputs for lane in lanes] == expected
    return recorder


def check_tokens(path: Path, own: bool) -> None:
    """In chunks beside decode rows, and in recorded decode steps, of one row at the end."""
    loaded, config = load(path)
    fused(loaded)
    pools = pools_of(loaded, 16, 40)
    runner = ModelRunner(loaded, pools, config)
    runner.forward.attention = flashinfer_layers(loaded, pools)
    assert isinstance(runner.attention.fixed(1, 1).full, DecodeAttention if own else FlashInferAttention)
    recorder = check_recorded(runner, path)
    assert sum(step.replays for step in recorder.steps) > OUTPUTS
    assert next(step for step in recorder.steps if len(step.outputs.tokens) == 1).replays


@pytest.mark.parametrize("family", [*DENSE, *MIXTURES])
def test_tokens_in_float32_equal_generate(family: str, own: bool, tmp_path: Path) -> None:
    check_tokens(make_wide(family, tmp_path, 5), own)


def test_so_they_do_with_biases(own: bool, tmp_path: Path) -> None:
    config: Any = FAMILIES["llama"]()
    config.head_dim, config.attention_bias = 64, True
    torch.manual_seed(5)
    model: Any = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("proj.bias"):
            nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    check_tokens(tmp_path, own)


@pytest.mark.covering
@pytest.mark.parametrize("family", ["qwen3", "qwen2_moe"])
def test_tokens_of_two_ranks_equal_generate(family: str, own: bool, tmp_path: Path) -> None:
    """Each with the fused decoder over its part, in recorded steps, too."""
    path = make_wide(family, tmp_path, 5)
    config = EngineConfig(str(path), dtype="float32", attention="torch", linear="torch", overlap=False)
    groups = two_groups()
    first, second = (load_model(config, group) for group in groups)
    whole = {
        spec.name: spread_pool(spec, 2, 40, 16) for spec in first.spec.groups if isinstance(spec, KVGroupSpec)
    }
    pools = [own_part(whole, group) for group in groups]
    for loaded in (first, second):
        fused(loaded)
    rank = ModelPart(second, pools[1], LoadPart(config, 1, 2), groups[1])
    rank.forward.attention = flashinfer_layers(second, pools[1])
    ranks = ThreadRanks(groups[0], rank)
    runner = ModelRunner(first, pools[0], config, ranks=ranks)
    runner.forward.attention = flashinfer_layers(first, pools[0])
    recorder = check_recorded(runner, path)
    replays = [[step.replays for step in one.steps] for one in (recorder, ranks.recorder)]
    assert replays[0] == replays[1]
    assert all(replays[0])


def runner_of(path: Path) -> tuple[ModelRunner, Any]:
    """A runner with a fused decoder, and its pool without garbage."""
    loaded, config = load(path)
    fused(loaded)
    pools = pools_of(loaded, 16, 60)
    runner = ModelRunner(loaded, pools, config)
    runner.forward.attention = flashinfer_layers(loaded, pools)
    pools["full"].bytes.zero_()
    return runner, pools["full"]


def hidden_of(runner: ModelRunner, batch: ForwardBatch) -> torch.Tensor:
    with torch.inference_mode():
        return runner.forward.of_batch(batch, torch.from_numpy(batch.input_ids))


def reading(batch: ForwardBatch, sampled: list[int], scored: list[int], pooled: list[int]) -> ForwardBatch:
    return replace(
        batch,
        sampled=np.array(sampled, np.int32),
        scored=tuple(ScoredPrompt(i, np.zeros(0, np.int64), 0) for i in scored),
        pooled=tuple(PooledPrompt(i, 0) for i in pooled),
    )


@pytest.mark.parametrize("family", ["qwen3", "qwen2_moe"])
@pytest.mark.parametrize(
    ("counts", "sampled", "scored", "pooled"),
    [
        ([40], [], [], []),
        ([40], [0], [], []),
        ([1], [], [], []),
        ([1, 33, 2], [0, 2], [], []),
        ([1, 40, 20, 30], [0, 2], [1], []),
        ([30, 25], [], [], [1]),
    ],
)
def test_of_the_last_layer_only_what_is_read_is_computed(
    family: str, counts: list[int], sampled: list[int], scored: list[int], pooled: list[int], tmp_path: Path
) -> None:
    """And K and V of all."""
    path = make_wide(family, tmp_path, 3)
    (some, pool), (every, whole) = runner_of(path), runner_of(path)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 256, count + 7).tolist() for count in counts]
    drivers = Driver(some, 60, 16), Driver(every, 60, 16)
    batches = []
    for driver, runner in zip(drivers, (some, every), strict=True):
        lanes = [driver.add(prompt) for prompt in prompts]
        hidden_of(runner, driver.batch([(lane, 7) for lane in lanes]))
        batches.append(driver.batch(list(zip(lanes, counts, strict=True))))
    computed: list[int] = []
    last = some.forward.decoder.mlps[-1]
    last.register_forward_hook(lambda _, given, __: computed.append(given[0].shape[1]))
    result = hidden_of(some, reading(batches[0], sampled, scored, pooled))
    wanted = hidden_of(every, reading(batches[1], [], [], list(range(len(counts)))))
    some.close()
    every.close()
    reads = reading(batches[0], sampled, scored, pooled).read_rows()
    read = np.arange(sum(counts)) if reads is None else reads.rows
    assert computed == ([len(read)] if len(read) else [])
    assert torch.allclose(result[read], wanted[read], atol=1e-5)
    assert not result[np.setdiff1d(np.arange(sum(counts)), read)].any()
    assert torch.equal(pool.bytes, whole.bytes)


@pytest.mark.parametrize("part", ["k_proj", "v_proj"])
def test_keys_and_values_that_are_not_finite_are_seen_in_rows_that_are_not_read(
    part: str, tmp_path: Path
) -> None:
    path = make_wide("llama", tmp_path, 0)
    weights = load_file(path / "model.safetensors")
    name = sorted(each for each in weights if each.endswith(f"{part}.weight"))[-1]
    weights[name][3] = torch.inf
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    runner, _ = runner_of(path)
    driver = Driver(runner, 60, 16)
    result = driver.step([(driver.add(PROMPTS[2]), 30)])
    runner.close()
    assert list(result.failures) == [0]
    assert len(result.tokens) == 0


def test_a_chunk_without_a_sample_keeps_a_bad_sequence_apart(tmp_path: Path) -> None:
    runner, _ = runner_of(make_wide("llama", tmp_path, 0))
    poison(runner, 300, torch.nan)
    driver = Driver(runner, 60, 16)
    good, bad = driver.add(PROMPTS[2]), driver.add([1, 2, 300, *PROMPTS[2]])
    finite = finite_rows(hidden_of(runner, driver.batch([(good, 30), (bad, 30)]))).tolist()
    runner.close()
    assert all(finite[:30])
    assert not any(finite[32:])


def on_cuda(path: Path, dtype: torch.dtype, linear: str = "auto") -> dict[str, int]:
    """What is replaced of a model in `path` on CUDA."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    config = EngineConfig(str(path), device="cuda", linear=linear)
    replaced = apply_replacements(model, config, replacement_table(config, set()))
    assert isinstance(model.model, FlashInferDecoder) == bool(replaced)
    return replaced


def test_what_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_wide("qwen3", tmp_path, 0)
    assert on_cuda(path, torch.bfloat16) == {"Qwen3Model": 1}
    assert on_cuda(path, torch.float32) == {}
    assert on_cuda(path, torch.bfloat16, "torch") == {}
    assert on_cuda(make_tiny("qwen3", tmp_path, 0), torch.bfloat16) == {}, "no kernels for heads of 16"
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert on_cuda(path, torch.bfloat16) == {}


def test_what_it_does_not_compute_stays(tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(make_wide("llama", tmp_path, 0)).model
    assert fusible(model)
    mlp = model.layers[1].mlp
    act, up = mlp.act_fn, mlp.up_proj
    mlp.act_fn = nn.ReLU()
    assert not fusible(model)
    mlp.act_fn, mlp.up_proj = act, nn.Linear(up.in_features, up.out_features)
    assert not fusible(model), "its MLP has a bias"
    mlp.up_proj = up
    model.config.head_dim = 80
    assert not fusible(model)
