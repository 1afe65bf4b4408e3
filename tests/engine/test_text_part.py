"""Checkpoints that take images, too: their text part gives the tokens of the whole model's generate."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Gemma3Config,
    Mistral3Config,
    PixtralVisionConfig,
    PretrainedConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    SiglipVisionConfig,
)

from engine.config import EngineConfig
from engine.errors import UnsupportedModel
from engine.loader import load_model
from engine.text_part import text_part, text_weights
from tests.support.driver import Driver, open_pools
from tests.support.reference import MIN_MARGIN
from tests.support.tiny_models import FAMILIES, MIXED, randomise, write_tokenizer

PROMPT = [65, 10, 7, 200, 31, 99, 143, 12, 5, 250, 88, 61] * 3
TOKENS = 24


def _siglip() -> SiglipVisionConfig:
    return SiglipVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28
    )


def _pixtral() -> PixtralVisionConfig:
    return PixtralVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28
    )


def _qwen(text: str) -> dict[str, Any]:
    sizes = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    return {
        "text_config": MIXED[text]().to_dict(),
        "vision_config": sizes,
        "image_token_id": 300,
        "video_token_id": 301,
        "vision_start_token_id": 302,
        "vision_end_token_id": 303,
    }


WHOLES: dict[str, Callable[[], PretrainedConfig]] = {
    "gemma3": lambda: Gemma3Config(
        text_config=MIXED["gemma3_text"](),
        vision_config=_siglip(),
        mm_tokens_per_image=4,
        image_token_index=300,
        boi_token_index=301,
        eoi_token_index=302,
    ),
    "mistral3": lambda: Mistral3Config(
        text_config=FAMILIES["mistral"](),
        vision_config=_pixtral(),
        image_token_index=300,
        tie_word_embeddings=False,
    ),
    "qwen3_5": lambda: Qwen3_5Config(**_qwen("qwen3_5_text")),
    "qwen3_5_moe": lambda: Qwen3_5MoeConfig(**_qwen("qwen3_5_moe_text")),
}


@cache
def whole_model(family: str) -> Any:
    config = WHOLES[family]()
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for seed in range(20):
        randomise(model, seed)
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        if _generated(model)[1] >= MIN_MARGIN:
            return model
    raise AssertionError("no seed gives clear tokens")


def _generated(model: Any) -> tuple[list[int], float]:
    ids = torch.tensor([PROMPT])
    out = model.eval().generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.cat(out.logits).float()
    best = logits.topk(2, dim=-1).values / logits.std(dim=-1, keepdim=True)
    tokens = out.sequences[0, len(PROMPT) :].tolist()
    return tokens, float((best[:, 0] - best[:, 1]).min()) if len(set(tokens)) > 4 else 0.0


def written(family: str, directory: Path) -> Path:
    whole_model(family).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


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
    expected, _ = _generated(whole_model(family))
    assert served(written(family, tmp_path)) == expected


def test_so_they_are_by_the_names_of_transformers_modules(tmp_path: Path) -> None:
    directory = written("mistral3", tmp_path)
    renamed(
        directory, {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}
    )
    assert served(directory) == _generated(whole_model("mistral3"))[0]


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
