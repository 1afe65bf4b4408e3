"""The order of the waiting queue."""

from __future__ import annotations

import random

from scheduler.queue import WaitingQueue
from tests.scheduler.rig import Rig


def test_resumed_then_priority_then_first_come() -> None:
    rig, rng, queue = Rig(), random.Random(3), WaitingQueue()
    reqs = [rig.req([1, 2, 3], priority=rng.randint(0, 2), arrived_ns=rng.randint(1, 30)) for _ in range(40)]
    for req in reqs:
        req.resumed = rng.random() < 0.2
    for req in rng.sample(reqs, len(reqs)):
        req.aim_prefill()
        queue.push(req)
    for req in reqs[::7]:
        queue.remove(req)
        reqs.remove(req)
    assert len(queue) == len(reqs)
    assert queue.tokens() == 3 * len(reqs)
    expected = sorted(
        reqs, key=lambda req: (not req.resumed, -req.priority, req.request.arrived_ns, req.room)
    )
    assert [queue.place(req) for req in expected] == list(range(len(reqs)))
    assert queue.head is expected[0]
    assert [queue.pop() for _ in reqs] == expected
    assert queue.head is None
    rig.close()
