"""One process of a host at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from common.errors import ConfigError

WAIT_S = 1800.0  # for another replica that pulls
_POLL_S = 0.1  # flock has no wait with a bound


@contextmanager
def once_per_host(lock: Path, wait_s: float = WAIT_S) -> Iterator[None]:
    """Whoever else is in here on this host is waited for. Raises ConfigError after `wait_s`."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    # A soft lock, without flock, would outlive a process that is killed.
    held = FileLock(lock, timeout=wait_s, poll_interval=_POLL_S, fallback_to_soft=False)
    try:
        held.acquire()
    except Timeout:
        raise ConfigError(
            "model",
            f"another process of this host has been pulling it for {wait_s:g} s ({lock} is locked)",
            "see what it waits for, or start again",
        ) from None
    try:
        yield
    finally:
        held.release()
