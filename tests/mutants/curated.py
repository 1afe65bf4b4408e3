"""The curated mutants, from the `.mutants` files beside this one.

tests: kvcache/test_pool.py kvcache/test_memory.py    below tests/, for all mutants from here on
kvcache/pool.py                                       the file, for all mutants from here on
-self._is_free[row] = True                            the old text, ...
+pass                                                 ... and the new one
?The reason why it survives, if no test can see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from tests.mutants.mutant import Mutant

_MARKS = ("-", "+", "?")


def read(path: Path) -> Iterator[Mutant]:
    """The mutants of one file, in order."""
    tests: tuple[str, ...] = ()
    file = old = ""
    waiting: Mutant | None = None  # for a reason, which may come after it
    for mark, lines in groupby(path.read_text().splitlines(), key=_mark):
        block = [*lines]
        text = "\n".join(line[1:] for line in block) if mark in _MARKS else block[0]
        if mark == "?" and waiting is not None:
            waiting = Mutant(waiting.path, waiting.old, waiting.new, waiting.tests, text)
            continue
        if waiting is not None:
            yield waiting
            waiting = None
        if mark == "-":
            old = text
        elif mark == "+":
            waiting = Mutant(file, old, text, tests)
        elif mark == "tests":
            tests = tuple(f"tests/{name}" for name in text.split()[1:])
        elif mark == "file":
            file = text
    if waiting is not None:
        yield waiting


def _mark(line: str) -> str:
    if line.startswith("tests: "):
        return "tests"
    return line[0] if line[:1] in _MARKS else "file" if line else "nothing"


MUTANTS = [mutant for path in sorted(Path(__file__).parent.glob("*.mutants")) for mutant in read(path)]
