"""The number of files and sockets that a process may have open."""

from __future__ import annotations

import resource

_MANY = 65_536  # thousands of peers: a connection takes three descriptors


def allow_descriptors(wanted: int = _MANY) -> int:
    """Raise the soft limit to `wanted`, or as far as it goes, if it is lower. Returns what it is then.

    The usual soft limit of 1,024 is for programs that use select(); Ray starts its workers with it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft
