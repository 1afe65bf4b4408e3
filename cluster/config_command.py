"""The command `baton config`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from cluster.config import ServeConfig, parse_config
from cluster.config_file import read_config

HELP = "Print the JSON schema of a configuration, or check one."


def add_arguments(config: argparse.ArgumentParser) -> None:
    """Its arguments."""
    what = config.add_mutually_exclusive_group(required=True)
    what.add_argument("--schema", action="store_true", help="print the JSON schema")
    what.add_argument("--check", metavar="CONFIG.yaml", type=Path, help="check a file and start nothing")
    config.set_defaults(run=_config)


def _config(arguments: argparse.Namespace) -> int:
    if arguments.check is not None:
        parse_config(read_config(arguments.check))
        print(f"{arguments.check}: ok")
    else:
        print(json.dumps(ServeConfig.model_json_schema(), indent=2))
    return 0
