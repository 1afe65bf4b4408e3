"""pyproject.toml lists what is shipped and what that imports. `make wheel` installs and runs it."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = PROJECT["tool"]["setuptools"]["packages"]
NOT_SHIPPED = {"bench", "tools", "tests"}
OPTIONAL = {
    "cuda": "cuda-bindings",
    "flashinfer": "flashinfer-python",
    "mooncake": "mooncake-transfer-engine-cuda13",
    "triton": "triton",
    "boto3": "boto3",
    "botocore": "botocore",
    "nixl": "nixl",
    "lmcache": "lmcache",
    "aibrix_kvcache": "aibrix-kvcache",
    "hf3fs_fuse": "hf3fs-py-usrbio",
}  # not on every machine


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _declared(requirements: list[str]) -> set[str]:
    return {_normal(re.split(r"[\[<>=~! ]", line)[0]) for line in requirements}


def _imported() -> set[str]:
    """Top-level modules that shipped files import, ours and the standard library's excepted."""
    found = set()
    for package in PACKAGES:
        for path in (ROOT / package.replace(".", "/")).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    found |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    found.add(node.module.partition(".")[0])
    ours = {name.partition(".")[0] for name in PACKAGES}
    return found - ours - sys.stdlib_module_names


def test_every_package_is_listed() -> None:
    files = [
        path.relative_to(ROOT) for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0][0] != "."
    ]
    folders = {".".join(path.parts[:-1]) for path in files if path.parts[0] not in {*NOT_SHIPPED, "build"}}
    assert sorted(PACKAGES) == sorted(folders)


def test_compiled_sources_are_package_data() -> None:
    data = PROJECT["tool"]["setuptools"]["package-data"]
    for suffix in ("cpp", "h"):
        holding = {".".join(path.relative_to(ROOT).parts[:-1]) for path in ROOT.rglob(f"*.{suffix}")}
        shipped = {name for name in holding if name in PACKAGES}
        assert shipped == {name for name, patterns in data.items() if f"*.{suffix}" in patterns}


def test_what_shipped_code_imports_is_declared_and_nothing_else() -> None:
    distributions = {name: set(map(_normal, owners)) for name, owners in packages_distributions().items()}
    extras = PROJECT["project"]["optional-dependencies"]
    optional = _declared(
        [
            line
            for name in ("cpu", "gpu", "plot", "s3", "nixl", "lmcache", "aibrix", "hf3fs")
            for line in extras[name]
        ]
    )
    required = _declared(PROJECT["project"]["dependencies"])
    used = set()
    for module in _imported():
        owners = {OPTIONAL[module]} if module in OPTIONAL else distributions[module]
        assert owners & (required | optional), f"{module} is imported and not declared"
        used |= owners
    assert not required - used


def test_the_lock_names_every_requirement() -> None:
    locked = _declared((ROOT / "requirements.lock").read_text().splitlines())
    extras = PROJECT["project"]["optional-dependencies"]
    for name in ("cpu", "plot", "dev"):
        assert _declared(extras[name]) <= locked
    assert _declared(PROJECT["project"]["dependencies"]) <= locked


def test_an_older_ray_is_not_accepted() -> None:
    """Ray 2.60 is the first with `max_surge_percent`, which cluster/app.py gives to every deployment."""
    (ray,) = (line for line in PROJECT["project"]["dependencies"] if line.startswith("ray["))
    assert not Requirement(ray).specifier.contains("2.59.9")
