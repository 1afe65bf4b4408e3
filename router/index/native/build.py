"""Compiles and loads the index's C++: `python -m router.index.native.build`."""

from __future__ import annotations

import functools
import logging
import sys
import sysconfig
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType

from common import compile as cxx
from common.compile import BuildError, Sources

log = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"]
_NAME = "baton_router"  # the module's init function is named after it


def build() -> Path:
    """Return the extension's path, after compiling it if the cache lacks it. Raises BuildError."""
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").exists():
        raise BuildError(f"Python's headers are not installed (no Python.h in {include})")
    name = f"{_NAME}-{sysconfig.get_config_var('SOABI')}"  # each Python has its own build
    units, headers = sorted(SOURCE_DIR.glob("*.cpp")), sorted(SOURCE_DIR.glob("*.h"))
    return cxx.build(Sources(name, units, headers, [*FLAGS, f"-I{include}"], {}))


@functools.cache
def native() -> ModuleType | None:
    """Return the module. Where it cannot be compiled, log a warning and return None."""
    try:
        return _load()
    except (BuildError, ImportError) as error:
        log.warning("the index's C++ is not compiled; the slower Python table is used: %s", error)
        return None


def _load() -> ModuleType:
    path = str(build())
    loader = ExtensionFileLoader(_NAME, path)
    module = module_from_spec(ModuleSpec(_NAME, loader, origin=path))
    loader.exec_module(module)
    return module


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{build()}\n")
    except BuildError as error:
        sys.stderr.write(f"not built; the slower Python table is used: {error}\n")
        sys.exit(1)
