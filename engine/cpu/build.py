"""Compile the CPU kernels into the user's cache: `python -m engine.cpu.build`.

The library has a plain C interface and includes no torch header: it compiles in seconds, does not depend on
torch's ABI, and one build serves every torch version. (A torch extension was the obvious alternative: its
headers alone take half a minute on two cores, and the op's arguments are raw pointers either way.) Every
instruction set is its own translation unit, and the library chooses at run time, so a cache on a shared home
directory serves different CPUs.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE_DIR = Path(__file__).parent
COMMON_FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=default",
    "-pthread",
    "-Wall",
]
AVX512 = ["-march=x86-64-v4", "-ffp-contract=fast", "-mavx512bf16", "-mprefer-vector-width=512"]
ISA_FLAGS: dict[str, list[str]] = {"avx2": ["-march=x86-64-v3", "-ffp-contract=fast"], "avx512": AVX512}
"""By the last word of a source file's name; other files get the compiler's default target."""
ISA_FLAGS["amx"] = [*AVX512, "-mamx-tile", "-mamx-bf16"]


class BuildError(RuntimeError):
    """The kernels could not be compiled; the message says why."""


def cache_dir() -> Path:
    """Where built libraries live: $BATON_CACHE_DIR, else the user's cache directory."""
    explicit = os.environ.get("BATON_CACHE_DIR")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "baton"


def find_compiler() -> str:
    """$CXX, or g++, or clang++. Raises BuildError when there is none."""
    for name in filter(None, (os.environ.get("CXX"), "g++", "clang++")):
        path = shutil.which(name)
        if path:
            return path
    raise BuildError("no C++ compiler is installed (g++ or clang++)")


def _sources() -> list[Path]:
    """Translation units for this machine's architecture."""
    units = sorted(SOURCE_DIR.glob("*.cpp"))
    if platform.machine() == "x86_64":
        return units
    return [unit for unit in units if unit.stem.rpartition("_")[2] not in ISA_FLAGS]


def library_path(compiler: str) -> Path:
    """Where the library of these sources and this compiler is, whether it is built yet or not."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=30)
    digest = hashlib.sha256(version.stdout.encode() + platform.machine().encode())
    digest.update(repr((COMMON_FLAGS, sorted(ISA_FLAGS.items()))).encode())
    for path in [*_sources(), *sorted(SOURCE_DIR.glob("*.h"))]:
        digest.update(path.name.encode() + path.read_bytes())
    return cache_dir() / f"kernels-{digest.hexdigest()[:20]}.so"


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command[:2])} ... failed:\n{done.stderr[-4000:]}")


def _compile(compiler: str, target: Path) -> None:
    """Compile and link in a private directory, then rename: a reader sees a whole library or none."""
    with tempfile.TemporaryDirectory(dir=target.parent) as work:

        def compile_unit(unit: Path) -> str:
            flags = ISA_FLAGS.get(unit.stem.rpartition("_")[2], [])
            made = str(Path(work, unit.stem + ".o"))
            _run([compiler, "-c", str(unit), "-o", made, *COMMON_FLAGS, *flags])
            return made

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_unit, _sources()))
        linked = Path(work, "kernels.so")
        _run([compiler, "-shared", "-pthread", "-o", str(linked), *objects])
        os.replace(linked, target)


def build() -> Path:
    """The library's path, compiled now if it is not in the cache. Raises BuildError.

    Safe with several processes at once: one compiles under a file lock, the others wait for it.
    """
    compiler = find_compiler()
    target = library_path(compiler)
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / "build.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(compiler, target)
    return target


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{build()}\n")
    except BuildError as error:
        sys.stderr.write(f"CPU kernels not built, plain torch takes over: {error}\n")
        sys.exit(1)
