"""Baton's side of bench.index: the event plane, the index and the placer, composed as in the router."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from bench.index_load import PAGE, Form, Load
from bench.index_publisher import TIMEOUT_S, Remote
from router.events.event_plane import EventPlane
from router.index.global_index import GlobalIndex
from router.placement.placement import Placement
from router.placement.placer import Placer
from router.placement.policies import make_policy
from router.placement.policy import PlacementRequest
from router.placement_options import PolicyWeights
from wire.records import PageHashes, WorkerRecord

OUTSTANDING = 64  # rooms that are placed at a time
_LOOK_S = 0.002


class BatonIndex:
    """An index that an event plane fills from the sockets of 64 workers."""

    def __init__(self, load: Load, remote: Remote, page_hashes: PageHashes = "baton") -> None:
        self._load = load
        self._remote = remote
        self.index = GlobalIndex()
        self._plane = EventPlane(self.index, None)
        self.records: list[WorkerRecord] = remote.open(page_hashes)
        for record in self.records:
            self._plane.follow(record)
        remote.call("wait_subscribed")

    def fill(self, form: Form) -> float:
        """Receive everything. Returns blocks per second, from the first send until all are in the index."""
        batches = sum(1 for _ in self._load.insertions())
        started = time.perf_counter()
        self._remote.start("send", form)
        while self._plane.counters.batches < batches:
            assert time.perf_counter() - started < TIMEOUT_S, "batches are missing"
            time.sleep(_LOOK_S)
        took = time.perf_counter() - started
        self._remote.result()
        assert len(self.index) == self._load.different_pages()
        return self._load.blocks() / took

    def close(self) -> None:
        """Stop the event plane, and close the workers' sockets."""
        self._plane.close()
        self._remote.call("close")


def ingest(load: Load, remote: Remote, form: Form) -> float:
    """Fill an empty index. Returns blocks per second."""
    remote.call("prepare", form)
    filled = BatonIndex(load, remote, "foreign" if form == Form.EXTERNAL else "baton")
    try:
        return filled.fill(form)
    finally:
        filled.close()


def ingest_in_process(load: Load) -> float:
    """Fill an empty index without sockets. Returns blocks per second."""
    index = GlobalIndex()
    for worker in range(load.shape.workers):
        index.join(f"w{worker}")
    batches = [
        (f"w{at}", load.payload(sequence, start, Form.NODE)) for at, sequence, start in load.insertions()
    ]
    started = time.perf_counter()
    for worker_id, payload in batches:
        index.apply(worker_id, payload)
    return load.blocks() / (time.perf_counter() - started)


@contextmanager
def filled(load: Load, remote: Remote) -> Iterator[BatonIndex]:
    """A filled index, with workers that can churn."""
    remote.call("prepare", Form.NODE)
    made = BatonIndex(load, remote)
    try:
        made.fill(Form.NODE)
        yield made
    finally:
        made.close()


class Selector:
    """Chooses and places, and closes each room after OUTSTANDING others. Only choose and place are timed."""

    def __init__(self, load: Load, filled: BatonIndex) -> None:
        weights = PolicyWeights.model_validate({})
        policy = make_policy("kv", weights, alone_tokens=16, chance=random.Random(1))
        self._placer = Placer(filled.index, policy, expect_s=10.0)
        self._placer.update(filled.records, time.monotonic())
        prompt_tokens = load.shape.pages * PAGE + 8
        self._requests = [
            PlacementRequest(prompt_tokens, hashes, output_tokens=256.0) for hashes in load.hashes
        ]
        self._rooms: deque[Placement] = deque()

    def select(self, sequence: int) -> float:
        """Choose (P, D) for a sequence and place it. Returns seconds."""
        placer, request = self._placer, self._requests[sequence]
        started = time.perf_counter()
        now = time.monotonic()
        choice = placer.choose(request, now)
        assert choice is not None
        placement = placer.place(choice, now)
        took = time.perf_counter() - started
        self._rooms.append(placement)
        if len(self._rooms) > OUTSTANDING:
            placer.close(self._rooms.popleft(), now)
        placer.tick(now)
        return took


def find(filled: BatonIndex, load: Load, sequence: int) -> float:
    """Match 128 ready hashes against all workers. Returns seconds."""
    hashes = load.hashes[sequence]
    started = time.perf_counter()
    _ = filled.index.find(hashes).pages
    return time.perf_counter() - started
