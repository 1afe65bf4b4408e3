"""Tls: the certificate of a listener. New connections have the new one when its files have changed."""

from __future__ import annotations

import logging
import ssl
import time
from pathlib import Path

from common.errors import ConfigError

log = logging.getLogger(__name__)

_LOOK_S = 1.0  # between two looks at the files
_State = list[tuple[int, int, int]]


class Tls:
    """A certificate with its key, in PEM files. Belongs to one event loop."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Load them. Raises ConfigError."""
        self._files = certificate, key
        try:
            self._state = self._look()
            self.context = self._load()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError("tls_cert", f"{certificate} with {key}: {error}", "give both as PEM") from None
        self._looked_at = time.monotonic()

    def tick(self) -> None:
        """Load the files again if they have changed. Call it about once a second."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        try:
            state = self._look()
            if state == self._state:
                return
            self._state = state
            self._load()  # a certificate and a key that do not match would break the context that is in use
            self.context.load_cert_chain(*self._files, password=_no_password)
            log.warning("new connections get the new certificate of %s", self._files[0])
        except (OSError, ssl.SSLError) as error:
            log.error("the certificate from before is in use: %s with %s: %s", *self._files, error)

    def _look(self) -> _State:
        found = [file.stat() for file in self._files]
        return [(one.st_ino, one.st_size, one.st_mtime_ns) for one in found]

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(*self._files, password=_no_password)
        return context


def _no_password() -> str:
    """OpenSSL would ask at the terminal."""
    raise ssl.SSLError("the key has a password")
