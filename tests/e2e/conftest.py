"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_models import make_tiny


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny qwen3 directory: a model for the transformers engine, a tokenizer for the router."""
    return make_tiny("qwen3", tmp_path_factory.mktemp("tiny"), 1)
