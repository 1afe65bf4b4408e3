"""MooncakeStore: blobs in Mooncake Store, the memory that all processes of a cluster lend to each other.

Facts of Mooncake 0.3, measured: a put on an existing key returns 0 and keeps the old value. An object whose
owner has died exists until the master notices, and reading it gives -800 within seconds: it is removed then,
so that it can be stored again. A get from an owner that stands still never returns. A get into buffers of
another size than the object's gives -600 or -800. Over RDMA all memory must be registered.

So all calls are given up after `timeout_s`. A put goes straight from the host pages, at worst while they are
used again: then its seal does not hold. A get that was given up may still write, so over TCP it goes into
buffers of the store's own, which nobody else uses before it has ended; the copy takes a tenth of the time.
Over RDMA it goes straight into the host pages, and its bound is Mooncake's.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import os
import queue
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from pydantic import Field

from common.errors import ConfigError
from common.host import LOOPBACK, local_address
from common.options import Options
from kvcache.storage.blob_store import BlobStore, Held, Outcome, SealedBlob
from kvcache.storage.bounded_calls import BoundedCalls, GivenUp
from kvcache.storage.config import StorageConfig
from kvcache.storage.keys import key_text
from kvcache.storage.seal import SEAL_BYTES

Result = TypeVar("Result")
_NAMESPACE = "baton-"  # of our names in a store that others use as well
_BATCH = 256  # blobs of one call: two buffers each
_CALLS = 8  # at once
_SET_UP_S = 60.0
_LEAST_LENT = 16 << 20
_PROGRESS_S = 5  # a transfer that stands still for so long has failed
_NO_ROOM, _OTHER_SIZE, _NOT_READY, _NOT_FOUND, _EXISTS, _OWNER_DIED = -200, -600, -703, -704, -705, -800
_READ = {
    _NOT_FOUND: Outcome.MISSING,
    _NOT_READY: Outcome.MISSING,  # another process is storing it
    _OTHER_SIZE: Outcome.CORRUPT,
}
_WRITTEN = {0: Outcome.DONE, _EXISTS: Outcome.PRESENT, _NO_ROOM: Outcome.FULL}


class MooncakeOptions(Options):
    """`StorageConfig.extra` of this backend."""

    interface: str = LOOPBACK  # under which other processes reach this one: what local_address takes
    metadata_server: str = "P2PHANDSHAKE"
    protocol: Literal["tcp", "rdma"] = "tcp"
    devices: str = ""  # RDMA devices, separated by commas
    local_buffer_bytes: int = Field(default=16 << 20, ge=1 << 20)
    staging_bytes: int = Field(default=16 << 20, ge=1 << 16)  # of one get over TCP; at least a blob
    timeout_s: float = Field(default=10.0, gt=0)


class MooncakeStore(BlobStore):
    """See the module. `config.url`: HOST:PORT of mooncake_master; `config.max_bytes`: lent by us."""

    name: ClassVar[str] = "mooncake"

    def __init__(self, config: StorageConfig) -> None:
        """Raises ConfigError when the package is missing or the master does not answer."""
        self._options = options = config.options(MooncakeOptions)
        if not re.fullmatch(r"[^\s:/]+:\d+", config.url):
            raise ConfigError(
                "hicache_storage_url", f"{config.url!r} is no HOST:PORT", "name mooncake_master's"
            )
        if 0 < config.max_bytes < _LEAST_LENT:
            raise ConfigError(
                "hicache_storage_size", f"{config.max_bytes} bytes are too few to lend", "lend 16 MiB"
            )
        address = local_address(options.interface)
        self._store = _store_class(address)()
        self._calls = BoundedCalls(options.timeout_s, _CALLS)
        self._set_up(address, config.url, config.max_bytes)
        self._is_staged = options.protocol == "tcp"
        self._seals = self._buffers(_BATCH * SEAL_BYTES)
        self._staging = self._buffers(options.staging_bytes if self._is_staged else mmap.PAGESIZE)

    def register(self, arenas: Sequence[memoryview]) -> None:
        for arena in arenas:
            if self._store.register_buffer(_address(arena), arena.nbytes) != 0:
                raise ConfigError(
                    "hicache_storage_backend",
                    f"Mooncake cannot register {arena.nbytes} bytes",
                    "raise the limit on locked memory (ulimit -l)",
                )

    def exists(self, names: Sequence[bytes]) -> list[bool]:
        if not names:
            return []
        keys = [_key(name) for name in names]
        found = self._try(lambda: self._store.batch_is_exist(keys), [0] * len(names))
        return [one == 1 for one in found]

    def read(self, names: Sequence[bytes], into: Sequence[SealedBlob]) -> list[Outcome]:
        read = self._read_staged if self._is_staged else self._read_directly
        most_bytes = self._options.staging_bytes if self._is_staged else 1 << 62
        return _in_time(read, names, into, most_bytes)

    def write(self, names: Sequence[bytes], blobs: Sequence[SealedBlob]) -> list[Outcome]:
        return _in_time(self._write, names, blobs, 1 << 62)

    def discard(self, name: bytes) -> bool:
        return self._remove([_key(name)])

    def clear(self, prefix: bytes) -> Held:
        pattern = f"^{_NAMESPACE}{re.escape(prefix.decode())}"
        removed = self._calls.run(lambda: int(self._store.remove_by_regex(pattern, True)))
        if removed < 0:
            raise OSError(f"Mooncake Store has not removed what begins so ({removed})")
        return Held(removed)

    def close(self) -> None:
        if not self._calls.left_behind:  # they would use what is closed
            self._try(self._store.close, 0)

    def _set_up(self, address: str, master: str, lent: int) -> None:
        host, _, port = master.rpartition(":")
        problem, options = "", self._options
        try:
            socket.create_connection(
                (host, int(port)), options.timeout_s
            ).close()  # setup would wait for ever
            call = functools.partial(
                self._store.setup, address, options.metadata_server, lent,
                options.local_buffer_bytes,
                options.protocol, options.devices, master,
            )  # fmt: skip
            code = BoundedCalls(_SET_UP_S, 1).run(call)
            problem = f"({code})" if code else ""
        except (OSError, TimeoutError) as error:
            problem = f"({error})"
        if problem:
            raise ConfigError(
                "hicache_storage_url",
                f"Mooncake Store cannot be set up with the master {master} {problem}",
                "start mooncake_master, and name its --rpc_port",
            )

    # -- calls -------------------------------------------------------------------------------------

    def _read_staged(self, keys: list[str], into: Sequence[SealedBlob]) -> list[Outcome]:
        if into[0].nbytes > self._options.staging_bytes:
            return [Outcome.IO_ERROR]  # _batches made a batch of it alone
        starts = list(itertools.accumulate((blob.nbytes for blob in into[:-1]), initial=0))
        sizes = [blob.nbytes for blob in into]
        with self._lent(self._staging) as buffer:
            pointers = [_address(buffer) + start for start in starts]
            codes = self._calls.run(
                lambda: self._store.batch_get_into(keys, pointers, sizes), lambda: self._staging.put(buffer)
            )
            for start, blob, code in zip(starts, into, codes, strict=True):
                if code == blob.nbytes:
                    end = start + blob.page.nbytes
                    blob.page[:] = buffer[start:end]
                    blob.seal[:] = buffer[end : end + SEAL_BYTES]
        return self._outcomes(keys, codes, into)

    def _read_directly(self, keys: list[str], into: Sequence[SealedBlob]) -> list[Outcome]:
        with self._lent(self._seals) as seals:
            codes = self._store.batch_get_into_multi_buffers(keys, *_parts(into, seals))
            for index, blob in enumerate(into):
                blob.seal[:] = seals[index * SEAL_BYTES : (index + 1) * SEAL_BYTES]
        return self._outcomes(keys, codes, into)

    def _outcomes(self, keys: list[str], codes: list[int], into: Sequence[SealedBlob]) -> list[Outcome]:
        """Of a get. What died with its owner is removed."""
        self._remove([key for key, code in zip(keys, codes, strict=True) if code == _OWNER_DIED])
        return [_read_outcome(code, blob) for code, blob in zip(codes, into, strict=True)]

    def _remove(self, keys: list[str]) -> bool:
        """Whether none of them is there any more."""
        if not keys:
            return True
        codes = self._try(lambda: self._store.batch_remove(keys, True), None)
        return codes is not None and all(code in (0, _NOT_FOUND) for code in codes)

    def _write(self, keys: list[str], blobs: Sequence[SealedBlob]) -> list[Outcome]:
        with self._lent(self._seals) as seals:
            for index, blob in enumerate(blobs):
                seals[index * SEAL_BYTES : (index + 1) * SEAL_BYTES] = blob.seal
            parts = _parts(blobs, seals)
            codes = self._calls.run(
                lambda: self._store.batch_put_from_multi_buffers(keys, *parts), lambda: self._seals.put(seals)
            )
        return [_WRITTEN.get(code, Outcome.IO_ERROR) for code in codes]

    @contextmanager
    def _lent(self, buffers: queue.SimpleQueue[memoryview]) -> Iterator[memoryview]:
        """One that nobody else uses. A call that was given up gives it back when it ends. Raises TimeoutError
        if there is none."""
        try:
            buffer = buffers.get(timeout=self._options.timeout_s)
        except queue.Empty:
            raise TimeoutError("all buffers are in use") from None
        try:
            yield buffer
        except GivenUp:
            raise
        except Exception:  # the call has ended
            buffers.put(buffer)
            raise
        buffers.put(buffer)

    def _try(self, call: Callable[[], Result], otherwise: Result) -> Result:
        try:
            return self._calls.run(call)
        except TimeoutError:
            return otherwise

    def _buffers(self, nbytes: int) -> queue.SimpleQueue[memoryview]:
        """One for each call at once, all of one registered piece of memory."""
        memory = memoryview(mmap.mmap(-1, _CALLS * nbytes))
        self.register([memory])
        buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for first in range(0, memory.nbytes, nbytes):
            buffers.put(memory[first : first + nbytes])
        return buffers


def _in_time(
    move: Callable[[list[str], Sequence[SealedBlob]], list[Outcome]],
    names: Sequence[bytes],
    blobs: Sequence[SealedBlob],
    most_bytes: int,
) -> list[Outcome]:
    """One batch after the other. After a timeout no other is begun: each would wait as long."""
    outcomes: list[Outcome] = []
    try:
        for batch in _batches(blobs, most_bytes):
            outcomes += move([_key(name) for name in names[batch]], blobs[batch])
    except TimeoutError:
        outcomes += [Outcome.TIMEOUT] * (len(blobs) - len(outcomes))
    return outcomes


def _batches(blobs: Sequence[SealedBlob], most_bytes: int) -> Iterator[slice]:
    """At most _BATCH blobs and `most_bytes` bytes each; a larger blob alone."""
    first, nbytes = 0, 0
    for index, blob in enumerate(blobs):
        if index > first and (nbytes + blob.nbytes > most_bytes or index - first == _BATCH):
            yield slice(first, index)
            first, nbytes = index, 0
        nbytes += blob.nbytes
    if blobs:
        yield slice(first, len(blobs))


def _parts(blobs: Sequence[SealedBlob], seals: memoryview) -> tuple[list[list[int]], list[list[int]]]:
    """Addresses and sizes of each page and its seal."""
    first = _address(seals)
    pointers = [[_address(blob.page), first + index * SEAL_BYTES] for index, blob in enumerate(blobs)]
    return pointers, [[blob.page.nbytes, SEAL_BYTES] for blob in blobs]


def _read_outcome(code: int, blob: SealedBlob) -> Outcome:
    if code == blob.nbytes:
        return Outcome.DONE
    return Outcome.CORRUPT if code >= 0 else _READ.get(code, Outcome.IO_ERROR)


def _address(memory: memoryview) -> int:
    address: int = np.frombuffer(memory, np.uint8).ctypes.data
    return address


def _key(name: bytes) -> str:
    return _NAMESPACE + key_text(name)


def _store_class(address: str) -> Any:
    """Its library reads these variables when it is loaded."""
    for key, value in {
        "MC_LOG_LEVEL": "ERROR",
        "GLOG_minloglevel": "2",
        "MC_TCP_BIND_ADDRESS": address,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(_PROGRESS_S),
    }.items():
        os.environ.setdefault(key, value)
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        remedy = "install mooncake-transfer-engine-non-cuda (-cuda13 with CUDA 13)"
        if ".so" in str(error):
            remedy = "install the system packages libibverbs1, libnuma1 and libcurl4"
        raise ConfigError("hicache_storage_backend", f"Mooncake cannot be loaded: {error}", remedy) from None
    return MooncakeDistributedStore
