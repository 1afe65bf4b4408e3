"""Models with a window group, a state group or both: memory of requests, caching, and too little memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvcache.swa_allocator import SWATokenToKVPoolAllocator
from scheduler.config import SchedulerConfig
from scheduler.req import Req, ReqState
from tests.scheduler.rig import GROUPS, Rig
from tests.scheduler.test_hand_off import decode_rig, finish_transfer, pair, prefill_rig
from wire.messages.rooms import RejectKind

CONFIG = SchedulerConfig(model="m", max_running_requests=8, chunked_prefill_size=32)
HYBRID = GROUPS[1:]
STATEFUL = [("state",), ("window", "state")]


def _swa(rig: Rig) -> SWATokenToKVPoolAllocator:
    assert rig.memory.swa is not None
    return rig.memory.swa


def _pages(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


# -- what a request holds ------------------------------------------------------------------------------


@pytest.mark.covering("invariants")
@pytest.mark.parametrize("cache", ["radix", "none"])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("page_size", "window"), [(1, 40), (16, 40), (16, 33), (16, 5), (4, 64)])
def test_a_decoding_request_holds_its_window_and_a_page(
    page_size: int, window: int, depth: int, cache: str
) -> None:
    config = replace(CONFIG, overlap_depth=depth)
    rig = Rig(page_size, groups=("window",), window=window, config=config, prefix_cache=cache)
    reqs = [rig.add(range(start, start + 20 + start), 120) for start in (0, 7, 12)]
    most = 0
    while not rig.scheduler.idle:
        rig.step()
        for req in reqs:
            if req.state is ReqState.RUNNING and req.req_pool_idx is not None and len(req.output_ids) > 1:
                most = max(most, _swa(rig).held_pages(req.req_pool_idx))
    assert _pages(window, page_size) <= most <= _pages(window, page_size) + 1
    rig.assert_outputs()
    rig.close()


@pytest.mark.parametrize("cache", ["radix", "none"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_prefill_holds_its_window_its_chunk_and_a_page(page_size: int, cache: str) -> None:
    window, chunk = 40, 32
    rig = Rig(page_size, groups=("window",), window=window, config=CONFIG, prefix_cache=cache)
    req = rig.add(range(230), 2)
    held = []
    while req.state is not ReqState.DONE:
        rig.step()
        if req.req_pool_idx is not None:
            held.append(_swa(rig).held_pages(req.req_pool_idx))
    assert max(held) <= _pages(window + chunk, page_size) + 1
    assert _pages(window - 1, page_size) <= held[-1] <= _pages(window, page_size) + 1
    rig.close()


@pytest.mark.parametrize("page_size", [1, 16])
def test_steps_between_borders_change_no_state_slot(page_size: int) -> None:
    """A request's first decode step, and one in every interval, moves its state to another slot."""
    rig = Rig(page_size, groups=("state",), config=CONFIG, interval=32)
    rig.add(range(20), 80)
    rig.run()
    moves = []
    for batch in rig.engine.batches[1:]:
        assert batch.state is not None
        if batch.state.reads[0] != batch.state.writes[0]:
            moves.append(int(batch.seq_lens[0]) - 1)
    assert moves[-3:] == [32, 64, 96]
    assert rig.scheduler.metrics.checkpoints == 3
    assert 20 in moves
    rig.close()


# -- what is cached ------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("chunk", [32, None])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("groups", GROUPS, ids="+".join)
def test_a_full_repeat_hits_up_to_the_last_border(
    groups: tuple[str, ...], page_size: int, chunk: int | None, depth: int
) -> None:
    config = replace(CONFIG, chunked_prefill_size=chunk, overlap_depth=depth)
    for length in (64, 70, 100):
        rig = Rig(page_size, groups=groups, config=config)
        first = rig.add(range(length), 4)
        rig.run()
        again = rig.add(range(length), 4)
        rig.run()
        assert first.cached_tokens == 0
        assert again.cached_tokens == (length - 1) // page_size * page_size
        rig.assert_outputs()
        rig.close()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("groups", GROUPS, ids="+".join)
def test_the_next_turn_of_a_conversation_hits(groups: tuple[str, ...], depth: int) -> None:
    rig = Rig(16, groups=groups, config=replace(CONFIG, overlap_depth=depth), interval=32)
    first = rig.add(range(50), 60)
    rig.run()
    turn = rig.add([*range(50), *rig.expected[first.room], *range(30)], 4)
    rig.run()
    assert (
        turn.cached_tokens == 96
    )  # with a state group its last checkpoint, else the outputs' last whole page
    rig.assert_outputs()
    rig.close()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("groups", GROUPS, ids="+".join)
def test_a_fork_hits_from_its_third_request_on(groups: tuple[str, ...], depth: int) -> None:
    """The second one finds the shared prefix without a state at its end, and leaves one there."""
    rig = Rig(16, groups=groups, config=replace(CONFIG, chunked_prefill_size=None, overlap_depth=depth))
    shared = list(range(100))
    reqs = []
    for tail in (200, 300, 400):
        reqs.append(rig.add([*shared, *range(tail, tail + 60)], 4))
        rig.run()
    cached = [req.cached_tokens for req in reqs]
    assert cached == ([0, 0, 96] if "state" in groups else [0, 96, 96])
    rig.assert_outputs()
    rig.close()


@pytest.mark.parametrize("chunk", [64, None])
def test_forwards_end_where_a_state_is_wanted(chunk: int | None) -> None:
    rig = Rig(16, groups=("state",), config=replace(CONFIG, chunked_prefill_size=chunk))
    req = rig.add(range(120), 2)
    rig.run()
    assert rig.policy.chunk_ends[req.room] == ([64, 112] if chunk else [112])
    assert rig.scheduler.metrics.cut_forwards == 1
    rig.assert_outputs()
    rig.close()


# -- short of memory -----------------------------------------------------------------------------------


@pytest.mark.covering("invariants")
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("groups", HYBRID, ids="+".join)
def test_the_least_memory_serves_everybody(groups: tuple[str, ...], page_size: int, depth: int) -> None:
    """With one window and three states, requests wait for each other, and all of them finish."""
    rig = Rig(page_size, groups=groups, config=replace(CONFIG, overlap_depth=depth), tight=True, interval=16)
    for start in (0, 0, 30, 60, 0):
        rig.add(range(start, start + 90), 40)
    rig.run()
    rig.assert_outputs()
    rig.close()


@pytest.mark.covering("invariants")
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("groups", HYBRID, ids="+".join)
def test_retraction_in_decode_loses_nothing(groups: tuple[str, ...], page_size: int, depth: int) -> None:
    config = replace(CONFIG, decode_reserve_tokens=0, overlap_depth=depth)
    rig = Rig(page_size, pool_tokens=160, groups=groups, window=20, config=config, interval=16)
    for start in range(3):
        rig.add(range(start, start + 40), 60)
    rig.run()
    assert rig.scheduler.metrics.retracted > 0
    rig.assert_outputs()
    rig.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_lanes_that_outgrow_the_window_pool_are_retracted(depth: int) -> None:
    """BatchAdmission keeps no room for growth here, and every request's window grows to its full size."""
    config = replace(CONFIG, decode_reserve_tokens=0, overlap_depth=depth, max_running_requests=8)
    rig = Rig(16, pool_tokens=2048, groups=("window",), window=40, config=config, tight=True)
    for start in range(6):
        rig.add(range(start, start + 10), 60)
    rig.run()
    assert rig.scheduler.metrics.retracted > 0
    rig.assert_outputs()
    rig.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_chunk_that_finds_no_window_page_waits_and_then_gives_way(depth: int) -> None:
    """While another request runs it waits. Alone it would wait for ever, so it is retracted."""
    config = replace(CONFIG, overlap_depth=depth)
    rig = Rig(16, pool_tokens=2048, groups=("window",), window=40, config=config, tight=True)
    running = rig.add(range(20), 12)
    rig.step()
    waiting = rig.add(range(30, 230), 8)
    rig.step()
    swa = _swa(rig)
    pages = swa.allocator.alloc_pages(swa.available_pages())  # to a peer that was to write there, say
    assert pages is not None
    rig.memory.quarantine({"window": pages}, "peer")
    while rig.step():
        assert running.state is ReqState.DONE or waiting.state is ReqState.PREFILL
    assert rig.policy.outputs[running.room] == rig.expected[running.room]
    assert waiting.state is ReqState.WAITING
    assert rig.scheduler.metrics.retracted == 1
    rig.memory.release_quarantine("peer")
    rig.run()
    rig.assert_outputs()
    rig.close()


def test_a_prompt_that_no_window_can_hold_is_refused() -> None:
    rig = Rig(16, pool_tokens=1024, groups=("window",), window=40, config=CONFIG, tight=True)
    rig.scheduler._admission._step_tokens = 512  # longer chunks than the pool was sized for
    req = rig.add(range(200), 2)
    rig.run()
    why, message = rig.policy.failed[req.room]
    assert why is RejectKind.INVALID
    assert "200 tokens" in message
    assert "window" in message
    short = rig.add(range(60), 2)
    rig.run()
    assert rig.policy.outputs[short.room] == rig.expected[short.room]
    rig.close()


def test_a_forward_that_fails_leaves_no_state_behind() -> None:
    rig = Rig(16, groups=("window", "state"), config=CONFIG)
    rig.engine.fail_launch = 3
    hit = rig.add(range(90), 20)
    rig.run()
    assert hit.room in rig.policy.failed
    spared = rig.add(range(90), 20)
    rig.run()
    assert rig.policy.outputs[spared.room] == rig.expected[spared.room]
    rig.close()


# -- the hand-off --------------------------------------------------------------------------------------


def _reserved(req: Req) -> dict[str, tuple[int, int]]:
    return {name: (part.first_page, len(part.pages)) for name, part in req.reserved.items()}


@pytest.mark.parametrize("groups", HYBRID, ids="+".join)
def test_a_reservation_names_what_each_group_lacks(groups: tuple[str, ...]) -> None:
    decode = decode_rig(16, 0, groups=groups)
    expected: dict[str, tuple[int, int]] = {"full": (0, 7)}
    if "window" in groups:
        expected["window"] = (3, 4)  # a query at 100 sees 61..100; pages 3 to 6 hold them
    if "state" in groups:
        expected["state"] = (0, 1)
    reference = decode.req(range(100), 6)
    assert decode.scheduler.hand_off.reserve(reference)
    assert _reserved(reference) == expected
    decode.check()
    pages = decode.scheduler.hand_off.cancel_reservation(reference)
    assert {name: len(ids) for name, ids in pages.items()} == {name: n for name, (_, n) in expected.items()}
    decode.memory.quarantine(pages, "room")
    decode.check()
    again = decode.req(range(100), 6)
    assert decode.scheduler.hand_off.reserve(again)
    for name, ids in pages.items():
        assert not set(ids.tolist()) & set(again.reserved[name].pages.tolist())
    decode.memory.quarantine(decode.scheduler.hand_off.cancel_reservation(again), "room")
    decode.memory.release_quarantine("room")
    decode.close()


@pytest.mark.covering("invariants")
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("length", [96, 100])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("groups", HYBRID, ids="+".join)
def test_prefill_here_decode_there(groups: tuple[str, ...], page_size: int, length: int, depth: int) -> None:
    """Twice, parked and brought back in between: the second finds the first one's prompt on both sides."""
    prefill = prefill_rig(page_size, depth, groups=groups)
    decode = decode_rig(page_size, depth, groups=groups)
    for _ in range(2):
        sent, reference = pair(prefill, decode, range(length), 50)
        prefill.scheduler.add(sent)
        prefill.run()
        prefill.scheduler.hand_off.park(sent)
        prefill.scheduler.hand_off.readmit(sent)
        prefill.run()
        assert sent.state is ReqState.HANDED_OFF
        assert decode.scheduler.hand_off.reserve(reference)
        finish_transfer(prefill, sent, decode, reference)
        decode.run()
    assert sent.cached_tokens == (length - 1) // page_size * page_size
    decode.assert_outputs()
    prefill.close()
    decode.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_cached_state_is_handed_off_from_the_tree(depth: int) -> None:
    """All of a parked prompt is cached, its state too: no forward is run to bring it back."""
    groups = ("window", "state")
    prefill, decode = prefill_rig(16, depth, groups=groups), decode_rig(16, depth, groups=groups)
    sent, reference = pair(prefill, decode, range(96), 20)
    prefill.scheduler.add(sent)
    prefill.run()
    prefill.scheduler.hand_off.park(sent)
    launches = prefill.engine.launches
    prefill.scheduler.hand_off.readmit(sent)
    prefill.run()
    assert prefill.engine.launches == launches
    assert sent.state_hold is not None
    assert sent.state_hold.live not in sent.state_hold.private
    assert decode.scheduler.hand_off.reserve(reference)
    finish_transfer(prefill, sent, decode, reference)
    decode.run()
    decode.assert_outputs()
    prefill.close()
    decode.close()


def test_headroom_counts_every_group() -> None:
    config = replace(CONFIG, max_running_requests=2)
    rig = Rig(16, 1024, pre_alloc=8, groups=("window", "state"), config=config, tight=True)
    assert rig.scheduler.load().headroom_rows == 1
    reference = rig.req(range(60), 2)
    assert rig.scheduler.hand_off.reserve(reference)
    assert rig.scheduler.load().headroom_rows == 0
    other = rig.req(range(30), 2)
    assert not rig.scheduler.hand_off.reserve(other)
    rig.memory.quarantine(rig.scheduler.hand_off.cancel_reservation(reference), 1)
    rig.memory.release_quarantine(1)
    assert rig.scheduler.load().headroom_rows == 1
    rig.close()
