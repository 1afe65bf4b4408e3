"""What workers say while they start, from their log to the terminal."""

from __future__ import annotations

import re
from typing import cast

import pytest

from cluster.directory_actor import DirectoryFinder
from cluster.start_display import StartDisplay
from cluster.start_notes import StartNote, StartNotes, told
from common.errors import Unavailable
from common.start_log import start_log


class _Finder:
    """A directory whose actor keeps `notes`, or does not answer."""

    def __init__(self, notes: StartNotes | None) -> None:
        self.notes = notes

    def start_notes(self, after: int) -> list[StartNote]:
        """As DirectoryFinder.start_notes."""
        if self.notes is None:
            raise Unavailable("no actor")
        return self.notes.after(after)


def test_each_note_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    finder, display = _Finder(None), StartDisplay()
    display.say_notes(cast("DirectoryFinder", finder))
    finder.notes = StartNotes()
    with told(lambda text: finder.notes.add("decode-a", text) if finder.notes else None):
        start_log.info("loading %s", "m")
        display.say_notes(cast("DirectoryFinder", finder))
        start_log.info("ready")
    start_log.info("said to nobody")
    display.say_notes(cast("DirectoryFinder", finder))
    display.say_notes(cast("DirectoryFinder", finder))
    lines = [re.sub(r"^ *\d+\.\d s  ", "", line) for line in capsys.readouterr().out.splitlines()]
    assert lines == ["decode-a: loading m", "decode-a: ready"]


def test_the_newest_notes_are_kept() -> None:
    notes = StartNotes()
    for number in range(1000):
        notes.add("w", str(number))
    kept = notes.after(0)
    assert kept[-1] == StartNote(1000, "w", "999")
    assert len(kept) < 1000
    assert notes.after(998) == kept[-2:]
