"""Whole Batons whose workers have a host tier and a storage, and what such workers say of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.harness.local_stack import Stack, stack
from tests.harness.processes import Child

PAGE_SIZE = 8
STORED_S = 20.0


@contextmanager
def tiered(
    model: Path,
    directory: Path,
    storage: Path,
    prefill: int = 2,
    decode: int = 2,
    router: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[Stack]:
    """Workers that take turns, whose device pools hold little more than one conversation."""
    chosen = {
        "dtype": "float32",
        "threads": 1,
        "page_size": PAGE_SIZE,
        "chunked_prefill_size": 64,
        "max_total_tokens": 512,
        "max_context_tokens": 384,
        "mamba_track_interval": PAGE_SIZE,
        "max_running_requests": 4,
        "hicache_ratio": 2.0,
        "hicache_storage_backend": "file",
        "hicache_storage_path": str(storage),
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_prefetch_threshold": PAGE_SIZE,
        "hicache_storage_prefetch_if_slower": True,
        **options,
    }
    directory.mkdir(exist_ok=True)
    given = {"policy": "round-robin", "prefill_on_decode_tokens": 0, **(router or {})}
    with stack(model, directory, prefill, decode, router=given, **chosen) as running:
        yield running


def wait_until_stored(running: Stack, *workers: Child) -> None:
    """Until these workers, or all, have written what they have cached."""
    deadline = time.monotonic() + STORED_S
    for worker in workers or running.workers:
        while not running.inspect(worker, "tiers")["is_idle"]:
            assert time.monotonic() < deadline, f"{worker.ready} never stops moving"


def computed(running: Stack) -> int:
    """Tokens that prefill chunks have computed on all workers."""
    return sum(running.inspect(worker, "metrics")["prefill_tokens"] for worker in running.workers)


def storages(running: Stack) -> list[dict[str, Any]]:
    """What each worker says of its storage."""
    return [running.inspect(worker, "tiers")["storage"] for worker in running.workers]


def refused(running: Stack) -> dict[str, int]:
    """Pages that were not read or not written, of all workers, by cause."""
    total: Counter[str] = Counter()
    for storage in storages(running):
        total.update(storage["refused"])
    return dict(total)
