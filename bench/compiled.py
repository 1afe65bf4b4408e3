"""Programs in C++ that benches run, compiled on first use into a temporary directory."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_FOLDER = Path(__file__).parent


def compiled(name: str, *libraries: Path) -> Path:
    """The program of bench/NAME/NAME.cpp, kept under the hash of its sources and what it is linked with."""
    folder = _FOLDER / name
    sources = sorted([*folder.glob("*.cpp"), *folder.glob("*.h")])
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources))
    digest.update(repr(libraries).encode())
    binary = Path(tempfile.gettempdir()) / f"baton-{name}-{os.getuid()}-{digest.hexdigest()[:16]}"
    if not binary.exists():
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            raise SystemExit(f"bench/{name}: no C++ compiler is installed (g++ or clang++); install one")
        half = binary.with_suffix(f".{os.getpid()}")
        linked = [word for path in libraries for word in (path, f"-Wl,-rpath,{path.parent}")]
        subprocess.run(
            [compiler, "-O2", "-std=c++17", "-o", half, folder / f"{name}.cpp", *linked], check=True
        )
        half.rename(binary)
    return binary
