"""`python -m tests.chaos.directory --options FILE`: a directory in a process of its own."""

from __future__ import annotations

import json
import signal
import sys

from router.directory.server import DirectoryHost


def main() -> None:
    """Serve until SIGTERM."""
    with DirectoryHost() as host:
        sys.stdout.write(json.dumps({"ready": True, "mailbox": host.address}) + "\n")
        sys.stdout.flush()
        signal.sigwait({signal.SIGTERM})


if __name__ == "__main__":
    main()
