"""Which ports of this host were used lately: a new process takes others, as peers may still send there.

Every user has one file for each network namespace: the ports that were seen in use, and since when those that
no longer are have been free. It is written when a port is chosen, from what can be bound then. So a process
that is killed needs to write nothing: its ports count as free from the next look on, which is later than its
end. Everybody reads the files of all users. They are in the directory for temporary files; containers that
share a network but not that directory do not know of each other's ports. There a random order has to do, and
that a successor refuses what is not for it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

REST_S = 120.0  # a port that was used is not used again for so long, if there is another
LONGEST_LEASE_S = REST_S / 2
_LOCK_S = 10.0  # another process is choosing its ports meanwhile
_LARGEST_FILE = 1 << 22
log = logging.getLogger(__name__)


class Use(NamedTuple):
    """What was seen of a port `at` a time, in seconds since the boot: it was in use, or free from then on."""

    at: float
    in_use: bool


@dataclass(frozen=True, slots=True)
class KnownPorts:
    """The ports of a range, by what is known of them."""

    fresh: list[int]  # free for REST_S, in a random order
    resting: list[int]  # free for less, the longest first
    taken: list[int]  # by whomever

    @property
    def order(self) -> list[int]:
        """All of them, best first. The taken ones are last: one may be free by now."""
        return [*self.fresh, *self.resting, *self.taken]


@contextmanager
def known_ports(host: str, choice: range) -> Iterator[KnownPorts]:
    """The ports of an address, while no other process of this user chooses one. What is bound when the
    context ends is noted. Where the record cannot be had, all ports are fresh, and the log says why."""
    with ExitStack() as until_here:
        record: _Record | None = None
        known = KnownPorts(_shuffled(choice), [], [])
        try:
            record = until_here.enter_context(_locked_record())
            known = record.look(host, choice)
        except (OSError, Timeout) as error:
            log.warning("ports are chosen without the record of those that were used: %s", error)
        yield known
        if record is not None:
            try:
                record.look(host, choice)
                record.write()
            except OSError as error:
                log.warning("it is not recorded which ports of %s are used: %s", host, error)


@contextmanager
def only_fresh(host: str, choice: range, least: int) -> Iterator[None]:
    """For a library that takes ports of a range by itself: meanwhile those that rest cannot be bound. If
    fewer than `least` are fresh, those that have rested longest can."""
    with known_ports(host, choice) as known, ExitStack() as held:
        needed = max(0, least - len(known.fresh))
        if known.resting[:needed]:
            warn_of_reuse(host, known.resting[:needed])
        for port in known.resting[needed:]:
            placeholder = held.enter_context(socket.socket())
            _binds(placeholder, host, port)  # if it is taken meanwhile, it cannot be bound either
        yield


def warn_of_reuse(host: str, ports: Iterable[int]) -> None:
    """Say that a range is too small."""
    log.warning(
        "port %s of %s was used less than %g s ago, and no other of its range is free: give a larger one",
        ", ".join(map(str, ports)), host, REST_S,
    )  # fmt: skip


class _Record:
    """This user's file, and what those of the others say."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._now = _since_boot()
        self._uses: dict[str, Use] = {}
        for one in sorted(path.parent.glob(f"{path.stem}.*[0-9]")):
            for address, use in _read(one).items():
                if address not in self._uses or use > self._uses[address]:
                    self._uses[address] = use._replace(at=min(use.at, self._now))

    def look(self, host: str, choice: range) -> KnownPorts:
        """Note what is in use, and what no longer is."""
        self._now = _since_boot()
        known = KnownPorts([], [], [])
        for port in _shuffled(choice):
            address = f"{host}:{port}"
            use = self._uses.get(address)
            if not _is_free(host, port):
                self._uses[address] = Use(self._now, in_use=True)
                known.taken.append(port)
            elif use is None or (not use.in_use and self._now - use.at >= REST_S):
                known.fresh.append(port)
            else:
                self._uses[address] = Use(self._now if use.in_use else use.at, in_use=False)
                known.resting.append(port)
        known.resting.sort(key=lambda port: self._uses[f"{host}:{port}"].at)
        return known

    def write(self) -> None:
        """Replace the file. What has rested stays in it: another user's may say that it is in use."""
        partial = Path(f"{self._path}.part")  # the lock is held, so nobody else has it
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with os.fdopen(os.open(partial, flags, 0o644), "w") as file:
            json.dump(self._uses, file)
            os.fchmod(file.fileno(), 0o644)  # whatever the umask is
        partial.replace(self._path)


@contextmanager
def _locked_record() -> Iterator[_Record]:
    """Raises OSError and Timeout."""
    path = _path()
    lock = FileLock(f"{path}.lock", timeout=_LOCK_S, mode=0o600, fallback_to_soft=False)
    with lock:  # the kernel's: it ends with the process that has it
        yield _Record(path)


def _path() -> Path:
    """Of this user, boot and network namespace. Ports of another boot say nothing."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    network = hashlib.sha256(f"{boot}/{os.readlink('/proc/self/ns/net')}".encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir(), f"baton-ports-{network}.{os.getuid()}")


def _read(path: Path) -> dict[str, Use]:
    """What a file says. One that another user spoilt says nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode) or about.st_size > _LARGEST_FILE:
                raise ValueError("it is no record")
            uses = {address: Use(float(at), bool(used)) for address, (at, used) in json.load(file).items()}
        if not all(math.isfinite(use.at) for use in uses.values()):
            raise ValueError("a time is not finite")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("%s does not say which ports were used: %s", path, error)
        return {}
    return uses


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:  # without SO_REUSEADDR, so that a connection's remains count as use
        return _binds(probe, host, port)


def _binds(sock: socket.socket, host: str, port: int) -> bool:
    try:
        sock.bind((host, port))
    except OSError as error:
        # An address that cannot be bound at all is reported by whoever binds to it.
        return error.errno != errno.EADDRINUSE
    return True


def _shuffled(choice: range) -> list[int]:
    return secrets.SystemRandom().sample(choice, len(choice))


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
