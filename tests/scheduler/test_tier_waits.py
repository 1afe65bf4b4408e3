"""Requests that wait for what the host or storage has of their prompts, and those that they wait beside."""

from __future__ import annotations

import pytest

from common.secrets import ClusterSecret
from kvcache.storage.config import StorageConfig
from kvcache.tiers.config import TierConfig
from kvcache.tiers.tiers import Tiers
from scheduler.config import SchedulerConfig
from scheduler.req import Req, ReqState
from tests.kvcache.support import HandMover, set_clock
from tests.scheduler.rig import GROUPS, Rig

STORAGE = StorageConfig(
    backend="tests.kvcache.storage.support:MemoryStore",
    secret=ClusterSecret((b"of the tests of the tiers alone.",)),
)
CACHED = range(100, 196)  # six pages of eight


def rig_of(mover: HandMover, groups: tuple[str, ...] = (), **tiers: object) -> Rig:
    """A pool of 128 tokens."""
    config = TierConfig(ratio=4.0, model_digest=bytes(32), prefetch_threshold=1, **tiers)  # type: ignore[arg-type]
    scheduler = SchedulerConfig(model="m", max_running_requests=2, chunked_prefill_size=None)
    return Rig(
        16, 128, 128, pre_alloc=2, config=scheduler, groups=groups, window=40, tiers=config, mover=mover
    )


def tiers_of(rig: Rig) -> Tiers:
    assert rig.memory.tiers is not None
    return rig.memory.tiers


def run(rig: Rig, mover: HandMover) -> None:
    """Until nothing is left to do."""
    for _ in range(500):
        mover.do_all()
        if not rig.step() and rig.scheduler.idle:
            return
    raise AssertionError("no end in sight")


def cache_on_host(rig: Rig, mover: HandMover) -> None:
    """CACHED is on the host, and not on the device."""
    rig.add([*CACHED, 1], 1)
    run(rig, mover)
    for name, allocator in rig.memory.allocators.items():
        rig.memory.cache.tree.evict(name, allocator.num_pages)
    assert rig.memory.primary.available_pages() == 8


def loading(rig: Rig, mover: HandMover) -> Req:
    """A request whose load has begun."""
    req = rig.add([*CACHED, 2], 2)
    rig.step()
    assert tiers_of(rig).moves.counts.loads == 1
    assert req.state is ReqState.WAITING
    return req


@pytest.mark.parametrize("groups", GROUPS, ids="+".join)
def test_what_was_loaded_for_one_gives_way_to_the_next(groups: tuple[str, ...]) -> None:
    """Another request has come to the head of the queue, and needs the room."""
    mover = HandMover()
    rig = rig_of(mover, groups)
    cache_on_host(rig, mover)
    loading(rig, mover)
    first = rig.add(range(300, 400), 4, priority=1)
    mover.do("loads")
    rig.step()
    assert first.state is not ReqState.WAITING
    run(rig, mover)
    rig.assert_outputs()
    rig.close()


@pytest.mark.parametrize("groups", GROUPS, ids="+".join)
def test_what_was_loaded_for_one_gives_way_to_a_reservation(groups: tuple[str, ...]) -> None:
    mover = HandMover()
    rig = rig_of(mover, groups)
    cache_on_host(rig, mover)
    waits = rig.req([*CACHED, 2], 2)
    assert not rig.scheduler.hand_off.reserve(waits)
    mover.do("loads")
    rig.step()
    assert rig.memory.primary.available_pages() == 2, "what was loaded is kept"
    earlier = rig.req(range(300, 400), 4, arrived_ns=-1)
    assert rig.scheduler.hand_off.reserve(earlier)
    rig.memory.free(rig.scheduler.hand_off.cancel_reservation(earlier))
    rig.scheduler.hand_off.withdraw(waits)
    run(rig, mover)
    rig.close()


@pytest.mark.parametrize("groups", GROUPS, ids="+".join)
def test_what_was_read_for_a_request_stays_until_its_turn(groups: tuple[str, ...]) -> None:
    """It does not fit beside the one that runs. Meanwhile the host gives up whatever it may."""
    mover = HandMover()
    rig = rig_of(mover, groups, storage=STORAGE, prefetch_policy="wait_complete", prefetch_if_slower=True)
    cache_on_host(rig, mover)
    tiers = tiers_of(rig)
    assert tiers.host.clear() == 6
    rig.add(range(300, 400), 12)
    rig.step()
    waits = rig.add([*CACHED, 2], 2)
    for _ in range(4):
        mover.do_all()
        rig.step()
    assert waits.state is ReqState.WAITING
    assert tiers.storage is not None
    assert tiers.storage.counts.read_pages == 6
    tiers.host.clear()
    run(rig, mover)
    assert tiers.moves.counts.loads == 1
    rig.assert_outputs()
    rig.close()


def test_a_storage_that_stands_still_holds_up_reservations_once() -> None:
    mover, now = HandMover(), [0.0]
    rig = rig_of(mover, storage=STORAGE)
    tiers = tiers_of(rig)
    assert tiers.storage is not None
    set_clock(tiers.storage.prefetches, lambda: now[0])
    waiting = [rig.req(range(50 * i, 50 * i + 40), 4) for i in range(8)]
    for req in waiting:
        rig.scheduler.hand_off.prefetch(req)
    while waiting:
        while waiting and rig.scheduler.hand_off.reserve(waiting[0]):
            rig.memory.free(rig.scheduler.hand_off.cancel_reservation(waiting.pop(0)))
        now[0] += 0.05
        rig.step()
        assert now[0] < 1.2, f"{len(waiting)} wait for a storage that does not answer"
    assert len(tiers.storage.prefetches) == 0
    assert rig.scheduler.idle
    rig.close()
