"""Reads a model's config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig


def read_config(model: str | Path, local: bool) -> Any:
    """transformers' config of a directory or a hub id. `local`: nothing is downloaded.

    Raises OSError or ValueError, in one line, if there is none that transformers can use.
    """
    try:
        return AutoConfig.from_pretrained(model, local_files_only=local)
    except (StrictDataclassError, LookupError, TypeError, AttributeError) as error:  # a field of another type
        raise ValueError(" ".join(f"config.json: {error}".split())) from error
