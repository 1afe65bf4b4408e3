"""Reads a model's config.json, and how its weights are quantised where another file says it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig
from transformers.utils import cached_file

_SAME_AS = {"kimi_k2": "deepseek_v3"}
"""model_type of a config that is read by code in the checkpoint -> the one that transformers has of it."""


def read_config(model: str | Path, local: bool) -> Any:
    """transformers' config of a directory or a hub id. `local`: nothing is downloaded.

    Raises OSError or ValueError, in one line, if there is none that transformers can use.
    """
    try:
        config = _read_config(model, local)
        if not getattr(config, "quantization_config", None) and (found := _model_optimizer(model, local)):
            config.quantization_config = found
        return config
    except (StrictDataclassError, LookupError, TypeError, AttributeError) as error:  # a field of another type
        raise ValueError(" ".join(f"config.json: {error}".split())) from error


def _read_config(model: str | Path, local: bool) -> Any:
    settings, _ = PretrainedConfig.get_config_dict(model, local_files_only=local)
    if (known := _SAME_AS.get(settings.get("model_type", ""))) is None:
        return AutoConfig.from_pretrained(model, local_files_only=local)
    settings.pop("auto_map", None)
    return CONFIG_MAPPING[known].from_dict({**settings, "model_type": known})


def _model_optimizer(model: str | Path, local: bool) -> dict[str, Any] | None:
    """`quantization_config`, of the file in which NVIDIA's Model Optimizer wrote it at first.

    None: there is no such file.
    """
    name = "hf_quant_config.json"
    found = cached_file(model, name, local_files_only=local, _raise_exceptions_for_missing_entries=False)
    if found is None:
        return None
    try:
        return {"quant_method": "modelopt", **json.loads(Path(found).read_text("utf-8"))["quantization"]}
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{name}: {error!r}") from error
