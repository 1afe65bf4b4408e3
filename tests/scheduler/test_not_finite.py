"""A request without a valid result fails alone: by name, without pages in the tree, beside others."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache.radix_key import RadixKey
from scheduler.config import SchedulerConfig
from scheduler.node_policy import AfterPrefill
from scheduler.req import Req
from tests.scheduler.rig import GROUPS, Rig
from wire.messages.rooms import RejectKind

OVERLAPS = [(0, False), (1, False), (1, True)]


def open_rig(depth: int, overlap: bool, groups: tuple[str, ...]) -> Rig:
    config = SchedulerConfig(
        model="m", max_running_requests=8, overlap_depth=depth, max_prefill_tokens=96, chunked_prefill_size=32
    )
    return Rig(config=config, engine_overlap=overlap, groups=groups, pool_tokens=2048)


def cached(rig: Rig, req: Req) -> int:
    """Tokens of the request's context that the tree has."""
    key = RadixKey(np.asarray(req.fill_ids), req.namespace, req.tenant)
    return len(rig.memory.cache.match_prefix(key).device_indices)


def go_bad(rig: Rig, req: Req) -> None:
    assert req.req_pool_idx is not None
    rig.engine.bad_rows.add(req.req_pool_idx)


@pytest.mark.covering("invariants")
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(("depth", "overlap"), OVERLAPS)
@pytest.mark.parametrize("steps", [1, 2, 3, 6, 20])
def test_the_bad_one_fails_and_its_neighbours_go_on(
    steps: int, depth: int, overlap: bool, groups: tuple[str, ...]
) -> None:
    rig = open_rig(depth, overlap, groups)
    first = rig.add(range(20), 40)
    bad = rig.add(range(100, 190), 60)
    last = rig.add(range(200, 250), 40)
    for _ in range(steps):
        rig.step()
    if bad.req_pool_idx is None:  # waits for the budget of the first step
        rig.step()
    before = cached(rig, bad)
    committed = bad.kv_committed_len
    go_bad(rig, bad)
    while not rig.policy.failed:
        rig.step()
    why, message = rig.policy.failed[bad.room]
    assert why is RejectKind.FAILED_ALONE
    assert f"room {bad.room} " in message
    assert "not finite" in message
    # Results of forwards that were launched before it went bad may still be taken, and are valid.
    assert cached(rig, bad) <= max(before, committed + depth * 32)
    rig.engine.bad_rows.clear()
    spared = rig.add(range(100, 190), 10)  # the same prompt, which is computed anew
    rig.run()
    rig.assert_outputs(bad.room)
    assert {first.room, last.room, spared.room} <= set(rig.policy.finished)
    assert rig.scheduler.metrics.failed == 1
    rig.close()


@pytest.mark.parametrize(("depth", "overlap"), OVERLAPS)
def test_nothing_of_a_prompt_that_is_bad_from_the_start_is_cached(depth: int, overlap: bool) -> None:
    rig = open_rig(depth, overlap, ())
    rig.engine.bad_rows.update(range(1, 9))
    req = rig.add(range(90), 10)
    rig.run()
    assert rig.policy.failed[req.room][0] is RejectKind.FAILED_ALONE
    assert cached(rig, req) == 0
    assert not rig.policy.outputs
    rig.close()


def test_a_request_that_only_restores_its_kv_fails_alone_too() -> None:
    """A readmitted request samples nothing, but its pages are cached and sent."""
    rig = Rig(after=AfterPrefill.HAND_OFF)
    req = rig.add(range(60), 5)
    rig.run()
    rig.scheduler.hand_off.park(req)
    rig.memory.cache.tree.evict("full", 100)
    rig.engine.bad_rows.update(range(1, 9))
    rig.scheduler.hand_off.readmit(req)
    rig.run()
    assert rig.policy.failed[req.room][0] is RejectKind.FAILED_ALONE
    assert cached(rig, req) == 0
    rig.close()
