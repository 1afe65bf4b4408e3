"""Run one of our programs behind a bad network: `python -m tests.support.chaos SEED MODULE --options FILE`.

What the program's mailbox sends is dropped, doubled and delayed (and so reordered) at random. The program
itself does not know.
"""

from __future__ import annotations

import heapq
import itertools
import random
import runpy
import sys
import threading
import time
import zlib

from wire.mailbox import Mailbox
from wire.messages import Announce, Announced, AnyMessage, Inspect, Inspected, Watch

DROP, DOUBLE, DELAY = 0.04, 0.3, 0.5
LONGEST_DELAY_S = 0.06
UNTOUCHED = (Announce, Announced, Watch, Inspect, Inspected)  # the directory and the test's own questions


class BadNetwork:
    """Stands in front of Mailbox.send."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._order = itertools.count()
        self._late: list[tuple[float, int, Mailbox, str, AnyMessage]] = []
        self._changed = threading.Condition()
        self._send = Mailbox.send
        threading.Thread(target=self._deliver_late, daemon=True).start()

    def send(self, mailbox: Mailbox, to: str, message: AnyMessage) -> None:
        """Perhaps not, perhaps twice, perhaps later."""
        if isinstance(message, UNTOUCHED):
            self._send(mailbox, to, message)
            return
        with self._changed:
            if self._rng.random() < DROP:
                return
            for _ in range(1 + (self._rng.random() < DOUBLE)):
                delay = self._rng.random() * LONGEST_DELAY_S if self._rng.random() < DELAY else 0.0
                entry = (time.monotonic() + delay, next(self._order), mailbox, to, message)
                heapq.heappush(self._late, entry)
            self._changed.notify()

    def _deliver_late(self) -> None:
        while True:
            with self._changed:
                wait_s = self._late[0][0] - time.monotonic() if self._late else None
                if wait_s is None or wait_s > 0:
                    self._changed.wait(wait_s)
                    continue
                _, _, mailbox, to, message = heapq.heappop(self._late)
            self._send(mailbox, to, message)


def main() -> None:
    """Patch, then run the module as if it had been started itself."""
    seed, module, *arguments = sys.argv[1:]
    network = BadNetwork(int(seed) + zlib.crc32(module.encode()))
    Mailbox.send = lambda mailbox, to, message: network.send(mailbox, to, message)  # type: ignore[method-assign]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
