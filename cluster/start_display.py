"""What `baton serve` prints while it starts and ends: lines with the seconds since it was called."""

from __future__ import annotations

import sys
import time

from cluster.directory_actor import DirectoryFinder
from common.errors import Unavailable


class StartDisplay:
    """Prints its own lines, and those of workers that start."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._last_note = 0

    def say(self, text: str) -> None:
        """Print one line at once."""
        sys.stdout.write(f"{time.monotonic() - self._since:6.1f} s  {text}\n")
        sys.stdout.flush()

    def say_notes(self, finder: DirectoryFinder) -> None:
        """Print what workers have said since the last call. Without a directory there is nothing."""
        try:
            notes = finder.start_notes(self._last_note)
        except Unavailable:
            return
        for note in notes:
            self._last_note = note.number
            self.say(f"{note.worker}: {note.text}")
