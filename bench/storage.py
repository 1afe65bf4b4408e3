"""What a storage backend reads and writes per second: `python -m bench.storage --json`.

Pages of 1.75 MiB and of 32 KiB, sealed when they are written and checked when they are read, in batches of
32, by one thread. `--backend` and `--directory` say where; `--direct-io` leaves the page cache out.

`ratios`: `get_vs_memcpy_*` and `set_vs_memcpy_*`, by size of the page: bytes per second of the backend / of a
copy of the same pages in memory. `sealed_vs_blake2b`: speed of the seal's MAC / of keyed BLAKE2b, 1.75 MiB.
`values`: GB/s; `model_digest_gb_s` with `--model`: speed of the digest of a model's files, not kept before.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import tempfile
from pathlib import Path

import numpy as np

from bench.common import alternate, argument_parser, medians, print_result, seconds
from engine.config import EngineConfig
from engine.model_digest import CACHE_NAME, model_digest
from kvcache.storage.backend import StorageBackend
from kvcache.storage.config import StorageConfig
from kvcache.storage.factory import open_storage
from kvcache.storage.keys import StorageKeys, visibility
from kvcache.storage.seal import SEAL_BYTES, Sealer, write_seal
from wire.records import GroupLayout

SIZES = {"1_75_mib": 1_835_008, "32_kib": 32 << 10}
BATCH = 32
ROUNDS = 7
_ROUND_BYTES = 256 << 20


class Pages:
    """Host pages of one size, their keys and a backend for them."""

    def __init__(self, page_bytes: int, config: StorageConfig, model: bytes) -> None:
        self.count = _ROUND_BYTES // page_bytes // BATCH * BATCH
        self._arena = memoryview(mmap.mmap(-1, self.count * page_bytes))
        np.frombuffer(self._arena, np.uint64)[:] = np.random.default_rng(0).integers(
            1 << 63, size=self.count * page_bytes // 8, dtype=np.uint64
        )
        self._copy = np.empty(self.count * page_bytes, np.uint8)
        self._pages = [
            self._arena[start : start + page_bytes] for start in range(0, len(self._arena), page_bytes)
        ]
        layout = GroupLayout("full", "full", (page_bytes,), "uint8", "plain", 16, page_bytes)
        self._keys = StorageKeys(model, [layout])
        self._names: list[bytes] = []
        self._storage: StorageBackend = open_storage(config)
        self._storage.register([self._arena])

    def memcpy(self) -> float:
        """GB/s of a copy in memory."""
        return self._rate(seconds(lambda: np.copyto(self._copy, np.frombuffer(self._arena, np.uint8))))

    def set(self) -> float:
        """GB/s of pages that are not there."""
        self._storage.clear(visibility(""))
        self._names = self._keys.keys("full", [os.urandom(32) for _ in self._pages])
        return self._rate(seconds(lambda: self._each_batch(self._storage.set)))

    def get(self) -> float:
        """GB/s of the pages that `set` wrote last."""
        assert all(self._storage.exists(self._names))
        return self._rate(seconds(lambda: self._each_batch(self._storage.get)))

    def close(self) -> None:
        """End, and say what was refused."""
        stats = self._storage.stats()
        assert stats.misses == 0, stats
        assert not stats.refused, stats
        self._storage.clear()
        self._storage.close()

    def _each_batch(self, move: object) -> None:
        assert callable(move)
        for first in range(0, self.count, BATCH):
            batch = slice(first, first + BATCH)
            assert all(move(self._names[batch], self._pages[batch]))

    def _rate(self, took: float) -> float:
        return len(self._arena) / took / 1e9


def main() -> None:
    """Measure."""
    parser = argument_parser(__doc__)
    parser.add_argument("--backend", default="file", help="as in StorageConfig")
    parser.add_argument("--directory", type=Path, help="of files; a temporary one by default")
    parser.add_argument("--url", default="", help="of a server")
    parser.add_argument("--direct-io", action="store_true", help="past the page cache")
    parser.add_argument("--model", type=Path, help="a directory whose files are hashed")
    options = parser.parse_args()
    ratios, values = _seals()
    with tempfile.TemporaryDirectory() as made:
        model = bytes(32)
        if options.model is not None:
            model, values["model_digest_gb_s"] = _digest(options.model)
        config = StorageConfig(
            backend=options.backend,
            path=options.directory or Path(made),
            url=options.url,
            direct_io=options.direct_io,
        )
        for name, size in SIZES.items():
            pages = Pages(size, config, model)
            sides = {"memcpy": pages.memcpy, "set": pages.set, "get": pages.get}
            rates = medians(alternate(sides, ROUNDS))
            pages.close()
            values |= {f"{side}_{name}_gb_s": round(rate, 3) for side, rate in rates.items()}
            ratios |= {
                f"{side}_vs_memcpy_{name}": round(rates[side] / rates["memcpy"], 3) for side in ("get", "set")
            }
    print_result("storage", ratios, values, options.json)


def _seals() -> tuple[dict[str, float], dict[str, float]]:
    page, seal = memoryview(bytearray(SIZES["1_75_mib"])), memoryview(bytearray(SEAL_BYTES))
    place = Sealer(bytes(32)).locate(bytes(48))
    sides = {
        "seal": lambda: page.nbytes / seconds(lambda: write_seal(place, page, seal)) / 1e9,
        "blake2b": lambda: page.nbytes / seconds(lambda: hashlib.blake2b(page, key=bytes(32)).digest()) / 1e9,
    }
    rates = medians(alternate(sides, 50))
    values = {f"{name}_gb_s": round(rate, 2) for name, rate in rates.items()}
    return {"sealed_vs_blake2b": round(rates["seal"] / rates["blake2b"], 1)}, values


def _digest(model: Path) -> tuple[bytes, float]:
    (model / CACHE_NAME).unlink(missing_ok=True)
    nbytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    found: list[bytes] = []
    took = seconds(lambda: found.append(model_digest(EngineConfig(model=str(model)))))
    return found[0], round(nbytes / took / 1e9, 2)


if __name__ == "__main__":
    main()
