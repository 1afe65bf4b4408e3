"""Host pages, keys and a store in memory that can be made to fail, for tests of the storage tier."""

from __future__ import annotations

import mmap
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from kvcache.storage.backend import StorageBackend
from kvcache.storage.blob_store import BlobStore, Held, Outcome, SealedBlob
from kvcache.storage.config import StorageConfig
from kvcache.storage.factory import open_storage
from kvcache.storage.keys import StorageKeys
from wire.page_hash import namespace_seed, page_digests
from wire.records import GroupLayout

MODEL = bytes(range(32))


def layout(name: str = "full", page_bytes: int = 4096, **changed: Any) -> GroupLayout:
    """A group's layout."""
    said = {"kind": "full", "shape": (2, 2, 2, 16, 8), "dtype": "float32", "tile_order": "plain"}
    return GroupLayout(name=name, page_size=16, page_bytes=page_bytes, **{**said, **changed})


def digests(count: int, seed: str = "model") -> list[bytes]:
    """Digests of the pages of one prompt."""
    return page_digests(namespace_seed(seed), np.arange(count * 16, dtype="<i4").tobytes(), 16)


def keys(count: int, seed: str = "model", tenant: str = "") -> list[bytes]:
    """Keys of the pages of one prompt."""
    return StorageKeys(MODEL, [layout()]).keys("full", digests(count, seed), tenant)


class Arena:
    """Host pages: `pages[i]` for what is written, `read[i]` for what comes back, all of one arena."""

    def __init__(self, count: int, page_bytes: int = 4096, seed: int = 0) -> None:
        self.memory = memoryview(mmap.mmap(-1, 2 * count * page_bytes))
        views = [self.memory[i * page_bytes : (i + 1) * page_bytes] for i in range(2 * count)]
        self.pages, self.read = views[:count], views[count:]
        rng = np.random.default_rng(seed)
        for page in self.pages:
            page[:] = rng.bytes(page_bytes)

    def wipe(self) -> None:
        """So that what is read does not lie there already."""
        for page in self.read:
            page[:] = bytes(len(page))


def open_files(directory: Path, **changed: Any) -> StorageBackend:
    """The file backend, as a worker opens it."""
    return open_storage(StorageConfig(**{"backend": "file", "path": directory, **changed}))


class MemoryStore(BlobStore):
    """Blobs in a dict. `fails` is asked before each one with "read", "write" or "discard"; an outcome is its
    answer."""

    name: ClassVar[str] = "memory"

    def __init__(self, config: StorageConfig | None = None) -> None:
        self.blobs: dict[bytes, bytes] = {}
        self.fails: Callable[[str], Outcome | None] = lambda verb: None
        self.arenas: list[memoryview] = []
        self._lock = threading.Lock()

    def register(self, arenas: Sequence[memoryview]) -> None:
        self.arenas = list(arenas)

    def exists(self, names: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [name in self.blobs for name in names]

    def read(self, names: Sequence[bytes], into: Sequence[SealedBlob]) -> list[Outcome]:
        return [self._read(name, blob) for name, blob in zip(names, into, strict=True)]

    def write(self, names: Sequence[bytes], blobs: Sequence[SealedBlob]) -> list[Outcome]:
        return [self._write(name, blob) for name, blob in zip(names, blobs, strict=True)]

    def discard(self, name: bytes) -> bool:
        failed = self.fails("discard")
        with self._lock:
            if failed is None:
                self.blobs.pop(name, None)
        return failed is None

    def clear(self, prefix: bytes) -> Held:
        with self._lock:
            gone = [self.blobs.pop(name) for name in list(self.blobs) if name.startswith(prefix)]
            return Held(len(gone), sum(map(len, gone)))

    def held(self) -> Held:
        with self._lock:
            return Held(len(self.blobs), sum(map(len, self.blobs.values())))

    def _read(self, name: bytes, blob: SealedBlob) -> Outcome:
        failed = self.fails("read")
        with self._lock:
            found = self.blobs.get(name)
        if failed is not None or found is None:
            return failed or Outcome.MISSING
        if len(found) != blob.nbytes:
            return Outcome.CORRUPT
        blob.page[:], blob.seal[:] = found[: blob.page.nbytes], found[blob.page.nbytes :]
        return Outcome.DONE

    def _write(self, name: bytes, blob: SealedBlob) -> Outcome:
        failed = self.fails("write")
        with self._lock:
            if failed is None and name not in self.blobs:
                self.blobs[name] = bytes(blob.page) + bytes(blob.seal)
                return Outcome.DONE
        return failed or Outcome.PRESENT


class MooncakeMaster:
    """A mooncake_master of its own, on loopback."""

    def __init__(self, log: Path) -> None:
        """Returns when it listens."""
        self.port, metrics = free_port(), free_port()
        self.url = f"127.0.0.1:{self.port}"
        command = [
            Path(sys.executable).with_name("mooncake_master"), f"--rpc_port={self.port}",
            f"--metrics_port={metrics}", "--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1",
            "--enable_metric_reporting=false", "--default_kv_lease_ttl=10000", "--client_ttl=2",
        ]  # fmt: skip
        self._log = log.open("wb")
        self.process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 30
        while not listens(self.port):
            assert self.process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)

    @staticmethod
    def why_not() -> str:
        """Why it cannot run here; "" if it can."""
        try:
            from mooncake import store  # noqa: F401
        except ImportError as error:
            return f"Mooncake Store is not installed: {error}"
        return ""

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait(30)
        self._log.close()


def free_port() -> int:
    """A port of loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def listens(port: int) -> bool:
    """Whether somebody accepts connections there."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


class S3Server:
    """moto's server with an empty bucket, on loopback."""

    BUCKET = "pages"

    def __init__(self, log: Path) -> None:
        """Returns when it listens."""
        import boto3

        self.endpoint = f"http://127.0.0.1:{(port := free_port())}"
        self._log = log.open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        deadline = time.monotonic() + 60
        while not listens(port):
            assert self.process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        self.client = boto3.client("s3", endpoint_url=self.endpoint, region_name="us-east-1")
        self.client.create_bucket(Bucket=self.BUCKET)

    def config(self, directory: Path, prefix: str, **extra: Any) -> StorageConfig:
        """Of a backend whose blobs lie under a prefix."""
        return StorageConfig(
            backend="s3",
            path=directory,
            url=f"s3://{self.BUCKET}/{prefix}",
            extra={"endpoint_url": self.endpoint, "region": "us-east-1", **extra},
        )

    def close(self) -> None:
        """End it."""
        self.client.close()
        self.process.kill()
        self.process.wait(30)
        self._log.close()
