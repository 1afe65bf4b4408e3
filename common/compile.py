"""Compile C++ into the user's cache, on first use: the engine's kernels, the router's index.

The name of a library contains a digest of its sources, flags, compiler and machine. So a stale library is
never loaded, and several checkouts share one cache. What cannot be compiled raises BuildError, and its users
fall back to Python: a compiler is not required.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from common.start_log import start_log


class BuildError(RuntimeError):
    """A library could not be compiled; the message says why."""


@dataclass(frozen=True, slots=True)
class Sources:
    """What a library is made of. `headers` only count in the digest."""

    name: str
    units: Sequence[Path]
    headers: Sequence[Path]
    flags: Sequence[str]
    unit_flags: Mapping[str, Sequence[str]]
    """Further flags for some units, by the last word of a file's name (`attention_avx2.cpp`: avx2)."""

    def flags_of(self, unit: Path) -> list[str]:
        """All flags that a unit is compiled with."""
        return [*self.flags, *self.unit_flags.get(unit.stem.rpartition("_")[2], ())]


def build(sources: Sources) -> Path:
    """The path of the shared library, which is compiled if it is not in the cache. Raises BuildError.

    Several processes may call it at once: one compiles under a file lock, and the others wait for it.
    """
    compiler = find_compiler()
    target = _cache_dir() / f"{sources.name}-{_digest(sources, compiler)}.so"
    try:
        if target.exists():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target.parent / "build.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                start_log.info("compiling the library %s, once for this machine", sources.name)
                _compile(sources, compiler, target)
    except OSError as error:
        raise BuildError(f"{target.parent} cannot be used: {error}") from error
    return target


def _cache_dir() -> Path:
    """Where built libraries live: $BATON_CACHE_DIR, else the user's cache directory. Raises BuildError for a
    user without one."""
    explicit = os.environ.get("BATON_CACHE_DIR")
    if explicit:
        return Path(explicit)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"
    except RuntimeError as error:
        raise BuildError(f"{error} Set BATON_CACHE_DIR") from error


def find_compiler() -> str:
    """$CXX, or g++, or clang++. Raises BuildError when none is installed."""
    for name in filter(None, (os.environ.get("CXX"), "g++", "clang++")):
        path = shutil.which(name)
        if path:
            return path
    raise BuildError("no C++ compiler is installed (g++ or clang++)")


def _digest(sources: Sources, compiler: str) -> str:
    version = _run([compiler, "--version"])
    digest = hashlib.sha256(version.encode() + platform.machine().encode())
    for unit in sources.units:
        digest.update(repr(sources.flags_of(unit)).encode())
    for path in [*sources.units, *sources.headers]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:20]


def _compile(sources: Sources, compiler: str, target: Path) -> None:
    """Compile and link in a private directory, then rename: no process can load an unfinished library."""
    with tempfile.TemporaryDirectory(dir=target.parent) as work:

        def compile_unit(unit: Path) -> str:
            made = str(Path(work, unit.stem + ".o"))
            _run([compiler, "-c", str(unit), "-o", made, *sources.flags_of(unit)])
            return made

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_unit, sources.units))
        linked = Path(work, "library.so")
        _run([compiler, "-shared", "-pthread", "-o", str(linked), *objects])
        os.replace(linked, target)


def _run(command: list[str]) -> str:
    """What the command printed. Raises BuildError when it fails."""
    try:
        done = subprocess.run(  # noqa: S603 (no shell; the compiler and files of this package)
            command, capture_output=True, text=True, timeout=600, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took more than {error.timeout:.0f} s") from error
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command[:2])} ... failed:\n{done.stderr[-4000:]}")
    return done.stdout
