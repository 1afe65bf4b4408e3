"""JSON files of a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.errors import ConfigError


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; {} if there is no file. Raises ConfigError for anything else."""
    if not path.is_file():
        return {}
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError("model", f"{path} is not JSON ({error})", "repair it") from None
    if not isinstance(loaded, dict):
        raise ConfigError("model", f"{path} is not a JSON object", "repair it")
    return loaded
