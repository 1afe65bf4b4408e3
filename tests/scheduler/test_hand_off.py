"""Prefill on one scheduler, decode on another: reservations, transfers, parking, fences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from scheduler.config import Phase, SchedulerConfig
from scheduler.node_policy import AfterPrefill
from scheduler.req import Req, ReqState
from tests.scheduler.rig import GROUPS, Rig
from wire.messages.rooms import RejectKind


def prefill_rig(page_size: int, depth: int, pool_tokens: int = 512, groups: tuple[str, ...] = ()) -> Rig:
    config = SchedulerConfig(
        model="m",
        max_running_requests=8,
        chunked_prefill_size=32,
        overlap_depth=depth,
        phases=frozenset({Phase.PREFILL}),
    )
    return Rig(page_size, pool_tokens, config=config, after=AfterPrefill.HAND_OFF, groups=groups)


def decode_rig(page_size: int, depth: int, pool_tokens: int = 512, groups: tuple[str, ...] = ()) -> Rig:
    config = SchedulerConfig(model="m", max_running_requests=4, overlap_depth=depth)
    return Rig(page_size, pool_tokens, pre_alloc=4, config=config, groups=groups)


def ship(source: Rig, sent: Req, target: Rig, reserved: Req) -> None:
    """What a transfer does: each group's missing pages, byte for byte."""
    assert sent.req_pool_idx is not None
    size, memory = source.page_size, source.memory
    row = memory.req_to_token_pool.req_to_token[sent.req_pool_idx, : sent.kv_committed_len]
    here: dict[str, npt.NDArray[np.integer]] = {"full": row[::size] // size}
    if memory.swa is not None:
        here["window"] = memory.swa.table[sent.req_pool_idx, : len(here["full"])]
    if sent.state_hold is not None:
        here["state"] = np.array([sent.state_hold.live])
    assert set(here) == set(reserved.reserved) == set(memory.kv_caches)
    for name, (first, pages) in reserved.reserved.items():
        sources = here[name][first:]
        assert len(sources) == len(pages)
        assert np.all(sources > 0), f"{name}: a page that is wanted is not held any more"
        target.memory.kv_caches[name].bytes[pages] = memory.kv_caches[name].bytes[np.asarray(sources)]


def pair(prefill: Rig, decode: Rig, prompt: Sequence[int], max_new: int, forced: int = 0) -> tuple[Req, Req]:
    """The same request for both workers."""
    reference = decode.req(prompt, max_new, forced=forced)
    sent = prefill.req(prompt, max_new, forced=forced)
    return sent, reference


def finish_transfer(prefill: Rig, sent: Req, decode: Rig, reference: Req) -> None:
    ship(prefill, sent, decode, reference)
    prefill.scheduler.hand_off.release(sent)
    decode.scheduler.hand_off.add_transferred(reference, sent.output_ids[-1], None, sent.cached_tokens)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("page_size", [1, 16])
def test_prefill_here_decode_there(page_size: int, depth: int) -> None:
    prefill, decode = prefill_rig(page_size, depth), decode_rig(page_size, depth)
    prompts = [range(70), range(64), range(40, 45), range(70), [*range(50), 9, 9]]
    for i, prompt in enumerate(prompts):
        sent, reference = pair(prefill, decode, prompt, 12, forced=3 if i == 1 else 0)
        assert decode.scheduler.hand_off.reserve(reference)
        found = reference.cached_tokens
        prefill.scheduler.add(sent)
        prefill.run()
        assert sent.state is ReqState.HANDED_OFF
        decode.step()
        finish_transfer(prefill, sent, decode, reference)
        assert reference.cached_tokens == sent.cached_tokens, "what prefill computed again saved nothing"
    assert found == (50 if page_size == 1 else 48)
    decode.run()
    decode.assert_outputs()
    prefill.close()
    decode.close()


def test_a_wholly_cached_prompt_needs_no_page() -> None:
    prefill, decode = prefill_rig(16, 0), decode_rig(16, 0)
    for expected_pages in (4, 0):
        sent, reference = pair(prefill, decode, range(64), 6)
        assert decode.scheduler.hand_off.reserve(reference)
        assert len(reference.reserved["full"].pages) == expected_pages
        prefill.scheduler.add(sent)
        prefill.run()
        finish_transfer(prefill, sent, decode, reference)
        decode.run()
    decode.assert_outputs()
    prefill.close()
    decode.close()


def test_a_reservation_counts_the_growth_of_others() -> None:
    prefill, decode = prefill_rig(16, 0), decode_rig(16, 1, pool_tokens=160)
    references = []
    for start in (0, 30):
        sent, reference = pair(prefill, decode, range(start, start + 30), 90)
        references.append((sent, reference))
    (sent_a, reference_a), (sent_b, reference_b) = references
    assert decode.scheduler.hand_off.reserve(reference_a)
    assert not decode.scheduler.hand_off.reserve(reference_b)  # growth of the first is counted
    for sent in (sent_a, sent_b):
        prefill.scheduler.add(sent)
    prefill.run()
    finish_transfer(prefill, sent_a, decode, reference_a)
    decode.run()
    assert decode.scheduler.hand_off.reserve(reference_b)
    finish_transfer(prefill, sent_b, decode, reference_b)
    decode.run()
    decode.assert_outputs()
    prefill.close()
    decode.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_cancelled_pages_stay_in_quarantine(depth: int) -> None:
    decode = decode_rig(16, depth)
    decode.add(range(16), 1)
    decode.run()
    runner = decode.add(range(100, 120), 30)
    decode.step()
    reference = decode.req(range(64), 6)  # its first page is cached, and locked by the reservation
    assert decode.scheduler.hand_off.reserve(reference)
    assert not decode.scheduler.abort(reference.room, reference.epoch)
    pages = decode.scheduler.hand_off.cancel_reservation(reference)
    assert {name: len(ids) for name, ids in pages.items()} == {"full": 3}
    decode.memory.quarantine(pages, "room")
    decode.check()
    again = decode.req(range(64), 6)
    assert decode.scheduler.hand_off.reserve(again)
    assert not set(pages["full"].tolist()) & set(again.reserved["full"].pages.tolist())
    decode.memory.quarantine(decode.scheduler.hand_off.cancel_reservation(again), "again")
    assert decode.memory.release_quarantine("room") == decode.memory.release_quarantine("again") == 3
    decode.run()
    assert decode.policy.outputs[runner.room] == decode.expected[runner.room]
    decode.close()


def test_reservations_are_bounded_by_their_rows() -> None:
    decode = decode_rig(16, 0, pool_tokens=4096)
    reqs = [decode.req(range(i, i + 20), 2) for i in range(5)]
    assert [decode.scheduler.hand_off.reserve(req) for req in reqs] == [True] * 4 + [False]
    assert decode.scheduler.load().headroom_rows == 0
    for req in reqs[:4]:
        decode.memory.quarantine(decode.scheduler.hand_off.cancel_reservation(req), req.room)
        decode.memory.release_quarantine(req.room)
    assert decode.scheduler.load().headroom_rows == 4
    decode.close()


def test_a_reservation_that_can_never_fit_fails() -> None:
    decode = decode_rig(16, 0, pool_tokens=64)
    req = decode.req(range(70), 2)
    assert not decode.scheduler.hand_off.reserve(req)
    assert req.state is ReqState.DONE
    assert decode.policy.failed[req.room][0] is RejectKind.INVALID
    decode.close()


@pytest.mark.parametrize("evict", [False, True], ids=["still-cached", "evicted"])
@pytest.mark.parametrize("length", [64, 70])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("depth", [0, 1])
def test_parked_holds_nothing_and_comes_back(page_size: int, length: int, evict: bool, depth: int) -> None:
    prefill, decode = prefill_rig(page_size, depth, pool_tokens=128), decode_rig(page_size, depth)
    sent, reference = pair(prefill, decode, range(length), 10)
    prefill.scheduler.add(sent)
    prefill.run()
    prefill.scheduler.hand_off.park(sent)
    prefill.run()
    assert prefill.scheduler.load().headroom_tokens == 128
    if evict:
        other = prefill.add([7] * 120, 2)
        prefill.run()
        prefill.scheduler.hand_off.release(other)
    launches = prefill.engine.launches
    prefill.scheduler.hand_off.readmit(sent)
    assert not prefill.scheduler.idle
    prefill.run()
    assert sent.state is ReqState.HANDED_OFF
    assert prefill.policy.prefilled.count(sent) == 2
    assert len(prefill.policy.outputs[sent.room]) == 1
    if not evict and length % page_size == 0:
        assert prefill.engine.launches == launches  # nothing was missing
    assert decode.scheduler.hand_off.reserve(reference)
    finish_transfer(prefill, sent, decode, reference)
    decode.run()
    decode.assert_outputs()
    prefill.close()
    decode.close()


def test_parked_rooms_never_refuse_a_room_with_a_target() -> None:
    prefill = prefill_rig(16, 0, pool_tokens=128)
    parked = []
    for start in range(12):
        req = prefill.add(range(start, start + 70), 4)
        prefill.run()
        prefill.scheduler.hand_off.park(req)
        parked.append(req)
    for req in parked:
        prefill.scheduler.hand_off.readmit(req)
        prefill.run()
        assert req.state is ReqState.HANDED_OFF
        prefill.scheduler.hand_off.release(req)
    prefill.close()


def test_a_parked_request_may_be_released_or_aborted_while_it_waits() -> None:
    prefill = prefill_rig(16, 0)
    reqs = [prefill.add(range(i, i + 40), 4) for i in range(2)]
    prefill.run()
    for req in reqs:
        prefill.scheduler.hand_off.park(req)
    prefill.scheduler.hand_off.release(reqs[0])
    prefill.scheduler.hand_off.readmit(reqs[1])
    assert prefill.scheduler.abort(reqs[1].room, reqs[1].epoch)
    prefill.run()
    assert all(req.state is ReqState.DONE for req in reqs)
    prefill.close()


@pytest.mark.parametrize("groups", GROUPS, ids="+".join)
@pytest.mark.parametrize("page_size", [1, 16])
def test_hand_off_of_a_request_that_is_decoding_ahead(page_size: int, groups: tuple[str, ...]) -> None:
    """With overlap a decode step is in flight when the request is handed off; its token is dropped."""
    config = SchedulerConfig(model="m", max_running_requests=4, overlap_depth=1)
    prefill = Rig(page_size, 512, config=config, after=AfterPrefill.HAND_OFF, groups=groups)
    decode = decode_rig(page_size, 1, groups=groups)
    for early in (True, False):
        sent, reference = pair(prefill, decode, range(40), 9)
        prefill.scheduler.add(sent)
        while sent.state is not ReqState.HANDED_OFF:
            prefill.step()
        assert sent.in_flight == 1
        if early:  # parked and wanted again before that forward has landed
            prefill.scheduler.hand_off.park(sent)
            prefill.scheduler.hand_off.readmit(sent)
            prefill.check()
        prefill.run()
        assert sent.state is ReqState.HANDED_OFF
        assert decode.scheduler.hand_off.reserve(reference)
        finish_transfer(prefill, sent, decode, reference)
        decode.run()
    assert prefill.scheduler.metrics.surplus_tokens == 2
    decode.assert_outputs()
    prefill.close()
    decode.close()


def test_hand_off_without_a_prefix_cache() -> None:
    """Nothing is cached, so a parked request is computed again and everything is transferred."""
    configs = prefill_rig(16, 0).config, decode_rig(16, 0).config
    prefill = Rig(16, 512, config=configs[0], after=AfterPrefill.HAND_OFF, prefix_cache="none")
    decode = Rig(16, 512, pre_alloc=4, config=configs[1], prefix_cache="none")
    for _ in range(2):
        sent, reference = pair(prefill, decode, range(70), 8)
        prefill.scheduler.add(sent)
        prefill.run()
        prefill.scheduler.hand_off.park(sent)
        prefill.scheduler.hand_off.readmit(sent)
        prefill.run()
        assert decode.scheduler.hand_off.reserve(reference)
        assert len(reference.reserved["full"].pages) == 5
        finish_transfer(prefill, sent, decode, reference)
        decode.run()
    decode.assert_outputs()
    prefill.close()
    decode.close()
