"""The cluster's secret: from a file, which is read again when it changes, or from the environment."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from common.errors import ConfigError
from common.host import is_loopback

SECRET_VARIABLE = "BATON_CLUSTER_SECRET"  # noqa: S105 - a name
_KEY = "cluster_secret_file"
_REMEDY = "write one that is drawn at random, for example with `openssl rand -hex 32`"
_LEAST_CHARACTERS = 22  # 128 bits in base64
_LEAST_HEX = 32  # 128 bits in hexadecimal
_LEAST_DISTINCT = 8
_PLACEHOLDER = re.compile(rb"change.?me|secret|password|placeholder|example", re.IGNORECASE)
_HEX = re.compile(rb"[0-9a-fA-F]+")
_CHECK_S = 1.0
_LARGEST_FILE = 65_536  # bytes

log = logging.getLogger(__name__)


class ClusterSecret:
    """What every member of the cluster knows. `accepted` are all valid secrets; the first one is in use.

    A file has one secret per line. To replace a secret: add the new one below it everywhere, then put the new
    one first everywhere, then remove the old one. Processes read the file again within a second or two.
    """

    def __init__(self, accepted: tuple[bytes, ...], path: Path | None = None) -> None:
        """`path`: where `accepted` comes from and is read again. Use `open_secret`, which checks them."""
        self.accepted = accepted
        self._path = path
        self._stamp = None if path is None else _stamp(path)
        self._check_at = 0.0

    def refresh(self, now: float) -> None:
        """Read the file again if it has changed. One that cannot be used is logged, and changes nothing.

        May be called from any thread, and often: the file is looked at once a second.
        """
        if self._path is None or now < self._check_at:
            return
        self._check_at = now + _CHECK_S
        try:
            stamp = _stamp(self._path)
            if stamp != self._stamp:
                self._stamp = stamp
                self.accepted = _read(self._path)
        except (OSError, ConfigError) as error:
            log.error("the changed cluster secret cannot be used, the old one stays: %s", error)


def secret_in_use(secret: ClusterSecret | None) -> bytes:
    """The secret from which keys are derived now; b"" in a cluster without one."""
    return secret.accepted[0] if secret is not None else b""


def open_secret(path: Path | None) -> ClusterSecret | None:
    """The secret in a file, else that of BATON_CLUSTER_SECRET, else None.

    Raises ConfigError for a file that cannot be read or that other users may read, and for a secret that is
    too short or a placeholder.
    """
    if path is not None:
        return ClusterSecret(_read(path), path)
    given = os.environ.get(SECRET_VARIABLE)
    return ClusterSecret((_checked(given.strip().encode(), SECRET_VARIABLE),)) if given is not None else None


def members_secret(path: Path | None, interface: str) -> ClusterSecret | None:
    """The secret for sockets that are bound to `interface`; None: they are on loopback and need none.

    Options were checked where they were read, which may have been in another process with another
    environment. Raises ConfigError for what `open_secret` does, and for no secret off loopback.
    """
    secret = open_secret(path)
    if secret is None and not is_loopback(interface):
        raise ConfigError(
            _KEY,
            f"{interface} is open to the network, and the environment here lacks {SECRET_VARIABLE}",
            "set it for Ray on every node, or in `env` of each deployment, or give a file",
        )
    return secret


def _read(path: Path) -> tuple[bytes, ...]:
    try:
        if path.stat().st_mode & 0o007:
            raise ConfigError(_KEY, f"{path} may be read by every user of the host", f"chmod 600 {path}")
        with path.open("rb") as file:
            lines = file.read(_LARGEST_FILE).split(b"\n")
    except OSError as error:
        raise ConfigError(_KEY, f"cannot read {path}: {error.strerror}", "give a readable file") from None
    found = tuple(_checked(line.strip(), _KEY) for line in lines if line.strip())
    if not found:
        raise ConfigError(_KEY, f"{path} has no secret", _REMEDY)
    return found


def _checked(secret: bytes, key: str) -> bytes:
    least = _LEAST_HEX if _HEX.fullmatch(secret) else _LEAST_CHARACTERS
    if _PLACEHOLDER.search(secret):
        raise ConfigError(key, "the secret is a placeholder", _REMEDY)
    if len(secret) < least or len(set(secret)) < _LEAST_DISTINCT:
        raise ConfigError(key, "the secret has fewer than 128 bits", _REMEDY)
    return secret


def _stamp(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_ino, found.st_size
