"""AIBrixStore: blobs through a connector of AIBrix's KV cache: PrisKV, InfiniStore, HPKV, EIC, RocksDB, SHFS.

A connector knows one piece of memory per value. So page and seal are copied together before and apart after.
Where a connector's own settings are: the variables AIBRIX_KV_CACHE_OL_... of its package.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field

from common.errors import ConfigError
from common.options import Options
from kvcache.storage.blob_store import BlobStore, Outcome, SealedBlob
from kvcache.storage.config import StorageConfig
from kvcache.storage.daemon_threads import DaemonThreads

log = logging.getLogger(__name__)


class AIBrixOptions(Options):
    """`StorageConfig.extra` of this backend."""

    connector: str  # AIBrix's name of it, such as PRISKV or SHFS
    namespace: str = "baton"
    connections: int = Field(default=8, ge=1, le=64)
    timeout_s: float = Field(default=10.0, gt=0)  # without a blob that is done; then the call is given up


class AIBrixStore(BlobStore):
    """See the module. Bounds are those of the connector's store."""

    name: ClassVar[str] = "aibrix"

    def __init__(self, config: StorageConfig) -> None:
        """Raises ConfigError when the package is missing or the connector cannot be opened."""
        options = config.options(AIBrixOptions)
        kinds, self._region = _package()
        self._timeout_s = options.timeout_s
        self._threads = DaemonThreads(options.connections, "aibrix")
        try:
            self._connector = kinds.Connector.create(
                kinds.ConnectorConfig(options.connector, options.namespace, "0", self._threads)
            )
            opened = self._connector.open()
        except (ValueError, ImportError) as error:
            raise ConfigError(
                "hicache_storage_backend_extra_config", f"connector: {error}", "name one that is installed"
            ) from None
        if not opened.is_ok():
            raise ConfigError(
                "hicache_storage_backend_extra_config", f"connector: {opened.value}", "see AIBrix's variables"
            )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="aibrix loop", daemon=True)
        self._thread.start()

    def exists(self, names: Sequence[bytes]) -> list[bool]:
        found = self._all([self._connector.exists(name) for name in names])
        return [outcome is Outcome.DONE for outcome in found]

    def read(self, names: Sequence[bytes], into: Sequence[SealedBlob]) -> list[Outcome]:
        slabs = [torch.empty(blob.nbytes, dtype=torch.uint8) for blob in into]
        outcomes = self._all(
            [
                self._connector.get(name, self._region(slab, 0, len(slab)))
                for name, slab in zip(names, slabs, strict=True)
            ]
        )
        for outcome, slab, blob in zip(outcomes, slabs, into, strict=True):
            if outcome is Outcome.DONE:
                whole = slab.numpy().data
                blob.page[:], blob.seal[:] = whole[: blob.page.nbytes], whole[blob.page.nbytes :]
        return outcomes

    def write(self, names: Sequence[bytes], blobs: Sequence[SealedBlob]) -> list[Outcome]:
        slabs = [torch.frombuffer(bytearray(b"".join(blob)), dtype=torch.uint8) for blob in blobs]
        return self._all(
            [
                self._connector.put(name, self._region(slab, 0, len(slab)))
                for name, slab in zip(names, slabs, strict=True)
            ]
        )

    def discard(self, name: bytes) -> bool:
        return self._all([self._connector.delete(name)])[0] in (Outcome.DONE, Outcome.MISSING)

    def clear(self, prefix: bytes) -> None:
        log.warning(
            "AIBrix's connectors list nothing: forget %s in what is behind %s",
            prefix or "all",
            self._connector.name,
        )

    def close(self) -> None:
        stop = functools.partial(self._loop.call_soon, self._loop.stop)  # what was cancelled ends first
        self._loop.call_soon_threadsafe(stop)
        self._thread.join(self._timeout_s)
        if not self._thread.is_alive():
            self._loop.close()
        self._connector.close()
        self._threads.shutdown(wait=False)

    def _all(self, calls: list[Coroutine[Any, Any, Any]]) -> list[Outcome]:
        """The outcome of each call, all of them at once. After a timeout none is waited for any more."""
        running = [asyncio.run_coroutine_threadsafe(call, self._loop) for call in calls]
        outcomes: list[Outcome] = []
        seconds = self._timeout_s
        for one in running:
            try:
                outcomes.append(_outcome(one.result(seconds)))
            except TimeoutError:
                one.cancel()
                outcomes.append(Outcome.TIMEOUT)
            except Exception:  # noqa: BLE001 - connectors raise what their clients raise
                outcomes.append(Outcome.IO_ERROR)
            if outcomes[-1] is Outcome.TIMEOUT:
                seconds = 0.0
        return outcomes


def _outcome(status: Any) -> Outcome:
    if status.is_ok():
        return Outcome.DONE
    if status.is_not_found():
        return Outcome.MISSING
    if status.is_timeout():
        return Outcome.TIMEOUT
    if status.is_denied():
        return Outcome.READ_ONLY
    return Outcome.FULL if status.is_out_of_memory() else Outcome.IO_ERROR


def _package() -> tuple[Any, Any]:
    try:
        from aibrix_kvcache.l2.connectors import connector
        from aibrix_kvcache.memory.external_memory_region import ExternalMemoryRegion
    except ImportError as error:
        raise ConfigError(
            "hicache_storage_backend", f"AIBrix cannot be loaded: {error}", "install aibrix-kvcache"
        ) from None
    return connector, ExternalMemoryRegion
