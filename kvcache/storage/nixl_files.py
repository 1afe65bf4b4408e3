"""NixlFiles: files of blobs through NIXL's POSIX plug-in, from and into registered host pages."""

from __future__ import annotations

import mmap
import os
import queue
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np

from common.errors import ConfigError
from common.options import Options
from kvcache.storage.blob_store import SealedBlob
from kvcache.storage.files import BlobFiles, WrongSize
from kvcache.storage.seal import SEAL_BYTES

_CALLS = 64  # at once
_POLL_S = 20e-6
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW


class NixlOptions(Options):
    """`StorageConfig.extra` of this backend."""

    io: Literal["posix_aio", "uring", "aio", "auto"] = "auto"  # which of the kernel's interfaces NIXL uses


class NixlFiles(BlobFiles):
    """One NIXL agent of this process."""

    def __init__(self, options: NixlOptions, *, fsync: bool) -> None:
        """Raises ConfigError when the package or its plug-in is missing."""
        self._name = f"baton-{secrets.token_hex(8)}"
        self._agent = _agent(self._name, options)
        self._fsync = fsync
        self._registered: list[Any] = []
        self._seals: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        memory = memoryview(mmap.mmap(-1, _CALLS * SEAL_BYTES))
        self.register([memory])
        for first in range(0, memory.nbytes, SEAL_BYTES):
            self._seals.put(memory[first : first + SEAL_BYTES])

    def register(self, arenas: Sequence[memoryview]) -> None:
        for arena in arenas:
            places = [(_address(arena), arena.nbytes, 0, "")]
            self._registered.append(self._agent.register_memory(places, "DRAM"))

    def read(self, path: str, blob: SealedBlob) -> float:
        descriptor = os.open(path, os.O_RDONLY | _FLAGS)
        try:
            about = os.fstat(descriptor)
            if about.st_size != blob.nbytes:
                raise WrongSize
            self._move("READ", descriptor, blob)
            return about.st_mtime
        finally:
            os.close(descriptor)

    def write(self, path: str, blob: SealedBlob) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, blob.nbytes)  # NIXL does not say which error a full disk was
            self._move("WRITE", descriptor, blob)
            if self._fsync:
                os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        for one in self._registered:
            self._agent.deregister_memory(one)
        self._agent = None

    def _move(self, verb: str, descriptor: int, blob: SealedBlob) -> None:
        with self._lent_seal() as seal:
            seal[:] = blob.seal
            try:
                self._transfer(verb, descriptor, blob.page, seal)
            except Exception as error:  # NIXL's have no base of their own
                raise OSError(f"NIXL: {error}") from error
            blob.seal[:] = seal

    @contextmanager
    def _lent_seal(self) -> Iterator[memoryview]:
        """Registered memory that nobody else uses."""
        seal = self._seals.get()
        try:
            yield seal
        finally:
            self._seals.put(seal)

    def _transfer(self, verb: str, descriptor: int, page: memoryview, seal: memoryview) -> None:
        file = self._agent.register_memory([(0, page.nbytes + SEAL_BYTES, descriptor, "")], "FILE")
        try:
            here = [(_address(page), page.nbytes, 0), (_address(seal), SEAL_BYTES, 0)]
            there = [(0, page.nbytes, descriptor), (page.nbytes, SEAL_BYTES, descriptor)]
            transfer = self._agent.initialize_xfer(
                verb,
                self._agent.get_xfer_descs(here, "DRAM"),
                self._agent.get_xfer_descs(there, "FILE"),
                self._name,
            )
            try:
                self._wait(transfer)
            finally:
                self._agent.release_xfer_handle(transfer)
        finally:
            self._agent.deregister_memory(file)

    def _wait(self, transfer: Any) -> None:
        state = self._agent.transfer(transfer)
        while state != "DONE":  # as long as the disk takes: a read that was given up might still write
            if state == "ERR":
                raise OSError("NIXL's transfer failed")
            time.sleep(_POLL_S)
            state = self._agent.check_xfer_state(transfer)


def _address(memory: memoryview) -> int:
    address: int = np.frombuffer(memory, np.uint8).ctypes.data
    return address


def _agent(name: str, options: NixlOptions) -> Any:
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")  # read when the library is loaded
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        remedy = "install nixl-cu12 and nixl, both with --no-deps"
        raise ConfigError("hicache_storage_backend", f"NIXL cannot be loaded: {error}", remedy) from None
    agent = nixl_agent(name, nixl_agent_config(backends=[]))
    if "POSIX" not in agent.get_plugin_list():
        raise ConfigError(
            "hicache_storage_backend", "NIXL has no POSIX plug-in", "install another build of it"
        )
    chosen = {} if options.io == "auto" else {f"use_{options.io}": "true"}
    agent.create_backend("POSIX", chosen)
    return agent
