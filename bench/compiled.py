"""Programs in C++ that benches run, compiled on first use into a temporary directory."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from common.compile import BuildError, find_compiler

_FOLDER = Path(__file__).parent


def compiled(name: str, *libraries: Path) -> Path:
    """The program of bench/NAME/NAME.cpp, kept under the hash of its sources and what it is linked with."""
    folder = _FOLDER / name
    sources = sorted([*folder.glob("*.cpp"), *folder.glob("*.h")])
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources))
    digest.update(repr(libraries).encode())
    binary = Path(tempfile.gettempdir()) / f"baton-{name}-{os.getuid()}-{digest.hexdigest()[:16]}"
    if not binary.exists():
        try:
            compiler = find_compiler()
        except BuildError as error:
            raise SystemExit(f"bench/{name}: {error}") from None
        half = binary.with_suffix(f".{os.getpid()}")
        linked = [word for path in libraries for word in (path, f"-Wl,-rpath,{path.parent}")]
        subprocess.run(
            [compiler, "-O2", "-std=c++17", "-o", half, folder / f"{name}.cpp", *linked], check=True
        )
        half.rename(binary)
    return binary
