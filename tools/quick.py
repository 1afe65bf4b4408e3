"""`make quick`: fast unit tests of the rooms that changed against main, and of their direct importers.

    python -m tools.quick          what changed: commits since main, the working tree, new files
    python -m tools.quick --all    every room

A room is a folder of the repository; each wing of the router is one, too. The tests of `kvcache` are in
`tests/kvcache`, those of `router/text` in `tests/router/text`. A change of what all tests share (support,
harness, dependencies) runs all of them.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from common.arguments import ExactParser
from tools import run_tests
from tools.shipped import ROOT, shipped_packages

FAST = (
    "not slow and not oracle and not oracle_full and not emulated and not invariants and not e2e"
    " and not ray_smoke and not quality and not peers and not kernels"
)
_WINGED = "router"  # the room whose folders are rooms, too
_SHARED = ("tests/support/", "tests/harness/", "tests/conftest.py", "pyproject.toml", "requirements.lock")
_NO_UNITS = ("tests/e2e", "tests/peers")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code of the tests."""
    parser = ExactParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every room, whatever has changed")
    options, rest = parser.parse_known_args(argv)
    folders = everything() if options.all else folders_for(changed_files())
    print("unit tests in " + " ".join(folders))
    return run_tests.main([FAST, *folders, *rest])


def changed_files() -> list[str]:
    """Files that differ from main: committed since it, changed or new in the working tree."""
    base = next(
        (found for ref in ("origin/main", "main") if (found := _git("merge-base", "HEAD", ref))), ["HEAD"]
    )
    return [*_git("diff", "--name-only", base[0]), *_git("ls-files", "--others", "--exclude-standard")]


def folders_for(changed: Iterable[str]) -> list[str]:
    """The test folders (and files) to run for these changes."""
    changed = list(changed)
    if any(name.startswith(_SHARED) for name in changed):
        return everything()
    rooms = {room_of(name) for name in changed} - {""}
    importers = {room for room, used in imports().items() if used & rooms}
    found = [name for room in sorted(rooms | importers) for name in _tests_of(room)]
    return [*found, *(name for name in everything() if name.endswith(".py"))]  # those are about all rooms


def everything() -> list[str]:
    """All folders and files with unit tests."""
    tests = ROOT / "tests"
    found = sorted(
        path for path in tests.iterdir() if path.name.startswith("test_") or list(path.glob("**/test_*.py"))
    )
    names = [str(path.relative_to(ROOT)) for path in found]
    return [name for name in names if name not in _NO_UNITS]


def room_of(name: str) -> str:
    """The room that a file belongs to, or whose tests it is; "" for a file of no room."""
    parts = Path(name).parts[:-1]
    if parts[:1] == ("tests",):
        parts = parts[1:]
    return "/".join(parts[: 2 if parts[:1] == (_WINGED,) else 1])


def imports() -> dict[str, set[str]]:
    """Room -> rooms that it imports directly."""
    found: dict[str, set[str]] = {}
    for package in [*shipped_packages(), "bench", "tools"]:
        folder = package.replace(".", "/")
        used = found.setdefault(room_of(f"{folder}/file"), set())
        for path in (ROOT / folder).glob("*.py"):
            used |= {room_of(name.replace(".", "/")) for name in _imported(path)}
    return found


def _imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _tests_of(room: str) -> list[str]:
    """Where a room's tests are. Those of the router's own files are beside the folders of its wings."""
    name = f"tests/{room}"
    if room == _WINGED:
        return [str(path.relative_to(ROOT)) for path in sorted((ROOT / name).glob("test_*.py"))]
    return [name] if name not in _NO_UNITS and any((ROOT / name).glob("**/test_*.py")) else []


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.split() if done.returncode == 0 else []


if __name__ == "__main__":
    sys.exit(main())
