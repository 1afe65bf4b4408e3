"""A request that decodes on one scheduler goes on on another, and nothing is computed twice."""

from __future__ import annotations

import random

import numpy as np
import pytest

from scheduler.config import SchedulerConfig
from scheduler.req import Req, ReqState
from tests.scheduler.rig import GROUPS, Rig
from tests.support.oracle import pairwise
from wire.request import TokenLogprobs

EVERY_GROUP = pytest.mark.parametrize("groups", GROUPS, ids="+".join)


def decode_rig(page_size: int, depth: int, groups: tuple[str, ...], pool_tokens: int = 512) -> Rig:
    config = SchedulerConfig(model="m", max_running_requests=4, overlap_depth=depth)
    return Rig(page_size, pool_tokens, pre_alloc=4, config=config, groups=groups, window=24, interval=16)


def running(rig: Rig, prompt: list[int], max_new: int, outputs: int) -> Req:
    """A request that has this many outputs."""
    req = rig.add(prompt, max_new)
    while len(req.output_ids) < outputs:
        rig.step()
    return req


def reserved(rig: Rig, moved: Req, slack: int) -> Req:
    """The same request on another worker, with all outputs that are known now as input."""
    prompt, max_new = moved.origin_input_ids.tolist(), moved.request.sampling.max_new_tokens
    req = rig.req(prompt, max_new, forced=len(moved.output_ids))
    assert rig.scheduler.hand_off.reserve(req, slack)
    rig.check()
    return req


def ship(source: Rig, moved: Req, target: Rig, req: Req) -> None:
    """What a transfer does: the pages that the paused request holds, byte for byte; all others are noise."""
    assert moved.state is ReqState.PAUSED
    assert moved.req_pool_idx is not None
    size, memory, length = source.page_size, source.memory, moved.kv_committed_len
    row = memory.req_to_token_pool.req_to_token[moved.req_pool_idx, :length]
    here = {"full": row[::size] // size}
    if memory.swa is not None:
        here["window"] = memory.swa.table[moved.req_pool_idx]
    if moved.state_hold is not None:
        assert moved.state_hold.live_len == length
        here["state"] = np.array([moved.state_hold.live])
    filled = target.scheduler.hand_off.filled(req, length)
    assert set(here) == set(filled) == set(memory.kv_caches)
    for name, (first, pages) in req.reserved.items():
        pool = target.memory.kv_caches[name].bytes
        pool[pages] = 77
        for logical, page in enumerate(pages.tolist(), first):
            if page in filled[name]:
                assert here[name][logical], f"{name} page {logical} is wanted and not held any more"
                pool[page] = memory.kv_caches[name].bytes[int(here[name][logical])]


def take_over(source: Rig, moved: Req, target: Rig, req: Req) -> None:
    assert source.scheduler.hand_off.pause(moved)
    ship(source, moved, target, req)
    output = moved.output_ids[len(req.output_ids) : -1]
    target.scheduler.hand_off.add_transferred(req, moved.output_ids[-1], None, moved.cached_tokens, output)
    source.scheduler.hand_off.release(moved)
    source.check()
    target.check()


@pytest.mark.parametrize(("page_size", "depth", "groups"), pairwise([1, 4, 16], [0, 1], GROUPS))
def test_a_move_after_any_step_computes_nothing_twice(
    page_size: int, depth: int, groups: tuple[str, ...]
) -> None:
    for more in (1, 2, 11, 16, 37):
        old, new = decode_rig(page_size, depth, groups), decode_rig(page_size, depth, groups)
        neighbour = new.add(range(200, 230), 30)
        moved = running(old, list(range(more, more + 31)), 60, 3)
        req = reserved(new, moved, slack=48)
        while len(moved.output_ids) < 3 + more:
            old.step()
            new.step()
        take_over(old, moved, new, req)
        new.run()
        assert new.scheduler.metrics.prefill_tokens == neighbour.prompt_len
        new.assert_outputs()
        follow = new.add([*moved.origin_input_ids.tolist(), *req.output_ids], 4)
        new.run()
        if "state" not in groups:
            assert follow.cached_tokens >= (31 + 3 + more) // page_size * page_size, "the tree has all of it"
        new.assert_outputs()
        old.close()
        new.close()


@EVERY_GROUP
def test_what_left_the_window_during_a_move_is_in_no_tree(groups: tuple[str, ...]) -> None:
    """Its pages were reserved and never filled, and a prompt that ends there would read them."""
    old, new = decode_rig(4, 0, groups), decode_rig(4, 0, groups)
    moved = running(old, list(range(31)), 60, 3)
    req = reserved(new, moved, slack=48)
    while len(moved.output_ids) < 40:
        old.step()
    take_over(old, moved, new, req)
    assert req.state_hold is None or req.state_hold.live_len == req.kv_committed_len
    context = [*moved.origin_input_ids.tolist(), *moved.output_ids]
    for length in range(30, 60, 3):
        new.add(context[:length], 2)
        new.run()
    new.assert_outputs()
    old.close()
    new.close()


@EVERY_GROUP
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_move_that_fails_leaves_both_workers_as_they_were(page_size: int, groups: tuple[str, ...]) -> None:
    old, new = decode_rig(page_size, 1, groups), decode_rig(page_size, 1, groups)
    moved = running(old, list(range(31)), 60, 3)
    for _ in range(3):
        req = reserved(new, moved, slack=48)
        for _ in range(5):
            old.step()
        assert old.scheduler.hand_off.pause(moved)
        ship(old, moved, new, req)
        new.memory.quarantine(new.scheduler.hand_off.cancel_reservation(req), req.room)
        new.check()
        new.memory.release_quarantine(req.room)
        old.scheduler.hand_off.resume(moved)
    old.run()
    old.assert_outputs()
    old.close()
    new.close()


@EVERY_GROUP
def test_back_and_forth_with_others_beside(groups: tuple[str, ...]) -> None:
    """One long stream moves many times between two workers that share its pages with other requests."""
    rng = random.Random(5)
    rigs = [decode_rig(4, 1, groups), decode_rig(4, 1, groups)]
    here = 0
    moved = running(rigs[0], list(range(40)), 150, 2)
    for _ in range(20):
        source, target = rigs[here], rigs[1 - here]
        for rig in rigs:
            rig.add(list(range(rng.randrange(5, 60))), rng.randrange(1, 9))
        req = reserved(target, moved, slack=32)
        for _ in range(rng.randrange(1, 6)):
            source.step()
            target.step()
        if len(moved.output_ids) == len(req.output_ids):
            source.step()
        take_over(source, moved, target, req)
        source.expected.pop(moved.room)
        moved, here = req, 1 - here
    for rig in rigs:
        rig.run()
        rig.assert_outputs()
        rig.close()
    assert len(moved.output_ids) == 150


def test_a_slack_is_a_part_of_the_promised_growth_and_is_given_back() -> None:
    old, new = decode_rig(4, 0, ()), decode_rig(4, 0, (), pool_tokens=128)
    other = new.add(range(200, 210), 20)
    new.step()
    moved = running(old, list(range(31)), 60, 3)
    before = new.scheduler.load().headroom_tokens
    req = reserved(new, moved, slack=1000)
    assert req.kv_allocated_len == 92, "31 + 60 tokens are the most that it may become, less the last"
    assert new.scheduler.load().headroom_tokens >= before - 92
    old.step()
    take_over(old, moved, new, req)
    assert req.kv_allocated_len == 36
    new.run()
    assert other.state is ReqState.DONE
    new.assert_outputs()
    old.close()
    new.close()


@pytest.mark.parametrize("pool_tokens", [256, 384])
def test_a_slack_fits_where_the_window_is_longer_than_the_context(pool_tokens: int) -> None:
    """The pool of windows has one whole context, and the slack is a part of it."""
    rig = Rig(pool_tokens=pool_tokens, pre_alloc=4, groups=("window",), window=300)
    req = rig.req(range(100), 156)
    assert rig.scheduler.hand_off.reserve(req, slack=64)
    assert len(req.reserved["window"].pages) == 11, "164 tokens"
    rig.check()
    rig.memory.quarantine(rig.scheduler.hand_off.cancel_reservation(req), req.room)
    rig.memory.release_quarantine(req.room)
    rig.close()


def test_only_tokens_whose_log_probabilities_came_along_are_reported() -> None:
    old, new = decode_rig(4, 0, ()), decode_rig(4, 0, ())
    moved = running(old, list(range(31)), 60, 3)
    req = reserved(new, moved, slack=16)
    for _ in range(5):
        old.step()
    assert old.scheduler.hand_off.pause(moved)
    ship(old, moved, new, req)
    output = moved.output_ids[3:-1]
    known = [TokenLogprobs(-float(i)) for i in range(2)]
    new.policy.outputs[req.room] = moved.output_ids[:5]  # what the router has
    new.scheduler.hand_off.add_transferred(req, moved.output_ids[-1], TokenLogprobs(-9.0), 0, output, known)
    assert len(output) == 4
    assert new.policy.logprobs[req.room] == [*known, TokenLogprobs(-9.0)]
    new.scheduler.abort(req.room, req.epoch)
    old.scheduler.hand_off.release(moved)
    old.close()
    new.close()
