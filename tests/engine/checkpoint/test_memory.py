"""The memory of a loading process: never much more than the weights that it ends with."""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from engine.config import EngineConfig
from engine.cpu.op import current_isa
from engine.loader import load_model
from tests.harness.fork import FORKSERVER
from tests.support.quantised_checkpoints import FORMATS, scaled

SHARD_MIB = 48
ELEMENTS_AT_ONCE = 1 << 18  # of a weight that are in float32 at the same time
SLACK_MIB = 24  # of what PyTorch, transformers and the allocator keep
SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A bfloat16 model in shards, and the MiB of its weights."""
    path = tmp_path_factory.mktemp("sharded") / "model"
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE), dtype=torch.bfloat16)
    made.save_pretrained(path, max_shard_size=SHARD_MIB * 2**20)
    assert len(list(path.glob("*.safetensors"))) > 5
    return path, sum(p.numel() * 2 for p in made.parameters()) / 2**20


def memory_of_loading(path: Path, linear: str, tmp_path: Path) -> dict[str, float]:
    """MiB beyond what a process has that has already loaded a tiny model."""
    tiny = tmp_path / "tiny"
    AutoModelForCausalLM.from_config(LlamaConfig(**{**SHAPE, "hidden_size": 64, "num_hidden_layers": 1})).to(
        torch.bfloat16
    ).save_pretrained(tiny)
    told, telling = FORKSERVER.Pipe(duplex=False)
    process = FORKSERVER.Process(target=_load, args=(path, tiny, linear, telling), daemon=True)
    process.start()
    telling.close()
    with told:
        assert told.poll(120.0)
        measured: dict[str, float] = told.recv()
    process.join(10.0)
    return measured


def _load(path: Path, tiny: Path, linear: str, telling: Connection) -> None:
    torch.set_num_threads(1)
    load_model(EngineConfig(str(tiny), linear="torch"))  # whatever is imported and compiled at a first load
    Path("/proc/self/clear_refs").write_text("5")  # peaks begin again
    before = _mib("VmRSS")
    loaded = load_model(EngineConfig(str(path), linear=linear))
    telling.send({"peak": _mib("VmHWM") - before, "after": _mib("VmRSS") - before})
    del loaded


def _mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


@pytest.mark.slow
@pytest.mark.parametrize("linear", ["torch", "auto"])
def test_loading_takes_less_than_weights_and_one_shard(
    linear: str, model: tuple[Path, float], tmp_path: Path
) -> None:
    """With `auto`, weights are rearranged where the CPU can use that."""
    path, weights = model
    measured = memory_of_loading(path, linear, tmp_path)
    assert measured["after"] > 0.9 * weights
    assert measured["peak"] < weights + SHARD_MIB + SLACK_MIB, measured


@pytest.fixture(scope="module")
def in_fp8(model: tuple[Path, float], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with its layers in fp8."""
    path, _ = model
    quantised = tmp_path_factory.mktemp("fp8")
    _, quantise = FORMATS["fp8"][0], scaled(".weight_scale_inv", (128, 128))
    source = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    tensors = {}
    for name, weight in source.state_dict().items():
        if name.endswith("proj.weight"):
            parts, _ = quantise(weight.float().numpy())
            tensors |= {name.removesuffix(".weight") + suffix: part for suffix, part in parts.items()}
        else:
            tensors[name] = weight
    save_file(tensors, quantised / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return quantised


@pytest.mark.slow
def test_dequantising_takes_less_than_weights_and_what_is_being_dequantised(
    model: tuple[Path, float], in_fp8: Path, tmp_path: Path
) -> None:
    """Four threads read at once. Each has a stored weight of 4 MiB, the result of 8 MiB, and a block of rows
    in float32 in a few steps; the allocator keeps some of what each thread has freed."""
    _, weights = model
    measured = memory_of_loading(in_fp8, "torch", tmp_path)
    at_once = 4 * ((4 + 8) * 2**20 + 4 * 4 * ELEMENTS_AT_ONCE) / 2**20
    assert measured["after"] > 0.9 * weights
    assert measured["peak"] < weights + at_once + 2 * SLACK_MIB, measured


@pytest.mark.slow
def test_weights_that_stay_stored_are_never_dequantised_at_once(in_fp8: Path, tmp_path: Path) -> None:
    """Each has a copy in a pack before it is freed: those of one layer."""
    if current_isa() == "base":
        pytest.skip("this CPU has no AVX2: weights are dequantised")
    stored = (in_fp8 / "model.safetensors").stat().st_size / 2**20
    measured = memory_of_loading(in_fp8, "auto", tmp_path)
    assert measured["after"] > 0.9 * stored
    assert measured["peak"] < stored * (1 + 1 / SHAPE["num_hidden_layers"]) + 2 * SLACK_MIB, measured
