"""Finding a model's directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub.utils._paths import filter_repo_objects

from cluster.model_files import MODEL_FILES, TOKENIZER_FILES, fetch_from_hub, model_directory
from common.errors import ConfigError
from router.text.chat_template import load_templates


def test_a_directory_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert model_directory("m") == tmp_path / "m"


def test_refusals_name_the_model(tmp_path: Path) -> None:
    for model, says in [(str(tmp_path), "no config.json"), (str(tmp_path / "x"), "there is no directory")]:
        with pytest.raises(ConfigError, match=says) as caught:
            model_directory(model)
        assert caught.value.key == "model"


def test_weights_are_downloaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those that the repository has in its maker's own layout, too."""
    repository = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
        *(left_out := ["original/model.safetensors", "consolidated.safetensors", "metal/model.bin"]),
        *(left_out_shards := ["consolidated-00001-of-00002.safetensors", "original/consolidated.00.pth"]),
    ]

    def download(_: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        return ",".join(
            filter_repo_objects(repository, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        )

    monkeypatch.setattr("cluster.model_files.snapshot_download", download)
    fetched = fetch_from_hub("owner/name", MODEL_FILES).split(",")
    assert fetched == [name for name in repository if name not in (*left_out, *left_out_shards)]
    assert fetch_from_hub("owner/name", TOKENIZER_FILES).split(",") == [
        name for name in fetched if not name.endswith("safetensors")
    ]


def test_a_copy_has_all_chat_templates(tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "additional_chat_templates").mkdir(parents=True)
    for name in ("config.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        (model / name).write_text("{}")
    copied = model_directory(str(model), TOKENIZER_FILES, tmp_path / "cache")
    assert copied != model
    assert set(load_templates(copied, {})) == {"default", "tool_use"}


def test_a_hub_id_that_the_hub_does_not_give_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr("cluster.model_files.snapshot_download", offline)
    with pytest.raises(ConfigError, match="hub did not give it"):
        model_directory("owner/name")
