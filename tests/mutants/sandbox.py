"""Sandbox: a copy of the working tree in which one mutant at a time is tested."""

from __future__ import annotations

import compileall
import json
import os
import py_compile
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mutant import ROOT, Mutant

_TOO_LONG_S = 240  # of one mutant's tests: it then counts as killed, because the tests hang
_ALL_TOO_LONG_S = 1800  # of all tests without a mutant
_MARKERS = "not oracle_full and not invariants and not e2e and not ray_smoke and not quality and not peers"
_PYTEST_FAILED, _PYTEST_PASSED = 1, 0


@dataclass(frozen=True)
class Verdict:
    """What the tests said of a mutant."""

    mutant: Mutant
    outcome: str  # "killed", "survived", "skipped": none of its tests runs here, or "invalid": pytest failed
    seconds: float
    why: str  # the first failure, or the last lines that pytest printed


class Sandbox:
    """Owns a folder with a copy of all files of the working tree that git does not ignore, and a process that
    runs tests there. Close it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._printed = folder.with_suffix(".out")  # by pytest
        self._server: subprocess.Popen[str] | None = None  # from the first tests on
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
            status, said = self._run_tests(mutant.tests, _TOO_LONG_S)
        finally:
            place.write_text(whole)
        outcome = {_PYTEST_PASSED: "survived", _PYTEST_FAILED: "killed"}.get(status, "invalid")
        if outcome == "survived" and " passed" not in said:
            outcome = "skipped"
        return Verdict(mutant, outcome, time.monotonic() - began, said)

    def run_all(self, tests: Iterable[str], *arguments: str) -> tuple[int, str]:
        """Run the tests of all mutants without any. Returns pytest's exit code and what it said in short."""
        return self._run_tests(tests, _ALL_TOO_LONG_S, *arguments)

    def close(self) -> None:
        """End its process."""
        if self._server is not None:
            self._server.kill()
            self._server.communicate()

    def _run_tests(self, tests: Iterable[str], limit_s: int, *arguments: str) -> tuple[int, str]:
        """Until one fails."""
        command = [
            "-x", "-m", _MARKERS, "-p", "tests.mutants.quick_examples",
            "-p", "no:cacheprovider", "--tb=no", "-rfE", "--hypothesis-seed=0", *arguments, *tests,
        ]  # fmt: skip
        answer = self._ask([str(self._printed), limit_s, command])
        if answer == "hung":
            return _PYTEST_FAILED, f"the tests hung for {limit_s} s"
        lines = self._printed.read_text().strip().splitlines()
        failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        # What a failed test leaves behind may make pytest itself raise at the end, with another exit code.
        status = _PYTEST_FAILED if failures else int(answer)
        return status, (failures or lines or ["nothing was printed"])[-1]

    def _ask(self, what: object) -> str:
        if self._server is None:
            environment = {**os.environ, "PYTHONPATH": str(self._folder), "PYTHONDONTWRITEBYTECODE": "1"}
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.mutants.fork_server"],
                cwd=self._folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(what) + "\n")
        self._server.stdin.flush()
        return self._server.stdout.readline().strip()
