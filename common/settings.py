"""Dotted settings on a command line: `section.key=value` becomes an entry of nested mappings."""

from __future__ import annotations

from typing import Any

import yaml

from common.errors import ConfigError


def put(settings: dict[str, Any], path: str, value: Any) -> None:
    """Set the entry at a dotted path, and make the sections on the way.

    Raises ConfigError when a part of the path holds a value that is not a section.
    """
    *sections, last = path.split(".")
    at = settings
    for section in sections:
        if at.get(section) is None:
            at[section] = {}
        at = at[section]
        if not isinstance(at, dict):
            raise ConfigError(path, f"{section} is not a section", f"set {section} itself, or another key")
    at[last] = value


def assign(settings: dict[str, Any], assignment: str) -> None:
    """Apply `section.key=value`; the value is YAML. Raises ConfigError for any other form."""
    path, equals, value = assignment.partition("=")
    if not equals or not path:
        raise ConfigError("--set", f"{assignment!r} is not KEY=VALUE", "give a dotted key, = and a value")
    put(settings, path, parse_value(path, value))


def parse_value(key: str, text: str) -> Any:
    """The value that a YAML text gives. Raises ConfigError that names the key.

    A dash alone is that text, as for files that may be stdout. To YAML it is a list with nothing in it.
    """
    try:
        return text if text == "-" else yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(key, f"{text!r} is not YAML: {error}", "correct the value") from None
