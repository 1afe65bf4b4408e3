"""Arguments that several commands take: a configuration, and changes to it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cluster.config_file import kept_for_serve, read_config


def add_set(command: argparse.ArgumentParser) -> None:
    """`--set`, which may be repeated."""
    command.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any configuration key, dotted"
    )


def base_config(target: str) -> dict[str, Any]:
    """The configuration of MODEL|CONFIG.yaml. Raises ConfigError."""
    return read_config(Path(target)) if _is_file(target) else {"model": target}


def unused(target: str) -> tuple[str, ...]:
    """What CONFIG.yaml says to Serve alone. Raises ConfigError."""
    return kept_for_serve(Path(target)) if _is_file(target) else ()


def _is_file(target: str) -> bool:
    return target.endswith((".yaml", ".yml"))
