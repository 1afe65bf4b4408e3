"""What the wheel contains, as pyproject.toml lists it."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def shipped_packages() -> list[str]:
    """Dotted names of the packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return list(project["tool"]["setuptools"]["packages"])


def shipped_files(*suffixes: str) -> list[str]:
    """Files of the packages with these suffixes (".py"), relative to the root."""
    folders = [ROOT / package.replace(".", "/") for package in shipped_packages()]
    found = [path for folder in folders for path in sorted(folder.iterdir()) if path.suffix in suffixes]
    return [str(path.relative_to(ROOT)) for path in found]
