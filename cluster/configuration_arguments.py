"""Arguments that several commands take: a configuration, and changes to it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cluster.config import read_config


def add_set(command: argparse.ArgumentParser) -> None:
    """`--set`, which may be repeated."""
    command.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any configuration key, dotted"
    )


def base_config(target: str) -> dict[str, Any]:
    """The configuration of MODEL|CONFIG.yaml. Raises ConfigError."""
    if target.endswith((".yaml", ".yml")):
        return read_config(Path(target))
    return {"model": target}
