"""What a request leaves out comes from generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from router.text.sampling_defaults import SamplingDefaults, read_defaults

QWEN3 = {
    "do_sample": True, "eos_token_id": [151645, 151643], "pad_token_id": 151643,
    "temperature": 0.6, "top_k": 20, "top_p": 0.95, "transformers_version": "4.51.0",
}  # fmt: skip


def folder(path: Path, written: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "generation_config.json").write_text(json.dumps(written))
    return path


def test_the_models_the_neutral_and_another_folders(tmp_path: Path) -> None:
    path = folder(tmp_path / "model", QWEN3)
    other = folder(tmp_path / "other", {"min_p": 0.1, "repetition_penalty": 1.1, "top_k": -1, "top_p": None})
    assert read_defaults(path, "auto") == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)
    assert read_defaults(path, "vllm") == SamplingDefaults()
    assert read_defaults(path, str(other)) == SamplingDefaults(min_p=0.1, repetition_penalty=1.1)
    assert read_defaults(tmp_path, "auto") == SamplingDefaults()  # a model without the file


@pytest.mark.parametrize(
    "written", [{"temperature": -1}, {"top_p": "0.9"}, {"top_k": 1.5}, {"top_p": 2}, {"temperature": True}]
)
def test_impossible_values_stop_the_start(tmp_path: Path, written: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"generation_config: .*{next(iter(written))}"):
        read_defaults(folder(tmp_path, written), "auto")


def test_a_folder_that_was_named_has_to_have_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="generation_config"):
        read_defaults(tmp_path, str(tmp_path / "nowhere"))
