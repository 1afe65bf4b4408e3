"""Hostile input on every door of a running Baton.

python -m tests.fuzz [--only http|frames|peers] [--scale X]

HTTP requests to the router; frames to the mailboxes of router, workers and directory, to the workers' replay
sockets, to their publishers of KV events and, from a publisher, to the router; bytes that are not ZMTP to the
ports of them all; and peers of the KV channels.
Frames and peers come to a cluster without a secret, where everybody is a member, and from a lying member of a
cluster that has one.

After each batch an honest streamed chat must have its answer within a second. There may be no 5xx but a 503
with Retry-After, no traceback in a log, no process that ends, no page that is still held, no descriptor more
than before, and less than 64 MiB more memory in the processes of either cluster together. The last line is
JSON: {http, frames, peers, unexpected_5xx, hangs, crashes, rss_growth_mib, fd_growth}.
"""

from __future__ import annotations

import argparse
import signal
import sys

from tests.fuzz.findings import Findings
from tests.fuzz.frame_batches import send_all_frames, send_all_peers
from tests.fuzz.http_batches import send_http
from tests.fuzz.target import Target, target

_REQUESTS = 10_000
_FRAMES = 100_000  # to each kind of socket
_PEERS = 1_000
_WARM_UP = 0.1  # of the numbers: after it, bounded buffers and caches are about full
_PARTS = ("http", "frames", "peers")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 when all of that held."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=_PARTS, help="one part")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="of the numbers of requests, frames and peers"
    )
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the stack is ended then, too
    parts = _PARTS if options.only is None else (options.only,)
    findings = run(parts, options.scale)
    sys.stdout.write(f"{findings.line()}\n")
    return 0 if findings.held else 1


def run(parts: tuple[str, ...], scale: float) -> Findings:
    """These parts, at a share of their numbers: half of the frames and peers with a secret, half without."""
    findings = Findings()
    for has_secret in (False, True):
        with target(findings, has_secret=has_secret) as attacked:
            chosen = [part for part in parts if part != "http" or not has_secret]
            for part in chosen:
                _send(attacked, part, min(scale, _WARM_UP), borders=False)
            attacked.remember_footprint()
            for part in chosen:
                _send(attacked, part, scale, borders=scale >= 1)
            attacked.compare_footprint()
    return findings


def _send(attacked: Target, part: str, scale: float, borders: bool) -> None:
    if part == "http":
        send_http(attacked, int(scale * _REQUESTS), borders)
    elif part == "frames":
        send_all_frames(attacked, int(scale * _FRAMES) // 2)
    else:
        send_all_peers(attacked, int(scale * _PEERS) // 2)


if __name__ == "__main__":
    sys.exit(main())
