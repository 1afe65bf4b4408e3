"""Whether the files of a model are on this node, without downloading anything."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from cluster.model_files import is_hub_id
from common.errors import ConfigError
from common.tokenizer_file import NAMES

_INDEX = "model.safetensors.index.json"
_REMEDY = "copy the whole checkpoint to this node"


def present_files(model: str) -> Path | None:
    """The directory with all files of a model. None: a hub model that this node has not downloaded yet.

    Raises ConfigError for a directory that is not there or lacks a file.
    """
    directory = Path(model).expanduser()
    if not directory.is_dir():
        if not is_hub_id(model):
            raise ConfigError("model", f"there is no directory {model}", _REMEDY)
        try:
            directory = Path(snapshot_download(model, local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError):
            return None
    missing = [name for name in ("config.json", *_weights(directory)) if not _has(directory, name)]
    if not any(_has(directory, name) for name in NAMES):
        missing.insert(0, NAMES[0])
    if missing:
        named = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ConfigError("model", f"{directory} lacks {named}", _REMEDY)
    return directory


def _weights(directory: Path) -> list[str]:
    """The files with weights that there should be."""
    index = directory / _INDEX
    if not index.is_file():
        return ["model.safetensors"]
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError("model", f"{index} names no weights", _REMEDY) from None


def _has(directory: Path, name: str) -> bool:
    path = directory / name
    return path.is_file() and path.stat().st_size > 0
