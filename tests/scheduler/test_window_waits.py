"""A prompt in its chunks holds few window pages at a time: what else takes them meanwhile, and what it waits
for."""

from __future__ import annotations

import pytest

from kvcache.tiers.config import TierConfig
from scheduler.config import SchedulerConfig
from scheduler.req import Req, ReqState
from tests.kvcache.support import HandMover
from tests.scheduler.rig import Rig, StubReader
from tests.scheduler.test_load_ahead import PAGE, loads_of, mover_of, on_host, prompt, run


def tight_rig(policy: str = "write_through", pool: int = 1024) -> Rig:
    """With window pages for little more than one request, and pages on the host when the test says so."""
    tiers = TierConfig(ratio=8.0, load_back_threshold=1, write_policy=policy)
    config = SchedulerConfig(model="m", max_running_requests=4, chunked_prefill_size=32)
    return Rig(
        PAGE, pool, 256, pre_alloc=4, config=config, groups=("window",), window=20, interval=8, tiers=tiers,
        mover=HandMover(), tight=True,
    )  # fmt: skip


def step_without_loads(rig: Rig) -> None:
    """One step, and the ends of all moves but loads."""
    rig.step()
    while mover_of(rig).do("backups"):
        pass


def begin_prompt(rig: Rig) -> Req:
    """A long prompt of which the first chunk is computed."""
    req = rig.add(prompt(2, 240), 4)
    while req.kv_committed_len < 32:
        rig.step()
        mover_of(rig).do_all()
    return req


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_a_prompt_waits_for_window_pages_that_are_being_copied_to_the_host(policy: str) -> None:
    rig = tight_rig(policy)
    req = rig.add(prompt(2, 240), 4)
    for turn in range(300):
        rig.step()
        if turn % 3 == 2:
            mover_of(rig).do_all()
        if req.state is ReqState.DONE:
            break
    run(rig)
    assert req.retractions == 0
    assert rig.scheduler.metrics.prefill_tokens == 240
    rig.assert_outputs()
    rig.close()


@pytest.mark.parametrize("is_held", [False, True])
def test_a_prompt_waits_for_window_pages_that_are_still_sent(is_held: bool) -> None:
    """If nothing will free any, it is retracted."""
    rig = tight_rig("write_back")
    req = begin_prompt(rig)
    window, reader = rig.memory.swa, StubReader()
    assert window is not None
    while window.available_pages():  # a page at a time: what others have cached is evicted
        taken = window.alloc(window.available_pages())
        assert taken is not None
        deferred = rig.scheduler._pages.deferred
        if is_held:
            deferred.hold({"window": taken}, 0, reader)
    for _ in range(9):
        rig.scheduler.step()
    assert (req.retractions == 0) is is_held
    reader.idle = True
    if not is_held:
        rig.memory.free({"window": taken})
    run(rig)
    assert (req.retractions == 0) is is_held
    rig.assert_outputs()
    rig.close()


def test_a_load_for_the_next_prompt_leaves_the_window_pages_of_one_that_decodes() -> None:
    rig = tight_rig(pool=2048)
    tokens = prompt(1)
    on_host(rig, tokens)
    reqs = [rig.add(prompt(5 + index, 9), 60) for index in range(2)]
    for _ in range(2):
        rig.step()
        mover_of(rig).do_all()
    rig.add([*tokens, 1], 4)
    for _ in range(40):
        step_without_loads(rig)
    assert [req.retractions for req in reqs] == [0, 0]
    run(rig)
    assert rig.scheduler.metrics.retracted == 0
    rig.assert_outputs()
    rig.close()


def test_a_load_for_a_reservation_leaves_the_window_pages_of_a_prompt() -> None:
    rig = tight_rig()
    tokens = prompt(1)
    on_host(rig, tokens)
    first = begin_prompt(rig)
    reserved = rig.req(tokens, 4)
    while first.state is ReqState.PREFILL:
        assert not rig.scheduler.hand_off.reserve(reserved)
        assert loads_of(rig).loading == 0
        step_without_loads(rig)
    assert first.retractions == 0
    rig.scheduler.hand_off.withdraw(reserved)
    run(rig)
    rig.assert_outputs(reserved.room)
    rig.close()


def test_a_reservation_has_its_window_pages_before_those_of_its_prefix_are_copied() -> None:
    """A prefix that is found again is copied to the host. Its window pages could have been evicted before."""
    rig = tight_rig("write_through_selective")
    window, short = rig.memory.swa, prompt(1, 2 * PAGE + 1)
    rig.add(short, 1)
    run(rig)
    assert window is not None
    taken = window.alloc(window.available_pages() - 4)  # what a reservation needs is left, with the prefix's
    assert taken is not None
    req = rig.req([*short[:-1], *prompt(2, 68)], 4)
    assert rig.scheduler.hand_off.reserve(req)
    assert req.cached_tokens == 2 * PAGE
    assert len(req.reserved["window"].pages) == 4
    rig.memory.free({"window": taken})
    rig.memory.free(rig.scheduler.hand_off.cancel_reservation(req))
    run(rig)
    rig.assert_outputs(req.room)
    rig.close()
