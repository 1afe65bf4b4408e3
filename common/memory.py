"""Memory that this process can still take.

A container's limit is that of a control group. Control groups nest, and every limit above a process counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from common.errors import ConfigError


class _Files(NamedTuple):
    """Names in the folder of a control group."""

    limit: str
    used: str
    reclaimable: tuple[str, ...]  # rows of memory.stat


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_V2 = _Files("memory.max", "memory.current", ("inactive_file", "active_file"))


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can be allocated now without swapping: Linux's estimate, or less where a limit leaves less.

    Raises ConfigError if the system does not say it.
    """
    rows = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    free = next((int(row[1]) * 1024 for row in rows if row[0] == "MemAvailable:"), None)
    if free is None:
        raise ConfigError("max_total_tokens", "free memory is unknown on this system", "set it")
    return max(0, min([free, *_left_by_limits(root)]))


def _left_by_limits(root: Path) -> Iterator[int]:
    """Of this process's control group and those above it, as far as they are mounted."""
    mounted = root / "sys/fs/cgroup"
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _upwards(mounted, path, _V2)
        elif "memory" in controllers.split(","):
            yield from _upwards(mounted / "memory", path, _V1)


def _upwards(mounted: Path, path: str, files: _Files) -> Iterator[int]:
    """In a container the mounted folder may itself be the group that `path` names as the host sees it."""
    group = mounted / path.lstrip("/")
    for folder in (group, *group.parents):
        if folder.is_relative_to(mounted) and (left := _left(folder, files)) is not None:
            yield left


def _left(folder: Path, files: _Files) -> int | None:
    """What is cached of files counts as free, as in Linux's own estimate. None: there is no limit."""
    try:
        limit, used = (int((folder / name).read_text()) for name in (files.limit, files.used))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group here, or its limit is "max"
        return None
    return limit - used + sum(int(stat.get(name, 0)) for name in files.reclaimable)
