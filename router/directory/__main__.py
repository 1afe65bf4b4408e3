"""`python -m router.directory --options FILE.json`: the directory, in a process of its own.

Several routers share it, and it goes on when a router ends. Prints one line of JSON when it serves:
{"ready": true, "mailbox": ...}. Routers and workers are given that address as `directory`. What cannot work
is one line on stderr, and exit code 2. Ends on SIGTERM and SIGINT.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from pathlib import Path

from common.arguments import ExactParser
from common.descriptors import allow_descriptors
from common.options import exit_on_config_error, read_options
from router.directory.options import DirectoryOptions
from router.directory.server import DirectoryHost


def main() -> None:
    """Run the process."""
    parser = ExactParser(prog="python -m router.directory", description="Baton's directory")
    parser.add_argument(
        "--options", type=Path, required=True, help="a JSON file (router/directory/options.py)"
    )
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    told = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, told)  # before any thread is started, which inherits it
    allow_descriptors()
    with exit_on_config_error("directory"):
        options = read_options(DirectoryOptions, given.options).here()
        host = DirectoryHost(
            options.interface,
            options.secret(),
            options.lease_s,
            options.port,
            ports=options.ports.of("mailboxes"),
            is_new=options.port == 0,
        )
    with host:
        sys.stdout.write(json.dumps({"ready": True, "mailbox": host.address}) + "\n")
        sys.stdout.flush()
        signal.sigwait(told)


if __name__ == "__main__":
    main()
