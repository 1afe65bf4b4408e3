"""Several requests at the head of the queue have loads from the host under way: who is admitted, and when."""

from __future__ import annotations

import random
from collections.abc import Hashable
from unittest import mock

import numpy as np
import pytest

from kvcache.base_prefix_cache import MatchResult
from kvcache.radix_key import Namespace, RadixKey
from kvcache.tiers.config import TierConfig
from kvcache.tiers.loads import LoadBacks
from scheduler.config import SchedulerConfig
from scheduler.req import Req, ReqState
from tests.kvcache.support import HandMover
from tests.scheduler.rig import GROUPS, Rig

PAGE = 8


def prompt(seed: int, length: int = 80) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(400) for _ in range(length)]


def rig_of(groups: tuple[str, ...] = (), pool: int = 1024, running: int = 8, **more: object) -> Rig:
    tiers = TierConfig(ratio=8.0, load_back_threshold=1)
    config = SchedulerConfig(model="m", max_running_requests=running, chunked_prefill_size=32)
    return Rig(
        PAGE, pool, 256, config=config, groups=groups, window=20, interval=8, tiers=tiers, mover=HandMover(),
        **more,  # type: ignore[arg-type]
    )  # fmt: skip


def mover_of(rig: Rig) -> HandMover:
    assert isinstance(rig.mover, HandMover)
    return rig.mover


def loads_of(rig: Rig) -> LoadBacks:
    assert rig.memory.tiers is not None
    return rig.memory.tiers.moves.loads


def run(rig: Rig) -> None:
    """Until nothing is left to do."""
    for _ in range(2000):
        mover_of(rig).do_all()
        if not rig.step() and rig.scheduler.idle:
            return
    raise AssertionError("no end in sight")


def on_host(rig: Rig, *prompts: list[int]) -> None:
    """These are cached on the host, and not on the device."""
    for tokens in prompts:
        rig.add(tokens, 1)
        run(rig)
    for name, allocator in rig.memory.allocators.items():
        rig.memory.cache.tree.evict(name, allocator.num_pages)
    rig.policy.prefilled.clear()


def admitted(rig: Rig) -> list[int]:
    """Rooms, in the order in which their prompts were complete."""
    return [req.room for req in rig.policy.prefilled]


@pytest.mark.parametrize("groups", GROUPS, ids="+".join)
def test_several_load_and_the_queue_keeps_its_order(groups: tuple[str, ...]) -> None:
    rig = rig_of(groups)
    prompts = [prompt(seed) for seed in range(4)]
    on_host(rig, *prompts)
    reqs = [rig.add([*tokens, 1], 4) for tokens in prompts]
    rig.step()
    assert mover_of(rig).count("loads") == 4
    while mover_of(rig).do("loads", which=-1):  # the last is done first
        assert not admitted(rig)
        rig.step()
    run(rig)
    assert admitted(rig) == [req.room for req in reqs]
    assert all(req.cached_tokens >= 72 for req in reqs)
    rig.assert_outputs()
    rig.close()


def test_loads_run_while_another_prompt_is_computed() -> None:
    rig = rig_of()
    tokens = prompt(1)
    on_host(rig, tokens)
    computed = rig.add(prompt(2, 200), 4)
    loaded = rig.add([*tokens, 1], 4)
    rig.step()
    assert computed.state is ReqState.PREFILL
    assert mover_of(rig).count("loads") == 1
    mover_of(rig).do("loads")
    run(rig)
    assert loads_of(rig).loading == 0
    assert admitted(rig) == [computed.room, loaded.room]
    assert loaded.cached_tokens == 80
    rig.assert_outputs()
    rig.close()


def test_who_comes_while_others_load_loads_too() -> None:
    rig = rig_of()
    prompts = [prompt(seed) for seed in range(2)]
    on_host(rig, *prompts)
    for loads, tokens in enumerate(prompts, start=1):
        rig.add([*tokens, 1], 4)
        rig.step()
        assert mover_of(rig).count("loads") == loads
    run(rig)
    rig.assert_outputs()
    rig.close()


def test_what_two_share_is_loaded_once() -> None:
    rig = rig_of()
    tokens = prompt(1)
    on_host(rig, tokens)
    reqs = [rig.add([*tokens, last], 4) for last in (1, 2, 3)]
    rig.step()
    assert mover_of(rig).count("loads") == 1
    run(rig)
    assert rig.memory.tiers is not None
    assert rig.memory.tiers.moves.counts.to_device_pages == 10
    assert [req.cached_tokens for req in reqs] == [80, 80, 80]
    rig.assert_outputs()
    rig.close()


def test_nothing_is_loaded_ahead_into_memory_that_is_needed_before() -> None:
    rig = rig_of(pool=256)
    small = prompt(1)
    on_host(rig, small)
    large = rig.add(prompt(2, 200), 2)
    rig.add([*small, 1], 4)
    large.in_flight, waits = 1, large.in_flight  # it cannot be admitted yet
    rig.step()
    assert mover_of(rig).count("loads") == 0
    large.in_flight = waits
    run(rig)
    rig.assert_outputs()
    rig.close()


def test_loads_begin_when_memory_becomes_free_while_another_prompt_is_computed() -> None:
    """The head of the queue is the same as when there was too little."""
    rig = rig_of(pool=480)
    tokens = prompt(1)
    on_host(rig, tokens)
    ends = rig.add(prompt(2, 150), 3)
    while ends.state is not ReqState.RUNNING:
        rig.step()
    computed = rig.add(prompt(3, 250), 4)
    loaded = rig.add([*tokens, 1], 4)
    rig.step()
    assert mover_of(rig).count("loads") == 0
    while ends.state is not ReqState.DONE:
        rig.step()
    rig.step()
    assert computed.state is ReqState.PREFILL
    assert mover_of(rig).count("loads") == 1
    run(rig)
    assert loaded.cached_tokens == 80
    rig.assert_outputs()
    rig.close()


@pytest.mark.parametrize("gives_way", [False, True])
@pytest.mark.parametrize("groups", GROUPS, ids="+".join)
def test_what_cannot_be_loaded_is_computed(groups: tuple[str, ...], gives_way: bool) -> None:
    """One load is tried for each request, whether ahead of its turn or in it."""
    rig = rig_of(groups)
    tokens = prompt(1)
    on_host(rig, tokens)
    reqs = [rig.add([*tokens, last], 4) for last in (1, 2)]
    for _ in range(200):
        if gives_way:
            loads_of(rig).make_room()
        while mover_of(rig).do("loads", fails=True):
            pass
        mover_of(rig).do("backups")
        if not rig.step() and rig.scheduler.idle:
            break
    assert admitted(rig) == [req.room for req in reqs]
    assert rig.memory.tiers is not None
    assert 1 <= rig.memory.tiers.moves.counts.failed_loads <= 2
    rig.assert_outputs()
    rig.close()


@pytest.mark.parametrize("is_done", [True, False])
@pytest.mark.parametrize("groups", GROUPS, ids="+".join)
def test_what_was_loaded_ahead_gives_way_to_the_head(groups: tuple[str, ...], is_done: bool) -> None:
    """A request that comes first after the loads were begun needs the memory."""
    rig = rig_of(groups, pool=256, running=2)
    prompts = [prompt(seed) for seed in range(2)]
    on_host(rig, *prompts)
    waiting = [rig.add([*tokens, 1], 4) for tokens in prompts]
    rig.step()
    assert mover_of(rig).count("loads") >= 1
    if is_done:
        mover_of(rig).do("loads", which=-1)
    first = rig.add(prompt(7, 180), 4, priority=1)
    rig.step()
    run(rig)
    assert admitted(rig)[0] == first.room or not is_done
    assert sorted(admitted(rig)) == sorted([first.room, *(req.room for req in waiting)])
    rig.assert_outputs()
    rig.close()


def test_aborted_loads_give_their_pages_back() -> None:
    rig = rig_of()
    prompts = [prompt(seed) for seed in range(4)]
    on_host(rig, *prompts)
    reqs = [rig.add([*tokens, 1], 4) for tokens in prompts]
    rig.step()
    mover_of(rig).do("loads", which=2)
    for req in (reqs[2], reqs[0]):  # one that is loaded, one that is not
        assert rig.scheduler.abort(req.room, req.epoch)
    rig.step()
    run(rig)
    assert admitted(rig) == [reqs[1].room, reqs[3].room]
    rig.assert_outputs(reqs[0].room, reqs[2].room)
    rig.close()


@pytest.mark.covering("invariants")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("groups", GROUPS, ids="+".join)
def test_small_pools_and_moves_in_any_order(groups: tuple[str, ...], seed: int) -> None:
    rng = random.Random(seed)
    rig = rig_of(groups, pool=256, running=3)
    prompts = [prompt(number, rng.randrange(30, 120)) for number in range(5)]
    on_host(rig, *prompts)
    reqs: list[Req] = []
    gone: list[int] = []
    for _ in range(3000):
        if len(reqs) < 30 and rng.random() < 0.2:
            tokens = prompts[rng.randrange(5)][: rng.randrange(20, 120)]
            reqs.append(rig.add([*tokens, *prompt(len(reqs), rng.randrange(1, 40))], rng.randrange(1, 12)))
        if reqs and rng.random() < 0.02 and rig.scheduler.abort((req := rng.choice(reqs)).room, req.epoch):
            gone.append(req.room)
        for _ in range(rng.randrange(3)):
            mover_of(rig).do(rng.choice(["backups", "loads"]), rng.random() < 0.1, rng.randrange(4))
        rig.step()
        if len(reqs) == 30 and rig.scheduler.idle:
            break
    run(rig)
    rig.assert_outputs(*gone)
    rig.close()


@pytest.mark.parametrize("groups", GROUPS, ids="+".join)
def test_a_load_that_finds_no_room_may_evict_what_was_matched(groups: tuple[str, ...]) -> None:
    """It evicts first, and keeps only what it needs itself: the window and state at the end of what is on the
    device are not that."""
    rig = rig_of(groups)
    tokens = prompt(1)
    rig.add(tokens[:40], 1)
    run(rig)
    on_device = rig.memory.cache.match_prefix(RadixKey(np.array(tokens, np.int32), Namespace("m")))
    assert len(on_device.device_indices) == 40
    rig.add(tokens, 1)
    run(rig)
    rig.memory.cache.tree.evict("full", 5)
    tried = []

    def finds_no_room(loads: LoadBacks, owner: Hashable, match: MatchResult, fits: bool) -> bool:
        tried.append((len(match.device_indices), match.host_hit_length))
        for name, allocator in rig.memory.allocators.items():
            rig.memory.cache.tree.evict(name, allocator.num_pages)
        return False

    with mock.patch.object(LoadBacks, "bring_back", finds_no_room):
        req = rig.add([*tokens, 1], 4)
        run(rig)
    assert tried[0] == (40, 40)
    assert req.cached_tokens == 0
    rig.assert_outputs()
    rig.close()
