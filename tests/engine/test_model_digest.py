"""The digest of a model's files: every byte and every option of the load counts; files are hashed once."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from engine import model_digest as module
from engine.config import EngineConfig
from engine.model_digest import CACHE_NAME, model_digest


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "llama"}')
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (directory / name).write_bytes(name.encode() * 1000)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def digest(model: Path, **changed: Any) -> bytes:
    return model_digest(EngineConfig(model=str(model), **changed))


def replace(path: Path, contents: bytes) -> None:
    path.write_bytes(contents)
    about = path.stat()
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns + 1))


def test_new_weights_under_an_old_name_have_another_digest(model: Path) -> None:
    first = digest(model)
    assert len(first) == 32
    assert digest(model) == first
    weights = model / "model-2.safetensors"
    contents = weights.read_bytes()
    replace(weights, contents[:-1] + b"X")
    assert digest(model) != first
    replace(weights, contents)
    assert digest(model) == first


def test_config_quantisation_and_options_count_and_the_tokenizer_does_not(model: Path) -> None:
    seen = {digest(model)}
    (model / "tokenizer.json").write_text("{ }")
    assert digest(model) in seen
    seen.add(digest(model, dtype="bfloat16"))
    seen.add(digest(model, weight_dtype="int8"))
    seen.add(digest(model, kv_cache_dtype="fp8_e4m3"))
    replace(model / "config.json", b'{"model_type": "qwen3"}')
    seen.add(digest(model))
    (model / "quantize_config.json").write_text("{}")
    seen.add(digest(model))
    assert len(seen) == 6


def test_a_file_is_hashed_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    hash_one = module._hash

    def count(path: Path, progress: Any) -> str:
        hashed.append(path.name)
        return hash_one(path, progress)

    monkeypatch.setattr(module, "_hash", count)
    first = digest(model)
    assert sorted(hashed) == ["config.json", "model-1.safetensors", "model-2.safetensors"]
    assert digest(model) == first
    replace(model / "model-1.safetensors", b"new")
    digest(model)
    assert hashed[3:] == ["model-1.safetensors"]


def test_a_directory_that_cannot_be_written_uses_the_users_cache(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    first = digest(model)
    assert not (model / CACHE_NAME).exists()
    assert len(list((tmp_path / "cache" / "baton" / "digests").glob("*.json"))) == 1
    monkeypatch.setattr(module, "_hash_all", lambda paths: pytest.fail("hashed again"))
    assert digest(model) == first


@pytest.mark.parametrize("spoilt", ["", "[]", "{", '{"config.json": 3}', '{"config.json": {"sha256": "x"}}'])
def test_a_spoilt_cache_says_nothing(model: Path, spoilt: str) -> None:
    first = digest(model)
    (model / CACHE_NAME).write_text(spoilt)
    assert digest(model) == first


def test_where_nothing_can_be_kept_it_is_computed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = digest(model)
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with caplog.at_level(logging.WARNING):
        assert digest(model) == first
    assert "not kept" in caplog.text
