"""Keys: who may pass a door. A file of keys is read again when it changes, so keys change without a restart.

Only digests are kept, and all of them are compared, so the time of an answer tells nothing of a key.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError

log = logging.getLogger(__name__)

ADMIN_KEY_ENV = "BATON_ADMIN_KEY"
_LOOK_S = 1.0  # between two looks at a file
_SHORTEST_KEY = 16  # characters
_BEARER = "bearer "


@dataclass(frozen=True, slots=True)
class Key:
    """A key, by the SHA-256 of it."""

    digest: bytes


class Keys:
    """The keys of one door, from a file or from the environment. Belongs to one event loop."""

    def __init__(
        self, option: str, path: Path | None, variable: str, parse: Callable[[str], list[Key]]
    ) -> None:
        """Read `path`, or the environment's `variable` if there is no path. `option` names the path.

        Raises ConfigError for keys that cannot work.
        """
        self._option = option
        self._path = path
        self._parse = parse
        self._state: tuple[int, ...] | None = None
        self._looked_at = time.monotonic()
        if path is not None:
            self._state, self._keys = self._read(path)
        else:
            text = os.environ.get(variable, "")
            self._keys = self._parsed(text, variable) if text else []

    @property
    def required(self) -> bool:
        """Whether this door has keys at all."""
        return bool(self._keys)

    def find(self, authorization: str | None) -> Key | None:
        """The key that an Authorization header has as its bearer token; None: it has no key of this door."""
        self._look()
        if authorization is None or authorization[: len(_BEARER)].lower() != _BEARER:
            return None
        digest = hashlib.sha256(authorization[len(_BEARER) :].strip().encode()).digest()
        found = [key for key in self._keys if hmac.compare_digest(key.digest, digest)]
        return found[0] if found else None

    def _look(self) -> None:
        now = time.monotonic()
        if self._path is None or now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        try:
            if _state(self._path) != self._state:
                self._state, self._keys = self._read(self._path)
                log.info("%s: %d keys of %s hold from now on", self._option, len(self._keys), self._path)
        except (ConfigError, OSError) as error:
            log.error("the keys from before hold on: %s", error)

    def _read(self, path: Path) -> tuple[tuple[int, ...], list[Key]]:
        try:
            state, text = _state(path), path.read_text()  # a change in between is seen at the next look
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(self._option, f"cannot read {path}: {error}", "give a readable file") from None
        return state, self._parsed(text, self._option)

    def _parsed(self, text: str, where: str) -> list[Key]:
        try:
            keys = self._parse(text)
        except ValueError as error:
            raise ConfigError(where, str(error), "see docs/doors.md") from None
        if not keys:
            raise ConfigError(where, "there is no key in it", "add one, or do without")
        return keys


def plain_keys(text: str) -> list[Key]:
    """Keys, one on a line. Raises ValueError, which does not quote them."""
    return [Key(key_digest(line.strip())) for line in text.splitlines() if line.strip()]


def key_digest(written: str) -> bytes:
    """The digest of a key that is written as itself or as sha256:HEX. Raises ValueError."""
    kind, colon, digest = written.partition(":")
    if kind == "sha256" and colon:
        if len(digest) != 64:
            raise ValueError("a sha256: is followed by 64 hexadecimal digits")
        return bytes.fromhex(digest)
    if len(written) < _SHORTEST_KEY:
        raise ValueError(f"a key has at least {_SHORTEST_KEY} characters")
    return hashlib.sha256(written.encode()).digest()


def _state(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns
