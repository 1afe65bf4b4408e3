"""Command lines."""

from __future__ import annotations

import argparse
from typing import Any


class ExactParser(argparse.ArgumentParser):
    """Takes options by their whole names only. argparse would take `--num-prefil` for `--num-prefill`, until
    an option is added that begins so, too. Subcommands' parsers are of the same class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})
