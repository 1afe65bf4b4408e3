"""From what a user calls a model to a directory with its files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from cluster.host_lock import once_per_host
from cluster.weights import local_copy
from common.errors import ConfigError

TOKENIZER_FILES = ("*.json", "*.jinja", "additional_chat_templates/*.jinja", "tiktoken.model")
MODEL_FILES = (*TOKENIZER_FILES, "*.safetensors")
_NEVER_READ = ("*/*.safetensors", "consolidated*.safetensors")
"""The weights once more, as their makers store them: gpt-oss' folder original, Mistral's consolidated."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

Fetch = Callable[[str, tuple[str, ...]], str]
"""Gives the directory of a hub model with these files of it, all complete."""


def fetch_from_hub(model: str, files: tuple[str, ...]) -> str:
    """Download to Hugging Face's cache what is not there yet. A part of a file has another name there."""
    return str(snapshot_download(model, allow_patterns=list(files), ignore_patterns=list(_NEVER_READ)))


def model_directory(
    model: str,
    files: tuple[str, ...] = MODEL_FILES,
    cache: Path | None = None,
    fetch: Fetch = fetch_from_hub,
) -> Path:
    """The directory named, its copy in `cache` if that is given, or the hub snapshot of that id.

    Of several processes of this host one copies or downloads, and the others wait (weights.py). Raises
    ConfigError (key `model`) when it is neither a checkpoint nor a hub model.
    """
    directory = Path(model).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ConfigError("model", f"{model} has no config.json", "give the directory of a checkpoint")
        directory = directory.absolute()
        return directory if cache is None else local_copy(directory, cache, files)
    problem = f"there is no directory {model}"
    if is_hub_id(model):
        try:
            with _downloads(model, files):
                return Path(fetch(model, files))
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            problem += f", and the Hugging Face hub did not give it ({type(error).__name__})"
    raise ConfigError("model", problem, "give the directory of a checkpoint or the id of a hub model")


def is_hub_id(model: str) -> bool:
    """Whether it has the form of a Hugging Face id."""
    return _HUB_ID.fullmatch(model) is not None


def _downloads(model: str, files: tuple[str, ...]) -> AbstractContextManager[None]:
    """One process of this host at a time. A router, which needs less, does not wait for the weights; and in a
    cache that may not be written, nothing is downloaded."""
    cache = Path(constants.HF_HUB_CACHE)
    if cache.is_dir() and not os.access(cache, os.W_OK):
        return nullcontext()
    kinds = "-".join(pattern.rpartition("*.")[2] for pattern in files)
    return once_per_host(cache / ".locks" / f"baton--{model.replace('/', '--')}--{kinds}.lock")
