"""SharedTenants: the generations of tenants that were forgotten, the same in all routers of a directory.

Two say them: an operator at an admin listener, and other routers through the directory. The latest holds
(wire/settings.py). While one router, worker or directory lives, nothing is lost. A file keeps them beyond
that, because storage outlives all processes: an old generation must not hold again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from common.errors import InvalidRequest, Unavailable
from router.tenant_file import TenantFile
from wire.settings import MOST_SETTINGS, NO_SETTINGS, Settings, TenantGeneration

log = logging.getLogger(__name__)

_MOST_FORGOTTEN = 16  # older generations that are remembered, of each tenant
_MS = 1000


class SharedTenants:
    """Belongs to one event loop."""

    def __init__(self, path: Path | None) -> None:
        """`path` is a file, which several processes may share; None: nothing is kept. Raises ConfigError for
        one that cannot be read, and where none can be written."""
        self.settings = NO_SETTINGS  # all that this router knows, to be told to the directory
        self._file = None if path is None else TenantFile(path)
        self._turn = asyncio.Lock()  # of who writes the file
        self._keeper: asyncio.Task[None] | None = None  # writes what others say
        self._directory: Settings | None = None  # what the last View said; None: there was none
        self._view = asyncio.Event()  # of the next View
        if self._file is not None:
            self.settings = self._file.read()

    def generation(self, tenant: str) -> int:
        """A tenant's, now."""
        known = self.settings.tenants.get(tenant)
        return 0 if known is None else known.revision

    def take(self, told: Settings) -> None:
        """Take what a View says. It holds at once, and is in the file soon."""
        self._directory = told
        known = self.settings.with_told(Settings(tenants=told.tenants))
        if known is not self.settings:
            self.settings = known
            if self._file is not None and (self._keeper is None or self._keeper.done()):
                self._keeper = asyncio.get_running_loop().create_task(self._keep_all())
        self._view.set()
        self._view = asyncio.Event()

    async def forget(self, tenant: str) -> TenantGeneration:
        """Keep a tenant's next generation, and give it that, here, from then on.

        Raises InvalidRequest when too many tenants were forgotten, Unavailable for a file that cannot be
        written: then nothing has changed here.
        """
        async with self._turn:
            said = self._next(tenant)
            await self._keep(self.settings.with_told(Settings(tenants={tenant: said})))
        if tenant not in self.settings.tenants:  # other routers have filled the file meanwhile
            raise _too_many()
        return said

    def _next(self, tenant: str) -> TenantGeneration:
        before = self.settings.tenants.get(tenant)
        if before is None and len(self.settings.tenants) >= MOST_SETTINGS:
            raise _too_many()
        # A generation that nobody has had, also when those of before are not known any more.
        revision, older = int(time.time() * _MS), [0]
        if before is not None:
            revision = max(revision, before.revision + 1)
            older = [*before.forgotten, before.revision][-_MOST_FORGOTTEN:]
        return TenantGeneration(revision, older)

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

    async def _keep_all(self) -> None:
        """Until the file has what is known here."""
        kept: Settings | None = None
        while kept is not self.settings:
            kept = self.settings
            try:
                async with self._turn:
                    await self._keep(kept)
            except Unavailable as error:
                log.error("%s", error)
                return

    async def _keep(self, known: Settings) -> None:
        """Write the file, if there is one, and know what is in it. Raises Unavailable."""
        if self._file is not None:
            known = await self._file.add(known)
        self.settings = self.settings.with_told(known)


def _too_many() -> InvalidRequest:
    return InvalidRequest(f"{MOST_SETTINGS} tenants were forgotten: no more are remembered", "tenant")
