"""Several groups in memory: frees, quarantine and sizes by group, no prefix caching, a state's travels."""

from __future__ import annotations

import os
from itertools import permutations
from typing import Any

import pytest

from common.errors import ConfigError
from kvcache.config import MIN_STATE_SLOTS, CacheConfig
from kvcache.layout import GroupSpec, KVGroupSpec, LatentGroupSpec, pages_in
from kvcache.memory import build_memory
from kvcache.pool import MambaPool, MLAKVCache
from kvcache.request import MOVING, StateHold
from tests.kvcache.driver import Driver
from tests.kvcache.support import SPEC, groups, memory

PAGE = 4
A, B, C = ([name] * 8 for name in (1, 2, 3))


def drive(*kinds: str, **options: Any) -> Driver:
    """A driver over a full group and those named, at 4 tokens a page."""
    return Driver(memory(PAGE, specs=groups(*kinds), **options))


# -- frees and quarantine ------------------------------------------------------------------------------


def test_pages_of_every_group_wait_in_quarantine() -> None:
    driver = drive("window", "state")
    built = driver.memory
    assert built.swa is not None
    assert built.states is not None
    pages, own, slots = (
        built.allocator.alloc_pages(2),
        built.swa.allocator.alloc_pages(3),
        built.states.alloc(1),
    )
    assert pages is not None
    assert own is not None
    assert slots is not None
    built.quarantine({"full": pages, "window": own, "state": slots}, "room")
    report = built.check_memory()
    assert report.quarantined_pages == 2
    assert {name: books.quarantined for name, books in report.groups.items()} == {"window": 3, "state": 1}
    assert built.release_quarantine("room") == 6
    assert all(books.quarantined == 0 for books in built.check_memory().groups.values())


def test_a_free_group_spans_all_groups_but_what_is_evicted_is_free_at_once() -> None:
    driver = drive("window", "state")
    built = driver.memory
    driver.run(A + B, chunk=8)
    assert built.states is not None
    slots = built.states.alloc(1)
    assert slots is not None
    before = built.states.allocator.available_pages()
    built.free_group_begin()
    built.states.free(slots.tolist())
    assert built.cache.tree.evict("state", 1) == 1
    assert built.states.allocator.available_pages() == before + 1
    for name in ("window", "full"):
        before = built.allocators[name].available_pages()
        evicted = built.cache.tree.evict(name, 1)
        assert built.allocators[name].available_pages() == before + evicted > before
    taken = built.free_group_take()
    assert {name: pages.tolist() for name, pages in taken.items()} == {"state": slots.tolist()}
    built.free(taken)
    driver.check()


def test_a_lost_window_page_or_state_is_named() -> None:
    built = memory(PAGE, specs=groups("window", "state"))
    assert built.swa is not None
    assert built.states is not None
    own, slots = built.swa.allocator.alloc_pages(1), built.states.alloc(1)
    with pytest.raises(AssertionError, match="1 window pages lost"):
        built.check_memory()
    with pytest.raises(AssertionError, match="1 state pages lost"):
        built.check_memory({"window": own if own is not None else ()})
    assert own is not None
    assert slots is not None
    assert built.check_memory({"window": own, "state": slots}).groups["state"].held == 1


@pytest.mark.parametrize("kinds", [("window",), ("state",), ("window", "state")], ids="+".join)
def test_without_prefix_caching_a_request_keeps_its_window_and_its_slots_alone(
    kinds: tuple[str, ...],
) -> None:
    driver = drive(*kinds, prefix_cache="none")
    built = driver.memory
    req = driver.admit([*A, *B, *C])
    for _ in driver.prefill(req, chunk=8):
        pass
    for _ in driver.decode(req, 9):
        report = driver.check()
        if built.swa is not None:
            assert report.groups["window"].held <= 3
    assert report.held_pages == 9
    assert driver.admit(A + B).kv_committed_len == 0
    for live in tuple(driver.live):
        driver.finish(live)
    assert all(books.free == books.total for books in driver.check().groups.values())


# -- a state's travels ---------------------------------------------------------------------------------


def test_a_cached_state_is_read_once_and_never_written() -> None:
    hold = StateHold([1, 2], live=9, live_len=8)
    assert hold.decode(8) == (9, 1)
    assert hold.decode(9) == (1, 1)
    assert hold.decode(10) == (1, 1)
    assert (hold.live, hold.live_len, hold.tracked) == (1, MOVING, 0)


def test_a_checkpoint_freezes_one_slot_and_the_other_goes_on() -> None:
    hold = StateHold([1, 2])
    assert hold.prefill(8) == (0, 1)
    assert hold.states() == [(8, 1)]
    assert hold.decode(8, checkpoint=True) == (1, 2)
    assert hold.states() == [(8, 1)]
    for length in range(9, 16):
        assert hold.decode(length) == (2, 2)
    assert hold.decode(16, checkpoint=True) == (2, 1)
    assert hold.states() == [(16, 2)]


def test_chunks_alternate_and_the_state_before_the_last_is_kept() -> None:
    for first, second in permutations((1, 2)):
        hold = StateHold([first, second])
        assert hold.prefill(4) == (0, first)
        assert hold.prefill(8) == (first, second)
        assert hold.states() == [(8, second), (4, first)]
        hold.give(first)
        assert hold.tracked == 0, "what was given may come back with another state in it"
        hold.private.append(3)
        assert hold.prefill(12) == (second, 3)
        assert hold.states() == [(12, 3), (8, second)]


def test_a_checkpoint_survives_picking_up_a_state_of_the_tree() -> None:
    hold = StateHold([1, 2], live=2, live_len=8, tracked=1, tracked_len=4)
    hold.give(2)
    hold.private.append(3)
    assert hold.decode(8) == (2, 3)
    assert hold.states() == [(4, 1)]


# -- building ------------------------------------------------------------------------------------------


def config(**options: Any) -> CacheConfig:
    return CacheConfig(**{"total_tokens": 640, "max_context_len": 320, "max_running_requests": 4, **options})


def test_pools_are_sized_by_group() -> None:
    latent = LatentGroupSpec((0,), kv_lora_rank=8, rope_dim=4, dtype=SPEC.dtype)
    built = build_memory(config(shared=True), [latent, *groups("window", "state", window=32)[1:]])
    assert isinstance(built.kv_caches[built.specs[0].name], MLAKVCache)
    assert isinstance(built.kv_caches["state"], MambaPool)
    assert {name: a.num_pages for name, a in built.allocators.items()} == {
        "latent": 40, "window": 32, "state": 16,
    }  # fmt: skip
    assert all(pool.num_pages == built.allocators[name].num_pages for name, pool in built.kv_caches.items())
    fds = {pool.fd for pool in built.kv_caches.values()} - {None}
    assert len(fds) == 3
    built.close()
    for fd in fds:
        with pytest.raises(OSError):
            os.fstat(fd or -1)


def test_a_full_group_without_layers_has_no_bytes_and_no_descriptor() -> None:
    specs: list[GroupSpec] = [KVGroupSpec((), 2, 4, SPEC.dtype), *groups("window")[1:]]
    built = build_memory(config(shared=True), specs)
    assert built.kv_caches[built.specs[0].name].fd is None
    assert built.kv_caches["window"].fd is not None
    assert built.kv_caches[built.specs[0].name].bytes.numel() == 0
    assert built.allocator.available_pages() == 40
    built.close()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"window_tokens": 16}, "window_tokens"),
        ({"state_slots": MIN_STATE_SLOTS - 1}, "max_mamba_cache_size"),
        ({"mamba_track_interval": 24}, "mamba_track_interval"),
        ({"swa_full_tokens_ratio": 0.0}, "swa_full_tokens_ratio"),
    ],
)
def test_sizes_that_cannot_work_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_memory(config(**change), groups("window", "state"))
    assert caught.value.key == named


def test_defaults_of_sizes() -> None:
    assert config().window_pages(32) == 32, "0.8 of 40"
    assert config(swa_full_tokens_ratio=0.1).window_pages(32) == 20, "a prompt in one chunk"
    assert config(swa_full_tokens_ratio=0.1, max_chunk_tokens=64).window_pages(32) == 8
    assert config(window_tokens=1 << 20).window_pages(32) == 40
    assert (config().num_state_slots, config(pre_alloc_size=8).num_state_slots) == (16, 32)
    assert config(mamba_track_interval=24).num_pages == 40, "no state group, no interval"


def test_capacity_counts_every_group() -> None:
    specs = groups("window", "state")
    full, window, state = (spec.page_bytes(16) for spec in specs)
    room = 11 * full + 6 * window + 4 * state
    assert pages_in(room, specs, 16, window_ratio=0.5, state_slots=3) == 10
    assert pages_in(room - 1, specs, 16, window_ratio=0.5, state_slots=3) == 9
