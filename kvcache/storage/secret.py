"""The secret of the seals: the cluster's, or a key that is drawn once and kept in a file."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import threading
import time
from pathlib import Path

from common.errors import ConfigError
from common.secrets import ClusterSecret
from kvcache.storage.seal import Sealer

KEY_NAME = "baton.key"
_KEY_BYTES = 32
_KEY = "hicache_storage_path"

log = logging.getLogger(__name__)


class SealSecret:
    """Gives the Sealer of the secret in use. The cluster's is read again when its file changes; what was
    stored under the one before is then missing."""

    def __init__(self, secret: ClusterSecret | None, key: bytes = b"") -> None:
        """`key`: used where the cluster has no secret."""
        self._cluster = secret
        self._lock = threading.Lock()
        self._seen = secret.accepted[0] if secret is not None else key
        self._sealer = Sealer(self._seen)

    def sealer(self) -> Sealer:
        """Of the secret in use now."""
        if self._cluster is None:
            return self._sealer
        self._cluster.refresh(time.monotonic())
        with self._lock:
            secret = self._cluster.accepted[0]
            if secret != self._seen:
                self._seen, self._sealer = secret, Sealer(secret)
            return self._sealer


def key_in(path: Path) -> bytes:
    """The key in a file, which is made with a random one if it is not there. Processes that make it at once
    all get the same.

    Where no file can be made, the key is of this process only, and the log says so. Raises ConfigError for a
    file that is no key, or that other users may read.
    """
    try:
        return _read(path)
    except FileNotFoundError:
        pass
    try:
        _make(path)
        return _read(path)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC):
            raise ConfigError(
                _KEY, f"{path} cannot be made: {error.strerror}", "name a writable path"
            ) from None
        log.warning("stored pages are of this process only: %s cannot be made (%s)", path, error.strerror)
        return secrets.token_bytes(_KEY_BYTES)


def _make(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            os.fsync(descriptor)
        os.link(partial, path)  # unlike a rename it replaces none: the first one stays
    except FileExistsError:
        pass
    finally:
        partial.unlink(missing_ok=True)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise ConfigError(_KEY, f"{path} may be read by other users", f"chmod 600 {path}")
            key = file.read(_KEY_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(_KEY, f"cannot read {path}: {error.strerror}", "give a readable file") from None
    if len(key) != _KEY_BYTES:
        raise ConfigError(_KEY, f"{path} has no key of {_KEY_BYTES} bytes", "remove it: a new one is drawn")
    return key
