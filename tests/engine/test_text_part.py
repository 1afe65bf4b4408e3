"""Checkpoints that take images, too: their text part gives the tokens of the whole model's generate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from engine.config import EngineConfig
from engine.errors import UnsupportedModel
from engine.loader import load_model
from engine.text_part import text_part, text_weights
from tests.support.driver import Driver, open_pools
from tests.support.image_models import PROMPT, TOKENS, WHOLES, generated, whole_model, written
from tests.support.quantised_checkpoints import write
from tests.support.reference import draw_model, reference_generate
from tests.support.tiny_configs import MIXED


def renamed(directory: Path, names: dict[str, str]) -> None:
    """Give each weight whose name begins with a key of `names` the value in its place."""
    weights = load_file(directory / "model.safetensors")
    put = {}
    for name, weight in weights.items():
        old = next((old for old in names if name.startswith(old)), "")
        put[names.get(old, "") + name.removeprefix(old)] = weight.clone()
    assert put.keys() != weights.keys()
    save_file(put, directory / "model.safetensors", {"format": "pt"})


def served(directory: Path) -> list[int]:
    runner, pools = open_pools(directory, 16, 12)
    driver = Driver(runner, 12, 16, window_pool=pools.get("window"))
    lane = driver.add(PROMPT)
    driver.generate([lane], TOKENS, chunk=10)
    driver.engine.close()
    return lane.outputs


@pytest.mark.parametrize("family", sorted(WHOLES))
def test_tokens_are_those_of_the_whole_model(family: str, tmp_path: Path) -> None:
    expected, _ = generated(whole_model(family))
    assert served(written(family, tmp_path)) == expected


def test_so_they_are_by_the_names_of_transformers_modules(tmp_path: Path) -> None:
    directory = written("mistral3", tmp_path)
    renamed(
        directory, {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}
    )
    assert served(directory) == generated(whole_model("mistral3"))[0]


def test_a_config_without_parts_is_that_of_its_text(tmp_path: Path) -> None:
    """GLM-5.3's checkpoints without images have all keys at the top."""
    path, [answer] = draw_model("glm5_next_text", tmp_path, 0, [PROMPT], TOKENS)
    config = json.loads((path / "config.json").read_text())
    del config["architectures"]
    (path / "config.json").write_text(json.dumps({**config, "model_type": "glm5_next"}))
    assert served(path) == answer


@pytest.mark.parametrize("form", ["fp8", "awq"])
def test_quantised_weights_are_those_of_the_text_part(form: str, tmp_path: Path) -> None:
    """The whole's config.json says how they are stored."""
    stored, exact = write("mistral", tmp_path, 0, form)
    config = WHOLES["mistral3"]()
    config.architectures = ["Mistral3ForConditionalGeneration"]
    config.quantization_config = json.loads((stored / "config.json").read_text())["quantization_config"]
    whole = tmp_path / "whole"
    config.save_pretrained(whole)
    weights = {}
    for file in stored.glob("*.safetensors"):
        weights |= {f"language_model.{name}": weight for name, weight in load_file(file).items()}
    save_file(weights, whole / "model.safetensors", {"format": "pt"})
    assert served(whole) == reference_generate(exact, PROMPT, TOKENS)[0]


def test_no_other_weight_is_read(tmp_path: Path) -> None:
    directory = written("gemma3", tmp_path)
    weights = load_file(directory / "model.safetensors")
    text = text_weights(weights)
    assert {name.split(".")[0] for name in text} == {"model"}
    assert len(text) < len(weights)
    loaded = load_model(EngineConfig(str(directory)))
    assert loaded.spec.model_type == "gemma3_text"
    assert not [name for name, _ in loaded.model.named_parameters() if "vision" in name]


def test_what_the_whole_config_says_of_all_parts_is_kept() -> None:
    config = WHOLES["gemma3"]()
    config.dtype, config.eos_token_id = torch.bfloat16, [1, 106]
    config.quantization_config = {"quant_method": "fp8"}
    part = text_part(config)
    assert part.model_type == "gemma3_text"
    assert (part.dtype, part.eos_token_id) == (torch.bfloat16, [1, 106])
    assert part.quantization_config == {"quant_method": "fp8"}
    assert config.get_text_config().eos_token_id == 258


def test_a_config_of_text_alone_is_itself(tmp_path: Path) -> None:
    config = MIXED["gemma3_text"]()
    assert text_part(config) is config
    config.save_pretrained(tmp_path)
    read = AutoConfig.from_pretrained(tmp_path)
    assert text_part(read) is read


def test_another_class_over_such_a_config_is_refused() -> None:
    config = WHOLES["gemma3"]()
    config.architectures = ["Gemma3ForSequenceClassification"]
    with pytest.raises(UnsupportedModel, match="not Gemma3ForConditionalGeneration"):
        text_part(config)
