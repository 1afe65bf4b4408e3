"""A device that is slower than the host: nothing leaves, is freed or is timed before its forward is done."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.errors import DeviceLost
from scheduler.config import SchedulerConfig
from scheduler.node_policy import AfterPrefill
from scheduler.req import Req
from tests.scheduler.rig import GROUPS, Recorder, Rig, touched
from tests.support.late_device import LateDevice, LateEngine

CONFIG = SchedulerConfig(model="m", max_running_requests=8, chunked_prefill_size=32)


class Ships(Recorder):
    """Reads the pages that may leave, at the moment at which a policy would give them to the transfer."""

    rig: Rig
    shipped = 0

    def on_chunk(self, req: Req) -> None:
        super().on_chunk(req)
        self.ship(req)

    def on_prefilled(self, req: Req) -> AfterPrefill:
        self.ship(req)
        return super().on_prefilled(req)

    def ship(self, req: Req) -> None:
        slots = self.rig.memory.req_to_token_pool.req_to_token[req.req_pool_idx, : req.kv_committed_len]
        pages, offsets = np.divmod(slots, self.rig.page_size)
        data = self.rig.pool.data.numpy()  # [page, layer, K or V, head, offset, head_dim]
        assert data[pages, 0, 0, 0, offsets, 0].tolist() == req.fill_ids[: len(slots)].tolist()
        assert data[pages, 0, 1, 0, offsets, 0].tolist() == list(range(len(slots)))
        self.shipped += 1


def late_rig(depth: int, groups: tuple[str, ...] = (), **more: object) -> tuple[Rig, LateDevice, Ships]:
    device = LateDevice()
    config = replace(CONFIG, overlap_depth=depth, result_timeout_s=1.0)
    rig = Rig(config=config, groups=groups, device=device, clock=device.clock, **more)  # type: ignore[arg-type]
    rig.pool.bytes.fill_(85)
    ships = Ships()
    ships.rig = rig
    rig.policy = rig.scheduler._results._policy = ships
    return rig, device, ships


def step(rig: Rig) -> bool:
    """One step. What is free after it is touched by no forward that the device has not done."""
    worked = rig.step()
    engine = rig.engine.inner
    assert isinstance(engine, LateEngine)
    for batch in engine.unfinished:
        pages = touched(batch, rig.window, rig.page_size)
        for name, allocator in rig.memory.allocators.items():
            assert not set(allocator.free_pages.tolist()) & pages[name], f"a {name} page is free too early"
    return worked


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("groups", GROUPS, ids="+".join)
def test_no_page_leaves_or_is_freed_before_its_forward_is_done(depth: int, groups: tuple[str, ...]) -> None:
    rig, _, ships = late_rig(depth, groups)
    for i in range(4):
        rig.add(range(i, i + 90), 6)
    aborted = rig.add(range(300, 400), 20)
    for _ in range(6):
        step(rig)
    rig.scheduler.abort(aborted.room, aborted.epoch)
    while not rig.scheduler.idle:
        assert step(rig)
    rig.assert_outputs(aborted.room)
    assert ships.shipped >= 4
    assert max(len(ends) for ends in ships.chunk_ends.values()) >= 2
    rig.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_forward_is_timed_until_the_device_has_done_it(depth: int) -> None:
    rig, _, _ = late_rig(depth)
    rig.add(range(64), 4)
    while not rig.scheduler.idle:
        step(rig)
    load = rig.scheduler.load()
    assert load.prefill_tokens_per_s == pytest.approx(32.0)  # a chunk of 32 in one second of the device
    assert load.decode_step_s == pytest.approx(1.0)
    rig.close()


def test_what_a_stuck_device_may_still_write_is_never_freed() -> None:
    rig, device, ships = late_rig(1)
    req = rig.add(range(90), 5)
    step(rig)
    device.is_stuck = True
    with pytest.raises(DeviceLost, match="no result within"):
        step(rig)
    assert req.req_pool_idx is not None
    assert not ships.shipped
    assert not ships.failed
    device.is_stuck = False
    rig.engine.close()
    rig.memory.close()


def test_the_pages_of_a_forward_that_failed_half_way_wait_for_what_it_had_queued() -> None:
    rig, device, ships = late_rig(0)
    rig.engine.fail_launch = 1
    req = rig.add(range(20), 5)
    step(rig)
    assert req.room in ships.failed
    assert device.done == device.put == 1
    rig.close()
