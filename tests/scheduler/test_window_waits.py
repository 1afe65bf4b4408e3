"""A prompt in its chunks holds few window pages at a time: what else takes them meanwhile, and what it waits
for."""

from __future__ import annotations

import pytest

from kvcache.tiers.config import TierConfig
from scheduler.config import SchedulerConfig
from scheduler.req import Req, ReqState
from tests.kvcache.support import HandMover
from tests.scheduler.rig import Rig, StubReader
from tests.scheduler.test_load_ahead import PAGE, mover_of, prompt, run


def tight_rig(policy: str) -> Rig:
    """With window pages for little more than one request, and pages on the host when the test says so."""
    tiers = TierConfig(ratio=8.0, load_back_threshold=1, write_policy=policy)
    config = SchedulerConfig(model="m", max_running_requests=4, chunked_prefill_size=32)
    return Rig(
        PAGE, 1024, 256, pre_alloc=4, config=config, groups=("window",), window=20, interval=8, tiers=tiers,
        mover=HandMover(), tight=True,
    )  # fmt: skip


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
