"""Hostile HTTP requests on a running Baton.

python -m tests.fuzz [--scale X]

After each batch an honest streamed chat must have its answer within a second. There may be no 5xx but a 503
with Retry-After, no traceback in a log, no process that ends, no page that is still held, no descriptor more
than before, and less than 64 MiB more memory. The last line is JSON: {http, frames, peers, unexpected_5xx,
hangs, crashes, rss_growth_mib, fd_growth}.
"""

from __future__ import annotations

import argparse
import signal
import sys

from tests.fuzz.findings import Findings
from tests.fuzz.http_batches import send_http
from tests.fuzz.target import target

_REQUESTS = 10_000
_WARM_UP = 500  # everything has been used once


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 when all of that held."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of requests")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the stack is ended then, too
    findings = run(options.scale)
    sys.stdout.write(f"{findings.line()}\n")
    return 0 if findings.held else 1


def run(scale: float) -> Findings:
    """All parts, at a share of their numbers."""
    findings, count = Findings(), int(scale * _REQUESTS)
    with target(findings) as attacked:
        send_http(attacked, min(_WARM_UP, count), borders=False)
        attacked.remember_footprint()
        send_http(attacked, count, borders=scale >= 1)
        attacked.compare_footprint()
    return findings


if __name__ == "__main__":
    sys.exit(main())
