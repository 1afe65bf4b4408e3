"""TenantFile: the generations of forgotten tenants in a file, which several processes may share."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import secrets
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import IO

import msgspec

from common.errors import ConfigError, Unavailable
from wire.settings import NO_SETTINGS, Settings, TenantGeneration

_LOCK_S = 3.0  # for others' writes, which are small
_WRITE_S = 5.0  # for all of a write
_TRY_AGAIN_S = 0.02


class TenantFile:
    """Belongs to one event loop, which no lock and no disk holds up: each write has a thread of its own."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a place where no file can be made."""
        self._path = path
        self._write_under_way: Future[Settings] | None = None
        try:
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            raise ConfigError(
                "tenant_generations",
                f"{path} cannot be written: {error.strerror}",
                "name a file in a directory that can be written",
            ) from None

    def read(self) -> Settings:
        """What is in the file. Raises ConfigError if that cannot be read."""
        try:
            tenants = msgspec.json.decode(self._path.read_bytes(), type=dict[str, TenantGeneration])
        except FileNotFoundError:
            return NO_SETTINGS
        except (OSError, msgspec.MsgspecError) as error:
            problem = f"{self._path} cannot be read: {error}"
            remedy = "repair it: forgotten tenants are in it"
            raise ConfigError("tenant_generations", problem, remedy) from None
        return Settings(tenants=tenants)

    async def add(self, known: Settings) -> Settings:
        """Write the tenants of `known`, besides what other processes have written. Returns all of that.

        Raises Unavailable when that does not succeed within a bound. A write that hangs longer may still
        succeed; until it ends there is no other.
        """
        if self._write_under_way is not None and not self._write_under_way.done():
            raise Unavailable(f"{self._path} cannot be written: an earlier write has not ended")
        written: Future[Settings] = Future()
        self._write_under_way = written
        written.set_running_or_notify_cancel()  # so that the thread can end it although nobody waits any more
        threading.Thread(target=self._write, args=(known, written), name="tenant file", daemon=True).start()
        try:
            async with asyncio.timeout(_WRITE_S):
                return await asyncio.wrap_future(written)
        except TimeoutError as error:
            raise Unavailable(f"{self._path} cannot be written: {error.strerror or 'it hangs'}") from None
        except (OSError, ConfigError) as error:
            raise Unavailable(f"{self._path} cannot be written: {error}") from None

    def _write(self, known: Settings, written: Future[Settings]) -> None:
        try:
            with open(f"{self._path}.lock", "a") as lock:
                _lock(lock)
                merged = self.read().with_told(known)
                new = f"{self._path}.{secrets.token_hex(8)}"
                descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with open(descriptor, "wb") as file:
                    file.write(msgspec.json.encode(merged.tenants))
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(new, self._path)
        except Exception as error:  # noqa: BLE001 - whoever waits for it decides
            written.set_exception(error)
        else:
            written.set_result(merged)


def _lock(file: IO[str]) -> None:
    """Raises TimeoutError. `flock` alone would wait as long as a process that is stopped has the lock."""
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError(errno.ETIMEDOUT, "another process has it locked") from None
            time.sleep(_TRY_AGAIN_S)
        else:
            return
