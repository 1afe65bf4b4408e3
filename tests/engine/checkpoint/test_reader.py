"""Which tensors of a checkpoint are read as weights, and from which files."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from common.errors import ConfigError
from engine.checkpoint import reader
from engine.checkpoint.formats import stored_format
from engine.checkpoint.reader import QuantisedWeight, read_weights, weight_files
from engine.checkpoint.stored import StoredTensor
from engine.config import EngineConfig
from engine.loader import load_model
from tests.support.quantised_checkpoints import FORMATS, OF_ONE_FAMILY, write


def loaded_weights(path: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = load_model(
        EngineConfig(str(path), dtype="float32", linear="torch")
    ).model.state_dict()
    return weights


def rewrite(path: Path, **changes: Any) -> None:
    """Change settings in config.json; None removes one."""
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


@pytest.mark.parametrize("form", ["fp8", "awq", "ct_int4"])
def test_the_tensors_of_a_quantised_weight_are_not_weights_of_their_own(form: str, tmp_path: Path) -> None:
    stored, exact = write("llama", tmp_path, 0, form)
    config = AutoConfig.from_pretrained(stored)
    weights = read_weights(str(stored), stored_format(config), torch.float32, local=True, keep=False)
    assert weights.keys() == load_file(exact / "model.safetensors").keys()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("keep", [True, False])
def test_weights_stay_stored_if_asked(form: str, keep: bool, tmp_path: Path) -> None:
    stored, _ = write(OF_ONE_FAMILY.get(form, "llama"), tmp_path, 0, form)
    found = stored_format(AutoConfig.from_pretrained(stored))
    weights = read_weights(str(stored), found, torch.bfloat16, local=True, keep=keep)
    read = [each[...] for each in weights.values() if isinstance(each, QuantisedWeight)]
    assert read
    assert {isinstance(weight, StoredTensor) for weight in read} == {keep}
    assert {weight.dtype for weight in read} == {torch.bfloat16}


def test_a_model_that_says_quantised_and_is_not_is_loaded(tmp_path: Path) -> None:
    """A fine-tune may leave quantization_config behind: what counts is how its weights are stored."""
    _, exact = write("llama", tmp_path, 0, "fp8")
    theirs = loaded_weights(exact)
    rewrite(exact, quantization_config=FORMATS["fp8"][0])
    ours = loaded_weights(exact)
    assert all(ours[name].equal(theirs[name]) for name in theirs)


@pytest.mark.parametrize("form", ["fp8", "ct_int8"])
def test_numbers_without_quantization_config_are_refused(form: str, tmp_path: Path) -> None:
    """They would be loaded as weights from -448 to 448."""
    stored, _ = write("llama", tmp_path, 0, form)
    rewrite(stored, quantization_config=None)
    with pytest.raises(ConfigError, match=r"without quantization_config in config\.json"):
        load_model(EngineConfig(str(stored)))


@pytest.mark.parametrize("form", ["ct_fp8", "ct_int8"])
def test_old_names_of_compressed_tensors_are_read(form: str, tmp_path: Path) -> None:
    stored, exact = write("llama", tmp_path, 0, form)
    settings = {**FORMATS[form][0], "format": "naive-quantized"}
    rewrite(stored, quantization_config=None, compression_config=settings)
    ours, theirs = loaded_weights(stored), loaded_weights(exact)
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def test_one_file_is_preferred_to_shards(tmp_path: Path) -> None:
    """As transformers does; an index may be left over whose shards are gone."""
    _, exact = write("llama", tmp_path, 0, "fp8")
    theirs = loaded_weights(exact)
    (exact / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    ours = loaded_weights(exact)
    assert all(ours[name].equal(theirs[name]) for name in theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_whose_config_has_no_dtype_has_that_of_its_files(dtype: torch.dtype, tmp_path: Path) -> None:
    """gpt-oss' is one. In float32 it took twice the memory, and its experts did not stay in MXFP4. A few
    tensors in float32 do not decide, as DeepSeek's biases of experts, nor do scales of quantised weights."""
    stored, _ = write("gpt_oss", tmp_path, 0, "mxfp4")
    for path in stored.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not name.endswith("norm.weight"):
                tensors[name] = tensor.to(dtype)
        save_file(tensors, path, {"format": "pt"})
    rewrite(stored, dtype=None)
    assert load_model(EngineConfig(str(stored))).spec.dtype == dtype
    assert load_model(EngineConfig(str(stored), dtype="float32")).spec.dtype == torch.float32


def test_a_directory_without_safetensors_is_a_config_error(tmp_path: Path) -> None:
    _, exact = write("llama", tmp_path, 0, "fp8")
    (exact / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has neither model\.safetensors nor"):
        load_model(EngineConfig(str(exact)))


def test_zero_points_of_activations_are_not_weights(tmp_path: Path) -> None:
    """compressed-tensors stores them in int8 if they are not all 0. Activations are not quantised here."""
    stored, exact = write("llama", tmp_path, 0, "ct_int8")
    (path,) = stored.glob("*-00001-of-*.safetensors")
    tensors = load_file(path)
    index = json.loads((stored / "model.safetensors.index.json").read_text())
    stems = [name.removesuffix("weight_scale") for name in tensors if name.endswith(".weight_scale")]
    assert stems
    for stem in stems:
        tensors[f"{stem}input_zero_point"] = torch.full((1,), -7, dtype=torch.int8)
        index["weight_map"][f"{stem}input_zero_point"] = path.name
    save_file(tensors, path, {"format": "pt"})
    (stored / "model.safetensors.index.json").write_text(json.dumps(index))
    ours, theirs = loaded_weights(stored), loaded_weights(exact)
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def test_a_model_of_the_hub_without_a_connection_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its config.json is in the cache."""
    repository, commit = tmp_path / "models--org--m", "a" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "snapshots" / commit / "config.json").write_text("{}")
    monkeypatch.setattr(reader, "cached_file", partial(reader.cached_file, cache_dir=tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="couldn't connect"):
        weight_files("org/m", local=False)
