"""Compiles and loads the KV memory's C++: `python -m kvcache.native.build`."""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
from pathlib import Path

from common import compile as cxx
from common.compile import BuildError, Sources

log = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=default", "-Wall", "-Wextra"]


def build() -> Path:
    """The library's path; it is compiled first if the cache lacks it. Raises BuildError."""
    return cxx.build(Sources("page-copies", sorted(SOURCE_DIR.glob("*.cpp")), [], FLAGS, {}))


@functools.cache
def page_copies() -> ctypes.CDLL | None:
    """The library, whose calls release the GIL. Where it cannot be compiled, log a warning and return
    None."""
    try:
        library = ctypes.CDLL(str(build()))
    except (BuildError, OSError) as error:
        log.warning("copies of pages are not compiled; memcpy takes their place: %s", error)
        return None
    address, number = ctypes.c_void_p, ctypes.c_int64
    library.copy_runs.argtypes = [address, address, address, address, address, number, number]
    library.copy_runs.restype = None
    return library


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{build()}\n")
    except BuildError as error:
        sys.stderr.write(f"not built; memcpy takes its place: {error}\n")
        sys.exit(1)
