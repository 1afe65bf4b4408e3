"""This host: default addresses, and its identity among hosts."""

from __future__ import annotations

import os
from pathlib import Path

LOOPBACK = "127.0.0.1"
HTTP_PORT = 8000  # where the API listens unless told


def host_identity() -> str:
    """Names the host; between two processes of equal identity, shared memory and Unix sockets work.

    Made of the boot id, the network namespace (abstract Unix sockets live in it) and the PID namespace
    (pidfd needs it).
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/net')}/{os.readlink('/proc/self/ns/pid')}"


def process_start(pid: int) -> int:
    """When a process of this host was started, in clock ticks since the boot. 0: there is none to be seen.

    With the pid it names a process for as long as the host is up.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])  # the name, in parentheses, may contain anything
