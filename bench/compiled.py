"""Programs in C++ that benches run, compiled on first use into a temporary directory."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from common.compile import BuildError, find_compiler

_FOLDER = Path(__file__).parent
_PACKAGES = {"zmq.h": "libzmq3-dev", "msgpack.hpp": "libmsgpack-cxx-dev"}  # Debian's and Ubuntu's


def compiled(name: str, *libraries: str) -> Path:
    """The program of bench/NAME/NAME.cpp, kept under the hash of its sources. Raises BuildError."""
    folder = _FOLDER / name
    sources = sorted([*folder.glob("*.cpp"), *folder.glob("*.h")])
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    binary = Path(tempfile.gettempdir()) / f"baton-{name}-{os.getuid()}-{digest}"
    if not binary.exists():
        unfinished = binary.with_suffix(f".{os.getpid()}")
        linked = [f"-l{library}" for library in libraries]
        _compile(["-O2", "-std=c++17", "-o", str(unfinished), str(folder / f"{name}.cpp"), *linked])
        unfinished.rename(binary)
    return binary


def _compile(words: list[str]) -> None:
    compiler = find_compiler()
    done = subprocess.run([compiler, *words], stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        missing = [package for header, package in _PACKAGES.items() if not _includes(compiler, header)]
        if missing:
            raise BuildError(f"bench.router needs C++ headers: apt-get install {' '.join(missing)}")
        raise BuildError(f"{compiler} {' '.join(words)} failed:\n{done.stderr}")


def _includes(compiler: str, header: str) -> bool:
    command = [compiler, "-E", "-x", "c++", "-include", header, os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
