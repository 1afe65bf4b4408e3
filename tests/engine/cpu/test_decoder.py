"""The fused decoder computes the last layer for the rows that are read alone, and writes K and V of all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.argmax import finite_rows
from engine.batch import ForwardBatch, PooledPrompt, ScoredPrompt
from engine.cpu.decoder import FusedDecoder
from engine.cpu.op import machine_isas, set_isa
from engine.runner import ModelRunner
from tests.engine.conftest import PROMPTS, Drawn
from tests.engine.test_not_finite import poison
from tests.support.cpu_kernels import packing_isas
from tests.support.driver import Driver, open_pools
from tests.support.tiny_configs import GEMMA4_SIZES, MIXED, SIMILAR
from tests.support.tiny_models import write_tiny

ISAS = packing_isas()
PAGE, PAGES = 16, 60
REVERSED = {"gemma3_text": "layer_types", "hy_v3": "mlp_layer_types"}
"""Family -> a list of its config, of its layers, that is turned round here."""


@pytest.fixture(
    params=[*(pytest.param(other, marks=pytest.mark.oracle_full) for other in ISAS[:-1]), ISAS[-1]]
)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    set_isa(request.param)
    yield request.param
    set_isa(machine_isas()[-1])


def fused(path: Path, weight_dtype: str = "auto") -> tuple[ModelRunner, list[Any]]:
    """A runner with a fused decoder, and its pools without garbage."""
    runner, pools = open_pools(
        path, PAGE, PAGES, dtype="bfloat16", attention="cpu", linear="packed", weight_dtype=weight_dtype
    )
    assert isinstance(runner.forward.decoder, FusedDecoder)
    for pool in pools.values():
        pool.bytes.zero_()
    return runner, list(pools.values())


def hidden_of(runner: ModelRunner, batch: ForwardBatch) -> torch.Tensor:
    with torch.inference_mode():
        return runner.forward.of_batch(batch, torch.from_numpy(batch.input_ids)).float()


@pytest.mark.parametrize(
    ("counts", "sampled", "scored", "pooled"),
    [
        ([40], [], [], []),
        ([40], [0], [], []),
        ([9, 33], [1], [], []),
        ([1] * 11 + [33], list(range(11)), [], []),  # more rows are read than few
        ([1, 40, 20, 30], [0, 2], [1], []),
        ([30, 25], [], [], [1]),
        ([300, 5], [0], [], []),  # the context of the one query is in several parts
    ],
)
@pytest.mark.parametrize(
    ("family", "weight_dtype"),
    # Gemma's sums are normed, and its layers are of two groups with rotations of their own. The last
    # one has the second, here. The MLPs of the others are computed outside: of llama_bias and Kolibri (whose
    # sums are normed) all, of GLM the last one, of Hunyuan all but the last, here.
    [
        *(("qwen3", "auto"), ("qwen3", "int8"), ("gemma3_text", "auto"), ("smollm3", "auto")),
        *(("llama_bias", "auto"), ("llama_bias", "int8"), ("kolibri1", "auto"), ("glm4_moe", "auto")),
        *(("hy_v3", "auto"), ("gpt_oss", "auto"), ("gemma4_dense", "auto"), ("gemma4_dense", "int8")),
        ("gemma4_mixture", "auto"),
    ],
)
def test_rows_that_are_read(
    isa: str,
    family: str,
    weight_dtype: str,
    counts: list[int],
    sampled: list[int],
    scored: list[int],
    pooled: list[int],
    drawn: Drawn,
    tmp_path: Path,
) -> None:
    if family in GEMMA4_SIZES:  # the last two layers of the dense one share keys and values
        path = tmp_path / "model"
        write_tiny(GEMMA4_SIZES[family](), path, 0)
    elif family in REVERSED:
        path, config = tmp_path / "model", {**MIXED, **SIMILAR}[family]()
        setattr(config, REVERSED[family], getattr(config, REVERSED[family])[::-1])
        write_tiny(config, path, 0)
    else:
        path, _ = drawn(family)
    (some, pools), (every, wholes) = fused(path, weight_dtype), fused(path, weight_dtype)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 256, count + 7).tolist() for count in counts]
    drivers = Driver(some, PAGES, PAGE), Driver(every, PAGES, PAGE)
    batches = []
    for driver, runner in zip(drivers, (some, every), strict=True):
        lanes = [driver.add(prompt) for prompt in prompts]
        hidden_of(runner, driver.batch([(lane, 7) for lane in lanes]))
        batches.append(driver.batch(list(zip(lanes, counts, strict=True))))
    reading = _reading(batches[0], sampled, scored, pooled)
    result = hidden_of(some, reading)
    wanted = hidden_of(every, _reading(batches[1], [], [], list(range(len(counts)))))
    ends = np.cumsum(counts)
    read = [
        token
        for i, (n, end) in enumerate(zip(counts, ends, strict=True))
        for token in range(end - n, end)
        if i in scored + pooled or (i in sampled and token == end - 1)
    ]
    # The sums of a query alone have another order than those of a chunk: what differs is rounding.
    assert torch.allclose(result[read], wanted[read], rtol=0.0, atol=0.03 * float(wanted.abs().max()))
    left = np.setdiff1d(np.arange(sum(counts)), read)
    assert not result[left].any()
    assert all(torch.equal(pool.bytes, whole.bytes) for pool, whole in zip(pools, wholes, strict=True))
    some.close()
    every.close()


def _reading(batch: Any, sampled: list[int], scored: list[int], pooled: list[int]) -> Any:
    nothing = np.zeros(0, np.int64)
    return replace(
        batch,
        sampled=np.array(sampled, np.int32),
        scored=tuple(ScoredPrompt(i, nothing, 0) for i in scored),
        pooled=tuple(PooledPrompt(i, 0) for i in pooled),
    )


@pytest.mark.parametrize(
    ("family", "part"), [("llama", "k_proj"), ("llama", "v_proj"), ("gemma4_dense", "k_proj")]
)
def test_keys_and_values_that_are_not_finite_are_seen_in_rows_that_are_not_read(
    isa: str, family: str, part: str, drawn: Drawn, tmp_path: Path
) -> None:
    """Those of the last layer that has some."""
    spoilt = tmp_path / "spoilt"
    if family in GEMMA4_SIZES:
        write_tiny(GEMMA4_SIZES[family](), spoilt, 0)
    else:
        shutil.copytree(drawn(family)[0], spoilt)
    weights = load_file(spoilt / "model.safetensors")
    layers = sorted(name for name in weights if name.endswith(f"{part}.weight"))
    weights[layers[-1]][3] = torch.nan
    save_file(weights, spoilt / "model.safetensors", {"format": "pt"})
    runner, _ = fused(spoilt)
    driver = Driver(runner, PAGES, PAGE)
    lane = driver.add(PROMPTS[2])
    result = driver.step([(lane, 30)])
    runner.close()
    assert list(result.failures) == [0]
    assert len(result.tokens) == 0


def test_a_chunk_without_a_sample_keeps_a_bad_sequence_apart(isa: str, drawn: Drawn) -> None:
    path, _ = drawn("llama")
    runner, _ = fused(path)
    poison(runner, 300, torch.nan)
    driver = Driver(runner, PAGES, PAGE)
    good, bad = driver.add(PROMPTS[2]), driver.add([1, 2, 300, *PROMPTS[2]])
    hidden = hidden_of(runner, driver.batch([(good, 30), (bad, 30)]))
    runner.close()
    finite = finite_rows(hidden).tolist()
    assert all(finite[:30])
    assert not any(finite[32:])


@pytest.mark.parametrize("sampled", [[], [1]])
def test_the_last_mlp_outside_computes_the_rows_that_are_read(sampled: list[int], drawn: Drawn) -> None:
    """Every other MLP computes all rows. Without rows the last one is not called."""
    runner, _ = fused(drawn("llama_bias")[0])
    rows: dict[str, int] = {}

    def note(layer: str, _mlp: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        rows[layer] = inputs[0].shape[1]

    for layer, mlp in runner.forward.decoder.outside.items():
        mlp.register_forward_pre_hook(partial(note, layer))
    driver = Driver(runner, PAGES, PAGE)
    lanes = [driver.add(list(range(9))), driver.add(list(range(5)))]
    batch = driver.batch(list(zip(lanes, (9, 5), strict=True)))
    hidden_of(runner, _reading(batch, sampled, [], []))
    assert rows == {"0": 14, "1": 14, **({"2": 1} if sampled else {})}
