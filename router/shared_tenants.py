"""SharedTenants: the generations of tenants that were forgotten, the same in all routers of a directory.

Two say them: an operator at an admin listener, and other routers through the directory. The latest holds
(wire/settings.py). While one router, worker or directory lives, nothing is lost. A file keeps them beyond
that, because storage outlives all processes: an old generation must not hold again.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import secrets
import time
from pathlib import Path

import msgspec

from common.errors import ConfigError, InvalidRequest, Unavailable
from wire.settings import MOST_SETTINGS, NO_SETTINGS, Settings, TenantGeneration

log = logging.getLogger(__name__)

_MOST_FORGOTTEN = 16  # older generations that are remembered, of each tenant
_MS = 1000


class SharedTenants:
    """Belongs to one event loop."""

    def __init__(self, path: Path | None) -> None:
        """`path` is a file, which several processes may share; None: nothing is kept. Raises ConfigError for
        one that cannot be read."""
        self.settings = NO_SETTINGS  # all that this router knows, to be told to the directory
        self._path = path
        self._directory: Settings | None = None  # what the last View said; None: there was none
        self._view = asyncio.Event()  # of the next View
        if path is not None:
            self.settings = _read(path)

    def generation(self, tenant: str) -> int:
        """A tenant's, now."""
        known = self.settings.tenants.get(tenant)
        return 0 if known is None else known.revision

    def take(self, told: Settings) -> None:
        """Take what a View says."""
        self._directory = told
        known = self.settings.with_told(Settings(tenants=told.tenants))
        if known is not self.settings:
            self.settings = known
            try:
                self._keep()
            except OSError as error:
                log.error("%s cannot be written: %s", self._path, error)
        self._view.set()
        self._view = asyncio.Event()

    def forget(self, tenant: str) -> TenantGeneration:
        """Give a tenant its next generation, here, from now on, and keep it.

        Raises InvalidRequest when too many tenants were forgotten, Unavailable for a file that cannot be
        written: then nothing has changed.
        """
        before = self.settings.tenants.get(tenant)
        if before is None and len(self.settings.tenants) >= MOST_SETTINGS:
            raise InvalidRequest(f"{MOST_SETTINGS} tenants were forgotten: no more are remembered", "tenant")
        # A generation that nobody has had, also when those of before are not known any more.
        revision, older = int(time.time() * _MS), [0]
        if before is not None:
            revision = max(revision, before.revision + 1)
            older = [*before.forgotten, before.revision][-_MOST_FORGOTTEN:]
        said, known = TenantGeneration(revision, older), self.settings
        self.settings = known.with_told(Settings(tenants={tenant: said}))
        try:
            self._keep()
        except OSError as error:
            self.settings = known
            raise Unavailable(f"{self._path} cannot be written: {error.strerror}") from None
        return said

    async def told(self, tenant: str, timeout_s: float) -> bool:
        """Wait until the directory knows a tenant's generation: it tells all routers and workers at once.
        False after `timeout_s`; they are told as soon as it can be."""
        said = self.settings.tenants[tenant]
        try:
            async with asyncio.timeout(timeout_s):
                while self._directory is None or said.is_later_than(self._directory.tenants.get(tenant)):
                    await self._view.wait()
        except TimeoutError:
            return False
        return True

    def _keep(self) -> None:
        """Write the file: what is known here, and what other processes have written. Raises OSError."""
        if self._path is None:
            return
        with open(f"{self._path}.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # held for one small write
            known = _read(self._path).with_told(self.settings)
            new = f"{self._path}.{secrets.token_hex(8)}"
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as file:
                file.write(msgspec.json.encode(known.tenants))
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, self._path)
        self.settings = known


def _read(path: Path) -> Settings:
    """Raises ConfigError."""
    try:
        tenants = msgspec.json.decode(path.read_bytes(), type=dict[str, TenantGeneration])
    except FileNotFoundError:
        return NO_SETTINGS
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            "tenant_generations", f"{path} cannot be read: {error}", "repair it: forgotten tenants are in it"
        ) from None
    return Settings(tenants=tenants)
