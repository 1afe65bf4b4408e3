"""A decoding request is taken out of the batch between two steps, and goes on or is given up."""

from __future__ import annotations

import random

import pytest

from scheduler.config import Phase, SchedulerConfig
from scheduler.req import Req, ReqState
from tests.scheduler.rig import EOS, GROUPS, Rig
from tests.support.oracle import pairwise, seeds


def rig_of(
    page_size: int,
    depth: int,
    groups: tuple[str, ...],
    *,
    pool_tokens: int = 1024,
    rows: int = 4,
    **more: object,
) -> Rig:
    config = SchedulerConfig(
        model="m", max_running_requests=rows, chunked_prefill_size=32, overlap_depth=depth
    )
    return Rig(page_size, pool_tokens, config=config, groups=groups, window=24, interval=16, **more)  # type: ignore[arg-type]


def start(rig: Rig, prompt: range, max_new: int, steps: int) -> Req:
    req = rig.add(prompt, max_new)
    while len(req.output_ids) < 1:
        rig.step()
    for _ in range(steps):
        rig.step()
    return req


@pytest.mark.parametrize(("page_size", "depth", "groups"), pairwise([1, 4, 16], [0, 1], GROUPS))
def test_a_request_paused_after_any_step_goes_on_exactly(
    page_size: int, depth: int, groups: tuple[str, ...]
) -> None:
    rig = rig_of(page_size, depth, groups)
    neighbour = rig.add(range(50, 90), 60)
    for steps in (0, 1, 2, 3, 5, 8, 13, 17, 18, 19):  # to either side of where pages and kept states end
        req = start(rig, range(steps, steps + 30), 24, steps)
        assert rig.scheduler.hand_off.pause(req)
        rig.check()
        assert req.state is ReqState.PAUSED
        assert req.kv_committed_len == req.scheduled_len == req.prompt_len + len(req.output_ids) - 1
        assert req.state_hold is None or req.state_hold.live_len == req.kv_committed_len
        known = len(req.output_ids)
        for _ in range(3):
            rig.step()
        assert len(req.output_ids) == known, "a paused request must not decode"
        rig.scheduler.hand_off.resume(req)
        rig.run()
    assert neighbour.state is ReqState.DONE
    rig.assert_outputs()
    rig.close()


@pytest.mark.parametrize("groups", GROUPS, ids="+".join)
@pytest.mark.parametrize("way", ["release", "drop", "abort"])
def test_a_paused_request_may_be_given_up(way: str, groups: tuple[str, ...]) -> None:
    rig = rig_of(4, 1, groups)
    req = start(rig, range(30), 40, 9)
    assert rig.scheduler.hand_off.pause(req)
    assert rig.scheduler.idle
    if way == "abort":
        assert rig.scheduler.abort(req.room, req.epoch)
    else:
        rig.scheduler.hand_off.release(req, is_insert=way == "release")
    assert req.state is ReqState.DONE
    again = rig.add([*range(30), *req.output_ids], 8)
    rig.run()
    if "state" not in groups:  # a state is cached only where it ends a page
        committed = req.prompt_len + len(req.output_ids) - 1
        assert again.cached_tokens == (28 if way == "drop" else committed // 4 * 4)
    rig.assert_outputs(req.room)
    rig.close()


def test_only_a_request_that_decodes_can_be_paused() -> None:
    rig = rig_of(16, 1, (), rows=1)
    first, second = rig.add(range(100), 6), rig.add(range(40), 4)
    hand_off = rig.scheduler.hand_off
    assert not hand_off.pause(first)  # waits
    rig.step()
    assert first.state is ReqState.PREFILL
    assert not hand_off.pause(first)
    while first.state is not ReqState.RUNNING:
        rig.step()
    assert first.in_flight
    assert not hand_off.pause(second)
    while len(first.output_ids) < 5:
        rig.step()
    assert first.in_flight, "the forward in flight samples the last token"
    assert not hand_off.pause(first)
    assert first.state is ReqState.DONE
    rig.run()
    rig.assert_outputs()
    rig.close()


def test_a_place_in_the_batch_is_taken_by_others_meanwhile() -> None:
    rig = rig_of(16, 1, (), rows=1, pre_alloc=1)
    first = start(rig, range(40), 30, 3)
    assert rig.scheduler.hand_off.pause(first)
    second = rig.add(range(60, 90), 10)
    rig.step()
    rig.scheduler.hand_off.resume(first)
    rig.step()
    assert first.state is ReqState.TRANSFERRED
    rig.run()
    assert second.state is ReqState.DONE
    rig.assert_outputs()
    rig.close()


def test_a_transferred_request_that_waits_for_the_batch_can_be_paused() -> None:
    config = SchedulerConfig(model="m", max_running_requests=1)
    rig = Rig(16, 512, pre_alloc=2, config=config)
    runner = rig.add(range(100, 120), 8)
    rig.step()
    cached = rig.req(range(100, 116), 5)
    assert rig.scheduler.hand_off.reserve(cached)
    assert not len(cached.reserved["full"].pages)
    rig.scheduler.hand_off.add_transferred(cached, rig.expected[cached.room][0], None, 0)
    assert rig.scheduler.hand_off.pause(cached)
    rig.run()
    assert runner.state is ReqState.DONE
    assert len(cached.output_ids) == 1
    rig.scheduler.hand_off.resume(cached)
    rig.run()
    rig.assert_outputs()
    rig.close()


@pytest.mark.parametrize("groups", GROUPS, ids="+".join)
@pytest.mark.parametrize("seed", seeds(3, 6))
def test_pauses_under_memory_pressure(seed: int, groups: tuple[str, ...]) -> None:
    """Small pools: others are retracted while some are paused, and all outputs are exact."""
    rng = random.Random(seed)
    page_size, depth = rng.choice([1, 4, 16]), rng.choice([0, 1])
    small = {"pool_tokens": 256, "max_context": 160, "tight": seed % 2 == 0, "state_slots": 6}
    rig = rig_of(page_size, depth, groups, pre_alloc=2, eos=EOS, **small)  # type: ignore[arg-type]
    reqs: list[Req] = []
    paused: list[Req] = []
    for _ in range(150):
        if rng.random() < 0.15:
            reqs.append(rig.add([rng.randrange(3), *range(rng.randrange(1, 90))], rng.randrange(1, 60)))
        for _ in range(rng.randrange(4)):
            rig.step()
        if reqs and rng.random() < 0.4:
            req = rng.choice(reqs)
            if req.state is not ReqState.PAUSED and rig.scheduler.hand_off.pause(req):
                paused.append(req)
        if paused and rng.random() < 0.4:
            rig.scheduler.hand_off.resume(paused.pop(rng.randrange(len(paused))))
        rig.check()
    for req in paused:
        rig.scheduler.hand_off.resume(req)
    rig.run()
    rig.assert_outputs()
    rig.close()


def test_a_prefill_scheduler_pauses_nothing() -> None:
    config = SchedulerConfig(model="m", max_running_requests=2, phases=frozenset({Phase.PREFILL}))
    rig = Rig(config=config)
    req = rig.add(range(40), 1)
    assert not rig.scheduler.hand_off.pause(req)
    rig.run()
    rig.close()
