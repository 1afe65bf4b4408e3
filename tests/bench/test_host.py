"""bench.host measures a decode worker that really decodes, and only our own locks."""

from __future__ import annotations

import queue
import threading

import pytest

from bench.free_engine import Ahead, FreeEngine
from bench.host import Side, decode_worker, start, turn
from bench.host_router import requests, running_router
from bench.timed_lock import own_locks_timed
from wire.request import SamplingParams


@pytest.mark.parametrize("ahead", [None, Ahead(1e-4), Ahead(1e-4, by_thread=True)])
def test_every_room_gets_a_token_in_every_turn(ahead: Ahead | None) -> None:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_new_tokens=40, top_logprobs=2)
    with (
        decode_worker(Side(3, sampling, ahead)) as worker,
        running_router([(worker.record().mailbox, requests(1, 3, 20, sampling))]),
    ):
        assert isinstance(worker.parts.engine, FreeEngine)
        start(worker, 3)
        turn(worker)
        before = [len(room.req.output_ids) for room in worker.rooms()]
        for _ in range(5):
            turn(worker)
        assert [len(room.req.output_ids) for room in worker.rooms()] == [n + 5 for n in before]


def test_only_locks_that_our_code_makes_are_timed() -> None:
    with own_locks_timed() as held:
        lock = threading.Lock()
        queue.Queue[int]().put(1)
        assert held == []
        with lock:
            pass
        other = threading.Thread(target=lock.__enter__)
        other.start()
        other.join()
    assert len(held) == 1
    assert held[0] >= 0
