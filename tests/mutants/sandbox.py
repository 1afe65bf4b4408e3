"""Sandbox: a copy of the working tree in which one mutant at a time is tested."""

from __future__ import annotations

import compileall
import os
import py_compile
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mutant import ROOT, Mutant

_TOO_LONG_S = 240  # of one mutant's tests: it then counts as killed, because the tests hang
_MARKERS = "not oracle_full and not invariants and not e2e and not ray_smoke and not quality and not peers"
_PYTEST_FAILED, _PYTEST_PASSED = 1, 0


@dataclass(frozen=True)
class Verdict:
    """What the tests said of a mutant."""

    mutant: Mutant
    outcome: str  # "killed", "survived" or "invalid": the tests did not run
    seconds: float
    why: str  # the first failure, or the last lines that pytest printed


class Sandbox:
    """Owns a folder with a copy of all files of the working tree that git does not ignore."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        # By hash, not by time: a mutant may have the size and the second of the file that it replaces.
        by_hash = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(folder, quiet=1, invalidation_mode=by_hash)

    def try_out(self, mutant: Mutant) -> Verdict:
        """Put the fault in, run its tests, take it out."""
        place = self._folder / mutant.path
        whole = place.read_text()
        place.write_text(mutant.spoilt(whole))
        began = time.monotonic()
        try:
            status, said = self.run_tests(mutant.tests)
        finally:
            place.write_text(whole)
        outcome = {_PYTEST_PASSED: "survived", _PYTEST_FAILED: "killed"}.get(status, "invalid")
        return Verdict(mutant, outcome, time.monotonic() - began, said)

    def run_tests(self, tests: Iterable[str], *arguments: str) -> tuple[int, str]:
        """Run these tests until one fails. Returns pytest's exit code and what it said in short."""
        command = [
            sys.executable, "-m", "pytest", "-x", "-m", _MARKERS, "-p", "tests.mutants.quick_examples",
            "-p", "no:cacheprovider", "--tb=no", "-rfE", "--hypothesis-seed=0", *arguments, *tests,
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(self._folder), "PYTHONDONTWRITEBYTECODE": "1"}
        with tempfile.TemporaryFile("w+") as printed:  # a pipe stays open for what a mutant leaves
            process = subprocess.Popen(
                command,
                cwd=self._folder,
                env=environment,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(_TOO_LONG_S)
            except subprocess.TimeoutExpired:
                return _PYTEST_FAILED, f"the tests hung for {_TOO_LONG_S} s"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            printed.seek(0)
            lines = printed.read().strip().splitlines()
        failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        return process.returncode, (failures or lines or ["nothing was printed"])[-1]
