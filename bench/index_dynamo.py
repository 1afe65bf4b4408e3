"""NVIDIA Dynamo's side of bench.index: its RadixTree and its SelectionService, where they are installed.

RadixTree is fed in process, from JSON as its Python interface wants it; SelectionService subscribes to the
same sockets as our event plane and hashes the tokens itself.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import threading
import time
from collections import deque
from types import ModuleType
from typing import Any

import numpy as np

from bench.index_load import PAGE, Form, Load
from bench.index_publisher import TIMEOUT_S, Remote

OUTSTANDING = 64


def dynamo() -> ModuleType | None:
    """Its extension module; None where `ai-dynamo-runtime` is not installed."""
    os.environ.setdefault("DYN_LOG", "error")
    try:
        return importlib.import_module("dynamo._core")
    except ImportError:
        return None


class DynamoTree:
    """RadixTree with everything in it."""

    def __init__(self, core: ModuleType, load: Load) -> None:
        self._load = load
        self._pages: list[list[int]] = [row.view(np.uint64).tolist() for row in load.hashes]
        self._stores = {
            (sequence, start): self._stored(sequence, start)
            for sequence in range(load.shape.sequences)
            for start in (0, load.shape.shared)
        }
        self._removals = [
            self._event({"removed": {"block_hashes": p[load.shape.shared :]}}) for p in self._pages
        ]
        self._tree = core.RadixTree()
        self._closing = threading.Event()
        self._churned = 0

    def fill(self) -> float:
        """Blocks per second, in process."""
        started = time.perf_counter()
        for worker, sequence, start in self._load.insertions():
            self._tree.apply_event(worker, self._stores[sequence, start])
        self._tree.find_matches(self._pages[0])  # it works in order: after this everything is in
        return self._load.blocks() / (time.perf_counter() - started)

    def find(self, sequence: int) -> float:
        """Seconds of one match of 128 ready hashes against all workers."""
        pages = self._pages[sequence]
        started = time.perf_counter()
        self._tree.find_matches(pages)
        return time.perf_counter() - started

    def churn(self, blocks_s: float) -> None:
        """Evict and insert again in a thread at that rate, until `stop_churn`."""
        shape = self._load.shape
        random = np.random.default_rng(6)
        self._closing.clear()
        self._churned = 0

        def run() -> None:
            started = time.perf_counter()
            while not self._closing.wait(0.002):
                while self._churned < (time.perf_counter() - started) * blocks_s:
                    worker = int(random.integers(shape.workers))
                    sequence = int(self._load.held[worker, random.integers(shape.held)])
                    self._tree.apply_event(worker, self._removals[sequence])
                    self._tree.apply_event(worker, self._stores[sequence, shape.shared])
                    self._churned += 2 * (shape.pages - shape.shared)

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def stop_churn(self) -> int:
        """End it; how many blocks."""
        self._closing.set()
        self._thread.join()
        return self._churned

    def _stored(self, sequence: int, start: int) -> bytes:
        pages = self._pages[sequence]
        blocks = [{"block_hash": page, "tokens_hash": page} for page in pages[start:]]
        return self._event({"stored": {"parent_hash": pages[start - 1] if start else None, "blocks": blocks}})

    @staticmethod
    def _event(data: dict[str, Any]) -> bytes:
        return json.dumps({"event_id": 0, "data": data, "dp_rank": 0}).encode()


class DynamoService:
    """SelectionService that follows the 64 workers. Close it."""

    def __init__(self, core: ModuleType, load: Load, remote: Remote) -> None:
        self._load = load
        self._remote = remote
        self._loop = asyncio.new_event_loop()
        self._service = core.SelectionService(indexer_threads=1)
        self._rooms: deque[str] = deque()
        self._number = 0
        self._requests: list[dict[str, Any]] = []
        self._hash = core.compute_block_hash_for_seq
        for at, record in enumerate(remote.open()):
            worker = {
                "worker_id": at, "endpoint": f"http://127.0.0.1/{at}", "block_size": PAGE,
                "kv_events_endpoint": record.events, "replay_endpoint": record.replay,
                "max_num_batched_tokens": 8192, "total_kv_blocks": record.total_tokens // PAGE,
            }  # fmt: skip
            self._loop.run_until_complete(self._upsert(worker))
        remote.call("wait_subscribed")

    def fill(self, form: Form) -> float:
        """Receive everything; blocks per second from the first send until each worker's last node is in."""
        load = self._load
        last = [int(sequences[-1]) for sequences in load.held]
        requests = [self._request(sequence) for sequence in last]
        started = time.perf_counter()
        self._remote.start("send", form)
        for worker, request in enumerate(requests):
            while self.matched(request, worker) < load.shape.pages:
                assert time.perf_counter() - started < TIMEOUT_S, "batches are missing"
                time.sleep(0.01)
        took = time.perf_counter() - started
        self._remote.result()
        return load.blocks() / took

    def matched(self, request: dict[str, Any], worker: int) -> int:
        """Pages of the prompt that it says the worker holds."""
        scores = self._loop.run_until_complete(self._overlap(request))
        return max(
            (one["device_blocks"] for one in scores["workers"] if one["worker_id"] == worker), default=0
        )

    def prepare_select(self) -> None:
        """Hash every prompt, as it wants it."""
        self._requests = [self._request(sequence) for sequence in range(self._load.shape.sequences)]

    def select(self, sequence: int) -> float:
        """Seconds of one select_and_reserve with ready hashes."""
        took, room = self._loop.run_until_complete(self._select(self._requests[sequence]))
        self._rooms.append(room)
        if len(self._rooms) > OUTSTANDING:
            self._loop.run_until_complete(self._free(self._rooms.popleft()))
        return took

    def close(self) -> None:
        """Stop it; the workers close too."""
        self._service.shutdown()
        self._loop.close()
        self._remote.call("close")

    def _request(self, sequence: int) -> dict[str, Any]:
        tokens: list[int] = self._load.tokens[sequence].tolist()
        names: list[int] = self._load.hashes[sequence].tolist()
        return {
            "block_hashes": np.array(self._hash(tokens, PAGE), np.uint64).view(np.int64).tolist(),
            "sequence_hashes": names,
            "isl_tokens": len(tokens) + 8,
        }

    async def _upsert(self, worker: dict[str, Any]) -> None:
        await self._service.upsert_worker(worker)

    async def _overlap(self, request: dict[str, Any]) -> Any:
        return await self._service.overlap_scores(request)

    async def _select(self, request: dict[str, Any]) -> tuple[float, str]:
        self._number += 1
        room = str(self._number)
        started = time.perf_counter()
        await self._service.select_and_reserve({**request, "selection_id": room})
        return time.perf_counter() - started, room

    async def _free(self, room: str) -> None:
        await self._service.free_reservation(room)
