"""Admission: order, growth, fairness, retraction."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.budget import CLAIM_STEPS
from scheduler.config import SchedulerConfig
from scheduler.node_policy import AfterPrefill
from scheduler.req import Req, ReqState
from scheduler.retraction import pick_victim
from tests.scheduler.rig import Rig

CONFIG = SchedulerConfig(model="m", max_running_requests=8)
CACHED = range(400, 432)  # two pages


def test_priority_then_first_come() -> None:
    rig = Rig(config=replace(CONFIG, max_running_requests=1))
    reqs = [rig.add(range(i, i + 20), 2, priority=p) for i, p in enumerate((0, 1, 0, 2))]
    rig.run()
    order = [req.room for req in rig.policy.prefilled]
    assert order == [reqs[3].room, reqs[1].room, reqs[0].room, reqs[2].room]
    rig.assert_outputs()
    rig.close()


def test_a_crowd_delays_another_tenant_by_one_request() -> None:
    """The one that runs when the other comes, and one more of those that wait."""
    rig = Rig(config=replace(CONFIG, max_running_requests=1))
    for i in range(100):
        rig.add(range(i, i + 20), 2, tenant="crowd")
    while len(rig.policy.prefilled) < 5:
        rig.step()
    mine = rig.add(range(200, 220), 2, tenant="mine")
    rig.run()
    assert rig.policy.prefilled.index(mine) <= 6
    rig.assert_outputs()
    rig.close()


def test_the_largest_is_not_starved_by_other_tenants_small_ones() -> None:
    rig = Rig(pool_tokens=256, config=replace(CONFIG, max_running_requests=16))
    for i in range(8):
        rig.add(range(i, i + 20), 10, tenant="small")
    large = rig.add(range(200), 40, tenant="large")
    for step in range(80):
        rig.add([step % 90, *range(18)], 10, tenant=f"new {step}")
        rig.step()
    assert large.req_pool_idx is not None or large.room in rig.policy.finished
    rig.run()
    rig.assert_outputs()
    rig.close()


def test_a_tenants_priority_passes_no_other_tenants_reservation() -> None:
    rig = Rig(pool_tokens=256, pre_alloc=4, config=CONFIG)
    for i in range(6):
        rig.add(range(i, i + 20), 10)
    rig.step()
    large = rig.req(range(200), 20, tenant="large", arrived_ns=1)
    assert not rig.scheduler.hand_off.reserve(large)
    eager = rig.add(range(300, 318), 10, tenant="eager", priority=9, arrived_ns=2)
    while not rig.scheduler.hand_off.reserve(large):
        assert eager.req_pool_idx is None, "it took memory that an earlier reservation waits for"
        rig.step()
    rig.memory.quarantine(rig.scheduler.hand_off.cancel_reservation(large), "large")
    rig.memory.release_quarantine("large")
    rig.run()
    rig.assert_outputs(large.room)
    rig.close()


def test_admission_keeps_room_for_growth() -> None:
    """Two requests whose prompts fit together but whose outputs do not: the second waits."""
    rig = Rig(pool_tokens=160, config=CONFIG)
    first, second = rig.add(range(40), 60), rig.add(range(50, 90), 60)
    rig.step()
    assert first.req_pool_idx is not None
    assert second.req_pool_idx is None
    rig.run()
    assert rig.scheduler.metrics.retracted == 0
    rig.assert_outputs()
    rig.close()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("page_size", [1, 16])
def test_retraction_repeats_and_loses_nothing(page_size: int, depth: int) -> None:
    config = replace(CONFIG, decode_reserve_tokens=0, overlap_depth=depth)
    rig = Rig(page_size=page_size, pool_tokens=160, config=config)
    for start in range(3):
        rig.add(range(start, start + 40), 60)
    rig.run()
    assert rig.scheduler.metrics.retracted > 0
    rig.assert_outputs()
    rig.close()


def test_retracted_resume_before_others() -> None:
    rig = Rig(pool_tokens=128, config=replace(CONFIG, decode_reserve_tokens=0))
    first = [rig.add(range(32), 40), rig.add(range(40, 72), 40)]
    while rig.scheduler.metrics.retracted == 0:
        rig.step()
    (retracted,) = (req for req in first if req.resumed)
    late = rig.add(range(80, 90), 2, priority=9)
    before = len(rig.policy.prefilled)
    rig.run()
    assert rig.policy.prefilled[before:] == [retracted, late]
    rig.assert_outputs()
    rig.close()


def test_victim_has_fewest_outputs_then_longest_input() -> None:
    rig = Rig()
    short, long, rich = rig.req(range(10)), rig.req(range(20)), rig.req(range(30))
    rich.output_ids.append(1)
    assert pick_victim([short, long, rich]) is long
    assert pick_victim([short, rich]) is short


@pytest.mark.parametrize("depth", [0, 1])
def test_the_largest_is_not_starved_by_small_ones(depth: int) -> None:
    """Small requests keep arriving. The large one is admitted when those before it have ended."""
    rig = Rig(pool_tokens=256, config=replace(CONFIG, overlap_depth=depth, max_running_requests=16))
    for i in range(8):
        rig.add(range(i, i + 20), 10)
    large = rig.add(range(200), 40)
    admitted = None
    for step in range(200):
        rig.add([step % 90, *range(18)], 10)
        rig.step()
        if large.req_pool_idx is not None:
            admitted = step
            break
    assert admitted is not None
    assert admitted < 40
    rig.run()
    rig.assert_outputs()
    rig.close()


def test_a_refused_reservation_holds_back_younger_requests() -> None:
    rig = Rig(pool_tokens=256, pre_alloc=4, config=CONFIG)
    for i in range(6):
        rig.add(range(i, i + 20), 10)
    rig.step()
    large = rig.req(range(200), 20)
    for step in range(60):
        if rig.scheduler.hand_off.reserve(large):
            break
        rig.add([step % 90, *range(18)], 10)
        rig.step()
    assert large.req_pool_idx is not None
    rig.memory.quarantine(rig.scheduler.hand_off.cancel_reservation(large), "large")
    rig.memory.release_quarantine("large")
    rig.run()
    rig.assert_outputs(large.room)
    rig.close()


def test_load_counts_growth() -> None:
    rig = Rig(pool_tokens=512, pre_alloc=3, config=CONFIG)
    assert rig.scheduler.load().headroom_tokens == 512
    assert rig.scheduler.load().headroom_rows == 3
    rig.add(range(40), 60)
    assert rig.scheduler.load().queued_prefill_tokens == 40
    rig.step()
    load = rig.scheduler.load()
    assert load.running_requests == 1
    assert load.free_tokens - load.headroom_tokens == 112 - 48  # 100 tokens in 7 pages, 3 of them taken
    rig.run()
    rig.close()


def test_a_reservation_that_waits_leaves_no_headroom_to_later_ones() -> None:
    rig = Rig(pool_tokens=512, max_context=512, pre_alloc=3, config=CONFIG)
    rig.add(range(200), 50)
    rig.step()
    assert rig.scheduler.load().headroom_tokens > 100
    large = rig.req([9] * 300, 10)
    assert not rig.scheduler.hand_off.reserve(large)
    assert rig.scheduler.load().headroom_tokens == 0
    rig.run()
    assert rig.scheduler.load().headroom_tokens == 512  # its turn comes whatever it takes
    assert rig.scheduler.hand_off.reserve(large)
    rig.memory.quarantine(rig.scheduler.hand_off.cancel_reservation(large), "large")
    rig.memory.release_quarantine("large")
    rig.close()


def test_a_reservation_passes_no_older_request_that_waits_for_memory() -> None:
    """The queue's head does not fit; a reservation that came later would, and does not pass it."""
    rig = Rig(pool_tokens=512, max_context=512, pre_alloc=3, config=CONFIG)
    rig.add(range(100), 60)
    rig.step()
    large = rig.add([9] * 350, 10)
    rig.step()
    assert large.req_pool_idx is None
    small = rig.req([7] * 20, 4)
    assert not rig.scheduler.hand_off.reserve(small)
    while not rig.scheduler.hand_off.reserve(small):
        rig.step()
    assert large.req_pool_idx is not None or large.room in rig.policy.finished
    rig.memory.quarantine(rig.scheduler.hand_off.cancel_reservation(small), "small")
    rig.memory.release_quarantine("small")
    rig.run()
    rig.assert_outputs(small.room)
    rig.close()


def test_a_prompt_that_is_aborted_in_the_queue_takes_its_share_of_the_headroom_with_it() -> None:
    rig = Rig(pool_tokens=512, max_context=512, pre_alloc=3, config=CONFIG)
    rig.add(range(100), 200)
    rig.step()
    before = rig.scheduler.load().headroom_tokens
    large = rig.add([9] * 480, 10)
    rig.step()
    assert large.req_pool_idx is None
    assert rig.scheduler.load().headroom_tokens < before - 100
    assert rig.scheduler.abort(large.room, large.epoch)
    assert rig.scheduler.load().headroom_tokens > before - 100
    rig.run()
    rig.close()


def test_a_claim_that_is_not_renewed_ends() -> None:
    """A reservation that was refused and is never tried again keeps nobody out for long."""
    rig = Rig(pool_tokens=512, max_context=512, pre_alloc=3, config=CONFIG)
    runner = rig.add(range(100), 200)
    rig.step()
    assert not rig.scheduler.hand_off.reserve(rig.req([9] * 300, 10))
    small = rig.add([7] * 20, 2)
    rig.step()
    assert small.req_pool_idx is None
    for _ in range(CLAIM_STEPS + 2):
        rig.step()
    assert small.room in rig.policy.finished
    assert runner.room not in rig.policy.finished
    rig.run()
    rig.close()


def test_a_claim_holds_back_no_request_of_greater_priority() -> None:
    rig = Rig(pool_tokens=512, max_context=512, pre_alloc=3, config=CONFIG)
    rig.add(range(100), 100)
    rig.step()
    assert not rig.scheduler.hand_off.reserve(rig.req([9] * 300, 10))
    urgent = rig.add([7] * 20, 2, priority=1)
    rig.step()
    assert urgent.req_pool_idx is not None
    rig.run()
    rig.close()


def test_a_prompt_that_finds_no_row_locks_nothing() -> None:
    """Handed-off requests keep their rows, so a third one of the same prompt is tried in vain."""
    rig = Rig(config=replace(CONFIG, max_running_requests=2), after=AfterPrefill.HAND_OFF)
    reqs = [rig.add(range(50), 2) for _ in range(3)]
    for _ in range(6):
        rig.step()
    assert [req.req_pool_idx is not None for req in reqs] == [True, True, False]
    for req in reqs[:2]:
        rig.scheduler.hand_off.release(req)
    rig.run()
    rig.scheduler.hand_off.release(reqs[2])
    rig.close()


def decode_rig(pool_tokens: int, running: int, depth: int = 0) -> Rig:
    """CACHED is cached. Four more requests than run may be reserved or transferred."""
    config = replace(CONFIG, max_running_requests=running, overlap_depth=depth)
    rig = Rig(pool_tokens=pool_tokens, pre_alloc=4, config=config)
    rig.add(CACHED, 1)
    rig.run()
    return rig


def transfer(rig: Rig, max_new: int, arrived_ns: int = 0) -> Req | None:
    """A request comes whose KV is cached here, with its first token. None when it is refused."""
    req = rig.req(CACHED, max_new, arrived_ns=arrived_ns)
    if not rig.scheduler.hand_off.reserve(req):
        rig.scheduler.hand_off.withdraw(req)
        del rig.expected[req.room]
        return None
    assert not len(req.reserved["full"].pages)
    rig.scheduler.hand_off.add_transferred(req, rig.expected[req.room][0], None, 0)
    return req


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("running", [1, 3])
def test_a_prompt_has_a_place_before_transferred_requests_that_came_later(running: int, depth: int) -> None:
    """There are always transferred requests that wait for a place. With overlap a place is free before the
    row of the request that has ended, so one of them may pass."""
    rig = decode_rig(4096, running, depth)
    while transfer(rig, 6):
        rig.step()
    prompt = rig.add(range(40), 4)
    later: list[Req] = []
    for _ in range(60):
        while (req := transfer(rig, 6)) is not None:
            later.append(req)
        rig.step()
        if prompt.req_pool_idx is not None:
            break
    assert prompt.req_pool_idx is not None
    assert later
    assert sum(req.state is not ReqState.TRANSFERRED for req in later) < running + depth
    rig.run()
    rig.assert_outputs()
    rig.close()


@pytest.mark.parametrize("is_claimed", [False, True])
def test_no_place_is_kept_for_a_prompt_that_must_wait(is_claimed: bool) -> None:
    """What it needs, or what an earlier reservation needs, is held by those that wait for the place."""
    rig = decode_rig(256, running=1)
    for _ in range(3):
        assert transfer(rig, 40, arrived_ns=1)
    large = rig.req(range(200), 4, arrived_ns=-1)
    prompt = rig.add(range(40), 4) if is_claimed else large
    if not is_claimed:
        rig.scheduler.add(large)
    for _ in range(3 * 39):
        assert not is_claimed or not rig.scheduler.hand_off.reserve(large)
        assert prompt.req_pool_idx is None
        launches = rig.engine.launches
        rig.step()
        assert rig.engine.launches > launches, "the place is empty"
    assert len(rig.policy.finished) == 4
    if is_claimed:
        rig.scheduler.hand_off.withdraw(large)
    rig.run()
    rig.assert_outputs(*([large.room] if is_claimed else []))
    rig.close()


def test_a_paused_request_goes_on_before_a_prompt_that_came_first() -> None:
    rig = decode_rig(4096, running=1)
    paused = transfer(rig, 20)
    assert paused is not None
    rig.step()
    assert rig.scheduler.hand_off.pause(paused)
    rig.scheduler.hand_off.resume(paused)
    prompt = rig.add(range(40), 4, arrived_ns=-1)
    rig.step()
    assert paused.state is ReqState.RUNNING
    assert prompt.state is ReqState.WAITING
    rig.run()
    rig.assert_outputs()
    rig.close()
