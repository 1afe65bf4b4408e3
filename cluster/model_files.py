"""From what a user calls a model to a directory with its files."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from common.errors import ConfigError

TOKENIZER_FILES = ("*.json", "*.jinja")
MODEL_FILES = (*TOKENIZER_FILES, "*.safetensors")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def model_directory(model: str, files: tuple[str, ...] = MODEL_FILES) -> Path:
    """The directory named, or the hub snapshot of that id (downloaded or from the cache).

    Raises ConfigError (key `model`) when it is neither.
    """
    directory = Path(model).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ConfigError("model", f"{model} has no config.json", "give the directory of a checkpoint")
        return directory.absolute()
    problem = f"there is no directory {model}"
    if is_hub_id(model):
        try:
            return Path(snapshot_download(model, allow_patterns=list(files)))
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            problem += f", and the Hugging Face hub did not give it ({type(error).__name__})"
    raise ConfigError("model", problem, "give the directory of a checkpoint or the id of a hub model")


def is_hub_id(model: str) -> bool:
    """Whether it has the form of a Hugging Face id."""
    return _HUB_ID.fullmatch(model) is not None
