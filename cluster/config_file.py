"""A YAML file with a configuration: Baton's own, or a Serve config with it as an application's `args`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from common.errors import ConfigError

_OF_ALL = ("name", "route_prefix", "import_path", "args")
"""Keys of every application in a Serve config."""


def read_config(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Serve config files are accepted too: their first application's `args`.

    A `model` directory may be named relative to the current directory or to the file's.
    """
    raw = _read_yaml(path)
    if _is_serve_config(raw):
        first = next(iter(raw["applications"]), None)
        raw = first.get("args", {}) if isinstance(first, dict) else None
    if not isinstance(raw, dict):
        raise ConfigError("config", f"{path} is not a mapping", "see `baton config --schema`")
    models = raw.get("models")
    if isinstance(models, list):
        found = [_with_model(one, path.parent) if isinstance(one, dict) else one for one in models]
        return {**raw, "models": found}
    return _with_model(raw, path.parent)


def kept_for_serve(path: Path) -> tuple[str, ...]:
    """What `read_config` leaves out of a file, because it is for Serve: the keys of a Serve config."""
    raw = _read_yaml(path)
    if not _is_serve_config(raw):
        return ()
    first, *more = raw["applications"]
    found = [key for key in raw if key != "applications"]
    found += [f"applications[0].{key}" for key in first if key not in _OF_ALL]
    return (*found, *(f"applications[{number}]" for number, _ in enumerate(more, 1)))


def _read_yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError("config", f"cannot read {path}: {error.strerror}", "give a readable file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("config", f"{path} is not YAML: {error}", "correct the file") from None


def _is_serve_config(raw: Any) -> bool:
    return isinstance(raw, dict) and isinstance(raw.get("applications"), list)


def _with_model(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    model = raw.get("model")
    if isinstance(model, str) and not Path(model).is_dir() and (folder / model).is_dir():
        return {**raw, "model": str((folder / model).absolute())}
    return raw
