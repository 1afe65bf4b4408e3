"""SealedStorage: a StorageBackend over any BlobStore. It seals what is written and checks what is read."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from kvcache.storage.backend import StorageBackend, StorageStats
from kvcache.storage.blob_store import BlobStore, Held, Outcome, SealedBlob
from kvcache.storage.seal import SEAL_BYTES, Sealed, seal_holds, write_seal
from kvcache.storage.secret import SealSecret

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
_NO_REFUSAL = (Outcome.DONE, Outcome.MISSING, Outcome.PRESENT)


class SealedStorage(StorageBackend):
    """See StorageBackend. A blob whose seal does not hold is removed, so that it can be stored again.

    A store must not raise. One that does (it may be anybody's) has failed for all blobs of the call.
    """

    def __init__(self, store: BlobStore, secret: SealSecret) -> None:
        self.name = store.name
        self._store = store
        self._secret = secret
        self._lock = threading.Lock()
        self._refused: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._seconds = {"read": 0.0, "write": 0.0}
        self._held = Held()

    def register(self, arenas: Sequence[memoryview]) -> None:
        self._store.register(arenas)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        names = [place.name for place in self._places(keys)]
        return self._try(lambda: self._store.exists(names), [False] * len(names))

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        began = time.perf_counter()
        places = self._places(keys)
        blobs = [SealedBlob(page.cast("B"), memoryview(bytearray(SEAL_BYTES))) for page in into]
        names = [place.name for place in places]
        outcomes = self._try(lambda: self._store.read(names, blobs), [Outcome.IO_ERROR] * len(names))
        for index, (place, blob, outcome) in enumerate(zip(places, blobs, outcomes, strict=True)):
            if outcome is Outcome.DONE and not seal_holds(place, *blob):
                outcomes[index] = outcome = Outcome.CORRUPT
            if outcome is Outcome.CORRUPT:
                self._try(lambda: self._store.discard(place.name), False)  # noqa: B023 - called at once
        self._count("read", outcomes, blobs, began)
        return [outcome is Outcome.DONE for outcome in outcomes]

    def set(self, keys: Sequence[bytes], blobs: Sequence[memoryview]) -> list[bool]:
        began = time.perf_counter()
        places = self._places(keys)
        sealed = [SealedBlob(page.cast("B"), memoryview(bytearray(SEAL_BYTES))) for page in blobs]
        names = [place.name for place in places]
        outcomes = [Outcome.PRESENT if there else None for there in self.exists(keys)]
        new = [index for index, outcome in enumerate(outcomes) if outcome is None]
        for index in new:
            write_seal(places[index], *sealed[index])
        parts = [names[index] for index in new], [sealed[index] for index in new]
        written = self._try(lambda: self._store.write(*parts), [Outcome.IO_ERROR] * len(new))
        for index, outcome in zip(new, written, strict=True):
            outcomes[index] = outcome
        done = [outcome for outcome in outcomes if outcome is not None]
        self._count("write", done, sealed, began)
        return [outcome in (Outcome.DONE, Outcome.PRESENT) for outcome in done]

    def remove(self, keys: Sequence[bytes]) -> list[bool]:
        return [self._try(partial(self._store.discard, place.name), False) for place in self._places(keys)]

    def clear(self, prefix: bytes = b"") -> Held | None:
        return self._store.clear(prefix)

    def stats(self) -> StorageStats:
        self._held = self._try(self._store.held, Held())
        return self.last_stats()

    def last_stats(self) -> StorageStats:
        held = self._held
        with self._lock:
            return StorageStats(
                blobs=held.blobs,
                bytes=held.nbytes,
                hits=self._counts["read"],
                misses=self._counts["read_missed"],
                written=self._counts["write"],
                refused=dict(self._refused),
                read_bytes=self._counts["read_bytes"],
                written_bytes=self._counts["write_bytes"],
                read_seconds=self._seconds["read"],
                write_seconds=self._seconds["write"],
            )

    def close(self) -> None:
        self._store.close()

    def _try(self, call: Callable[[], Answer], otherwise: Answer) -> Answer:
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - whatever a store of others raises
            log.warning("kv storage %s: %r", self.name, error)
            return otherwise

    def _places(self, keys: Sequence[bytes]) -> list[Sealed]:
        sealer = self._secret.sealer()
        return [sealer.locate(key) for key in keys]

    def _count(
        self, verb: str, outcomes: Sequence[Outcome], blobs: Sequence[SealedBlob], began: float
    ) -> None:
        done = [
            blob.page.nbytes for blob, outcome in zip(blobs, outcomes, strict=True) if outcome is Outcome.DONE
        ]
        with self._lock:
            self._counts[verb] += len(done)
            self._counts[f"{verb}_missed"] += len(outcomes) - len(done)
            self._counts[f"{verb}_bytes"] += sum(done)
            self._seconds[verb] += time.perf_counter() - began
            self._refused.update(outcome.value for outcome in outcomes if outcome not in _NO_REFUSAL)
