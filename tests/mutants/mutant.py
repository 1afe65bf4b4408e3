"""Mutant: one fault, and where it is put."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutant:
    """In the file `path`, the text `old`, which occurs once, becomes `new`.

    `old` is as short as it can be, so that changes nearby leave the mutant as it is. `tests` are pytest's
    names of the tests that should fail: the fewest and fastest. `survives` says why none can; "" for all but
    a few.
    """

    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    survives: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {_one_line(self.old)} -> {_one_line(self.new) or '(nothing)'}"

    def spoilt(self, text: str) -> str:
        """The file's text with the fault. Raises ValueError when `old` is not there exactly once."""
        times = text.count(self.old)
        if times != 1:
            raise ValueError(f"{self}: the old text is there {times} times")
        return text.replace(self.old, self.new)

    @property
    def test_files(self) -> set[str]:
        """The files in which its tests are."""
        return {name.partition("::")[0] for name in self.tests}


def _one_line(text: str) -> str:
    return " ".join(text.split())
