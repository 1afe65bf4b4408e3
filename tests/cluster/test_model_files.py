"""Finding a model's directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.model_files import model_directory
from common.errors import ConfigError


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


def test_a_hub_id_that_the_hub_does_not_give_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr("cluster.model_files.snapshot_download", offline)
    with pytest.raises(ConfigError, match="hub did not give it"):
        model_directory("owner/name")
