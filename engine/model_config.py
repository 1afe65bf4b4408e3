"""Reads a model's config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

_SAME_AS = {"kimi_k2": "deepseek_v3"}
"""model_type of a config that is read by code in the checkpoint -> the one that transformers has of it."""


def read_config(model: str | Path, local: bool) -> Any:
    """transformers' config of a directory or a hub id. `local`: nothing is downloaded.

    Raises OSError or ValueError, in one line, if there is none that transformers can use.
    """
    try:
        settings, _ = PretrainedConfig.get_config_dict(model, local_files_only=local)
        if (known := _SAME_AS.get(settings.get("model_type", ""))) is None:
            return AutoConfig.from_pretrained(model, local_files_only=local)
        settings.pop("auto_map", None)
        return CONFIG_MAPPING[known].from_dict({**settings, "model_type": known})
    except (StrictDataclassError, LookupError, TypeError, AttributeError) as error:  # a field of another type
        raise ValueError(" ".join(f"config.json: {error}".split())) from error
