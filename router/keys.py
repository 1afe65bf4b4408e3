"""Keys: who may pass a door. A file of keys is read again when it changes, so keys change without a restart.

Only digests are kept, and all of them are compared, so the time of an answer tells nothing of a key.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError, model_validator

from common.errors import ConfigError
from common.options import Options

log = logging.getLogger(__name__)

ADMIN_KEY_ENV = "BATON_ADMIN_KEY"
API_KEYS_ENV = "BATON_API_KEYS"
_LOOK_S = 1.0  # between two looks at a file
_SHORTEST_KEY = 16  # characters
_BEARER = "bearer "


@dataclass(frozen=True, slots=True)
class Key:
    """A key, by the SHA-256 of it, and what its requests may have."""

    digest: bytes
    tenant: str = ""
    max_priority: int = 0
    gateway: bool = False  # names the tenant of each request itself


class _Entry(Options):
    """An entry of a file of API keys."""

    key: str
    tenant: str = Field("", max_length=256)
    max_priority: int = Field(0, ge=-(2**31), lt=2**31)
    gateway: bool = False

    @model_validator(mode="after")
    def _one_tenant(self) -> _Entry:
        if self.gateway and self.tenant:
            raise ValueError("a gateway's key has no tenant of its own")
        return self


class Keys:
    """The keys of one door, from a file or from the environment. Belongs to one event loop."""

    def __init__(
        self, option: str, path: Path | None, variable: str, parse: Callable[[str], list[Key]]
    ) -> None:
        """Read `path` with `parse`, or keys alone from the environment's `variable` if there is no path.

        `option` names the path in errors. Raises ConfigError for keys that cannot work.
        """
        self._option = option
        self._path = path
        self._parse = parse
        self._state: tuple[int, ...] | None = None
        self.broken_files = 0  # changed files that could not be read
        self._looked_at = time.monotonic()
        if path is not None:
            self._state, self._keys = self._read(path)
        else:
            text = os.environ.get(variable, "")
            self._keys = _parsed(text.replace(",", "\n"), variable, plain_keys) if text else []

    @property
    def required(self) -> bool:
        """Whether this door has keys at all."""
        return bool(self._keys)

    def find(self, authorization: str | None, bare: str | None = None) -> Key | None:
        """The key that an Authorization header has as its bearer token, or else that a header is by itself;
        None: it is no key of this door."""
        self._look()
        if authorization is not None and authorization[: len(_BEARER)].lower() == _BEARER:
            bare = authorization[len(_BEARER) :]
        if bare is None:
            return None
        # Bytes of UTF-8 are read as characters here, and some of those count as spaces elsewhere.
        digest = hashlib.sha256(bare.strip(" \t").encode("latin-1")).digest()
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
            self.broken_files += 1
            log.error("the keys from before hold on: %s", error)

    def _read(self, path: Path) -> tuple[tuple[int, ...], list[Key]]:
        try:
            state, text = _state(path), path.read_text()  # a change in between is seen at the next look
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(self._option, f"cannot read {path}: {error}", "give a readable file") from None
        return state, _parsed(text, self._option, self._parse)


def _parsed(text: str, where: str, parse: Callable[[str], list[Key]]) -> list[Key]:
    try:
        keys = parse(text)
    except ValueError as error:
        raise ConfigError(where, str(error), "see docs/doors.md") from None
    if not keys:
        raise ConfigError(where, "there is no key in it", "add one, or do without")
    return keys


def plain_keys(text: str) -> list[Key]:
    """Keys, one on a line. Raises ValueError, which does not quote them."""
    return [Key(_digest(line.strip())) for line in text.splitlines() if line.strip()]


def described_keys(text: str) -> list[Key]:
    """Keys with their tenants: a list in YAML, or an object of JSON on each line.

    Raises ValueError, which does not quote them.
    """
    try:
        if text.lstrip().startswith("{"):
            raw: Any = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            raw = yaml.safe_load(text) or []
    except (ValueError, yaml.YAMLError):  # whose texts quote what they do not understand
        raise ValueError("it is neither YAML nor lines of JSON") from None
    if not isinstance(raw, list):
        raise ValueError("it is not a list of keys")
    return [_described_key(number, one) for number, one in enumerate(raw, 1)]


def _described_key(number: int, raw: Any) -> Key:
    try:
        entry = _Entry.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"entry {number}: {field}: {first['msg']}") from None
    return Key(_digest(entry.key), entry.tenant, entry.max_priority, entry.gateway)


def _digest(written: str) -> bytes:
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
