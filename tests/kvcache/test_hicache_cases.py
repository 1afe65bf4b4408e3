"""Where hierarchical caches have gone wrong elsewhere, each as a case of ours; the rules of the host tier.

A case names SGLang's issue where it has one (docs/tiers.md says what holds).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from common.secrets import ClusterSecret
from kvcache.memory import Memory
from kvcache.storage.config import StorageConfig
from kvcache.tiers import prefetch_steps
from kvcache.tiers.arrivals import StorageArrivals
from kvcache.tiers.config import TierConfig
from kvcache.tiers.moves import TierMoves
from kvcache.tiers.storage_tier import StorageTier
from kvcache.tiers.tiers import Tiers
from tests.kvcache.driver import Driver
from tests.kvcache.storage.support import MemoryStore
from tests.kvcache.support import HandMover, groups, key, matched, memory, put, radix_cache

STORAGE = StorageConfig(
    backend="tests.kvcache.storage.support:MemoryStore",
    secret=ClusterSecret((b"of the tests of the tiers alone.",)),
)
TOKENS = range(32)  # eight pages
OTHERS = range(100, 132)


class Cases:
    """A memory of 16 pages of four tokens whose moves a test makes by hand."""

    def __init__(self, built: Memory, mover: HandMover) -> None:
        self.memory = built
        self.mover = mover
        assert built.tiers is not None
        self.tiers: Tiers = built.tiers

    @property
    def storage(self) -> StorageTier:
        """The storage tier."""
        assert self.tiers.storage is not None
        return self.tiers.storage

    @property
    def store(self) -> MemoryStore:
        """What keeps its blobs."""
        store = self.storage.backend._store  # type: ignore[attr-defined]
        assert isinstance(store, MemoryStore)
        return store

    def rest(self) -> None:
        """Let everything that moves come to its end."""
        self.tiers.poll()
        while self.mover.waiting or self.mover.finished:
            self.mover.do_all()
            self.tiers.poll()

    def evict(self, pages: int = 1000) -> int:
        """Make room on the device."""
        return self.memory.cache.tree.evict("full", pages)

    def host_free(self) -> int:
        """Free pages on the host."""
        return self.tiers.host.pool.arenas["full"].allocator.available_pages()

    def on_host(self, tokens: range) -> int:
        """Tokens of a prefix that would have to be loaded from the host."""
        return self.memory.cache.match_prefix(key(tokens)).host_hit_length

    def clear_host(self) -> None:
        """Nothing is on device or host."""
        self.evict()
        self.tiers.host.clear()

    def lanes(self) -> list[str]:
        """What waits for the mover."""
        return [lane for lane, *_ in self.mover.waiting]


@contextmanager
def cases(
    storage: bool = True, kinds: tuple[str, ...] = (), pages: int = 16, **options: Any
) -> Iterator[Cases]:
    """At the end every page is accounted for, and nothing is left on its way."""
    mover = HandMover()
    usual = {"ratio": 2.0, "load_back_threshold": 1, "prefetch_threshold": 1, "model_digest": bytes(32)}
    tiers = TierConfig(**{**usual, "storage": STORAGE if storage else None, **options})  # type: ignore[arg-type]
    specs = groups(*kinds)
    with memory(4, pages, specs=specs, mover=mover, tiers=tiers, max_context_len=64) as built:
        made = Cases(built, mover)
        yield made
        made.rest()
        assert made.tiers.is_idle
        built.check_memory()


# -- a node without a copy above nodes with one ---------------------------------------------------------


def test_a_copy_may_be_dropped_while_it_is_written_to_storage() -> None:
    """Its parent is evicted, and finds no room on the host: all below it leaves the tree, too."""
    with cases(ratio=0.25, write_policy="write_back") as made:
        put(made.memory, TOKENS[:16])
        put(made.memory, TOKENS)
        made.evict(4)
        made.tiers.poll()
        assert made.lanes() == ["writes"]
        assert made.evict(4) == 4
        assert made.host_free() == 0, "pages that are read have been freed"
        made.memory.check_memory()
        assert matched(made.memory, TOKENS) == made.on_host(TOKENS) == 0
        made.rest()
        assert made.host_free() == 4
        assert len(made.store.blobs) == 4


def test_a_copy_stays_on_offer_when_a_child_finds_no_room() -> None:
    with cases(storage=False, ratio=0.25) as made:
        put(made.memory, TOKENS[:16])
        made.rest()
        put(made.memory, TOKENS)
        made.rest()
        assert made.host_free() == 0
        put(made.memory, OTHERS[:16])
        made.rest()
        made.evict()
        assert made.on_host(OTHERS) == 16
        assert made.on_host(TOKENS) == 0


def test_a_backup_that_was_postponed_is_made_up_for() -> None:
    """Backups in flight lock at most a fourth of the device: the second has to wait for the first."""
    with cases(storage=False) as made:
        put(made.memory, TOKENS[:16])
        put(made.memory, TOKENS)
        assert made.lanes() == ["backups"]
        made.rest()
        made.evict()
        assert made.on_host(TOKENS) == 32


def counted(owner: type, name: str) -> Any:
    """A context in which a method is counted, and does what it does."""
    return patch.object(owner, name, autospec=True, side_effect=getattr(owner, name))


def test_postponed_backups_are_looked_at_when_there_is_room() -> None:
    """Not all of them after each backup: with many that would take longer than the backups."""
    with cases(storage=False, pages=256) as made:
        for at in range(60):
            put(made.memory, range(100 * at, 100 * at + 16))
        assert len(made.lanes()) == 16, "a fourth of the device is in flight"
        with counted(TierMoves, "consider") as looked:
            for _ in range(60):
                made.mover.do("backups")
                made.tiers.poll()
        assert made.tiers.is_idle
        assert made.tiers.moves.counts.to_host_pages == 240
        assert looked.call_count <= 2 * 60


def test_what_was_read_for_one_request_outlives_what_is_read_for_the_next() -> None:
    """Until the first has had its turn; a host of eight pages holds one of the two."""
    with cases(ratio=0.5) as made:
        for tokens in (TOKENS, OTHERS):
            put(made.memory, tokens)
            made.rest()
            made.clear_host()
        assert made.storage.prefetches.prefetch("one", key(TOKENS))
        assert made.storage.prefetches.prefetch("two", key(OTHERS))
        made.rest()
        assert (made.on_host(TOKENS), made.on_host(OTHERS)) == (32, 0)
        made.tiers.forget("one")
        made.tiers.forget("two")
        assert made.storage.prefetches.prefetch("two", key(OTHERS))
        made.rest()
        made.tiers.forget("two")
        assert (made.on_host(TOKENS), made.on_host(OTHERS)) == (0, 32)


def test_a_prompt_that_comes_in_many_parts_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all of it again with each part: of a long one that would take seconds."""
    monkeypatch.setattr(prefetch_steps, "_READ_PAGES", 2)
    monkeypatch.setattr(prefetch_steps, "_READ_TOKENS", 8)
    with cases(pages=64) as made, counted(StorageArrivals, "_fill") as filled:
        put(made.memory, range(160))
        made.rest()
        made.clear_host()
        assert made.storage.prefetches.prefetch("one", key(range(160)))
        made.rest()
        assert made.on_host(range(160)) == 160
        assert filled.call_count == 20, "a part is a node"
        locks = [node.host and node.host.locks for node in made.memory.cache.tree.nodes()]
        assert locks == [1] * 20, "until the request has its turn"
        made.tiers.forget("one")


# -- the rules of the host tier -------------------------------------------------------------------------


def test_a_child_has_a_copy_only_below_a_parent_with_one() -> None:
    """The parent's backup finds no room, then fails."""
    with cases(storage=False, ratio=0.25) as made:
        put(made.memory, OTHERS[:16])
        made.rest()
        made.evict()
        match = made.memory.cache.match_prefix(key(OTHERS[:16]))
        assert made.tiers.moves.loads.bring_back("one", match, fits=True)
        put(made.memory, TOKENS[:16])
        put(made.memory, TOKENS[:20])
        assert made.lanes() == ["loads"], "the only copy is being read"
        made.rest()
        made.tiers.forget("one")
        put(made.memory, TOKENS[:20])
        assert made.lanes() == ["backups"], "a host of four pages holds the parent"
        assert made.mover.do("backups", fails=True)
        made.rest()
        made.evict()
        assert made.on_host(TOKENS[:20]) == 16


def test_what_is_given_up_on_the_host_has_no_copy_below_it_and_is_not_read() -> None:
    """Evicted from the device or not: what is on both tiers gives way, too, and then is on the device."""
    with cases(storage=False, ratio=1.0) as made:
        put(made.memory, TOKENS[:16])
        put(made.memory, TOKENS)
        made.rest()
        put(made.memory, OTHERS)
        made.rest()
        assert made.host_free() == 0
        made.evict(8)
        assert made.on_host(TOKENS) == 32
        match = made.memory.cache.match_prefix(key(TOKENS))
        assert made.tiers.moves.loads.bring_back("one", match, fits=True)
        host = made.tiers.host
        taken = host.alloc({"full": 8})
        assert taken is not None, "a copy of what is on the device gives way"
        assert host.alloc({"full": 1}) is None, "what a load reads has given way"
        made.rest()
        made.tiers.forget("one")
        last = host.alloc({"full": 4})
        assert last is not None
        made.evict()
        assert made.on_host(TOKENS) == 16, "the child's copy goes before its parent's"
        for pages in (taken, last):
            host.pool.free(pages)


def test_a_load_is_all_or_nothing_and_long_enough() -> None:
    with cases(storage=False, load_back_threshold=10) as made:
        for tokens in (range(100, 108), TOKENS):
            put(made.memory, tokens)
            made.rest()
        made.evict()
        loads, cache = made.tiers.moves.loads, made.memory.cache
        assert not loads.wants(cache.match_prefix(key(range(100, 108))))
        match = cache.match_prefix(key(TOKENS))
        assert loads.wants(match)
        held = made.memory.allocator.alloc_pages(9)
        assert held is not None
        assert not loads.bring_back("one", match, fits=True), "seven of eight pages"
        assert made.memory.allocator.available_pages() == 7
        made.memory.allocator.free_page_ids(held)
        assert loads.bring_back("one", match, fits=True)
        made.rest()
        assert matched(made.memory, TOKENS) == 32
        made.tiers.forget("one")


def test_selective_backups_come_with_the_second_use() -> None:
    with cases(write_policy="write_through_selective") as made:
        put(made.memory, TOKENS)
        put(made.memory, TOKENS)
        assert made.lanes() == [], "a request inserts its path several times"
        found = made.memory.cache.match_prefix(key(TOKENS)).last_device_node
        assert found is not None
        made.tiers.moves.consider(found.path(), is_found=True)
        assert made.lanes() == ["backups"]
        made.rest()
        assert len(made.store.blobs) == 8


def test_write_back_copies_what_is_evicted_and_nothing_else() -> None:
    with cases(write_policy="write_back") as made:
        put(made.memory, TOKENS)
        put(made.memory, OTHERS)
        made.rest()
        assert made.host_free() == 32
        assert made.evict(8) == 8
        assert (made.on_host(TOKENS), made.on_host(OTHERS)) == (32, 0)
        assert matched(made.memory, OTHERS) == 32
        made.rest()
        assert len(made.store.blobs) == 8


# -- storage --------------------------------------------------------------------------------------------


def back_up(made: Cases) -> None:
    """All backups end; storage stands still."""
    while made.mover.do("backups"):
        made.tiers.poll()


@pytest.mark.parametrize("kinds", [(), ("window",), ("state",), ("window", "state")], ids="+".join)
def test_a_storage_that_stands_still_does_not_freeze_the_host(kinds: tuple[str, ...]) -> None:
    """Of each group three pages in four can give way for what is newer."""
    with cases(ratio=1.0, kinds=kinds) as made:
        driver = Driver(made.memory)
        for start in range(0, 2000, 100):
            driver.run(range(start, start + 9))
            back_up(made)
            assert made.memory.cache.tree.evict("full", 1000) == 2
            assert made.on_host(range(start, start + 9)) == 8, "what is newest has no place on the host"
        assert made.storage.queued()["to_storage"] >= 6, "what waits for its write is counted, too"
        for group, arena in made.tiers.host.pool.arenas.items():
            taken = made.tiers.host.alloc({group: arena.num_pages - arena.num_pages // 4})
            assert taken is not None
            made.tiers.host.pool.free(taken)
        made.rest()
        assert made.storage.queued()["to_storage"] == 0


def test_what_is_above_a_node_that_is_written_cannot_give_way_and_is_counted() -> None:
    with cases(ratio=1.0) as made:  # a quarter of the host is four pages
        put(made.memory, TOKENS[:16])
        made.rest()
        put(made.memory, TOKENS[:20])
        put(made.memory, TOKENS[:24])
        put(made.memory, OTHERS[:4])
        back_up(made)
        assert made.lanes() == ["writes"], "one is written however much that keeps"
        assert made.storage.queued()["to_storage"] == 3
        made.rest()
        assert len(made.store.blobs) == 7


def test_a_node_that_is_divided_while_it_waits_to_be_written_is_written_as_a_whole() -> None:
    with cases() as made:  # a quarter of the host is eight pages
        for tokens in (OTHERS, TOKENS):
            put(made.memory, tokens)
            back_up(made)
        assert made.lanes() == ["writes"]
        assert matched(made.memory, TOKENS[:16]) == 16
        made.rest()
        assert len(made.store.blobs) == 16


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("is_divided", [False, True])
def test_what_comes_to_the_host_while_its_node_is_written_is_written_too(
    is_divided: bool, fails: bool
) -> None:
    """Pages of a window that another request has computed."""

    def insert(first: int, last: int) -> None:
        pages, windows = made.memory.allocator.alloc_pages(8), made.memory.allocators["window"]
        held, offer = windows.alloc_pages(last - first), np.zeros(8, np.int32)
        assert pages is not None
        assert held is not None
        offer[first:last] = held
        inserted = radix_cache(made.memory).insert(key(TOKENS), pages, offers={"window": offer})
        made.memory.allocator.free_page_ids(pages[: inserted.prefix_len // 4])
        back_up(made)

    with cases(kinds=("window",), ratio=4.0) as made:  # a quarter of the host is 16 pages
        insert(6, 8)
        insert(0, 4)
        if is_divided:  # a match can end at the new pages
            made.memory.cache.match_prefix(key(TOKENS[:16]))
        insert(4, 6)
        assert made.lanes() == (["writes", "writes"] if is_divided else ["writes"])
        made.mover.do("writes", fails)
        made.tiers.poll()
        nodes = list(made.memory.cache.tree.nodes())
        assert not any(node.host is not None and node.host.stored for node in nodes)
        made.rest()
        assert all(node.host is not None and node.host.stored for node in nodes)
        assert len(made.store.blobs) == 16


def stored(made: Cases) -> None:
    """TOKENS are in storage, and nowhere else."""
    put(made.memory, TOKENS)
    made.rest()
    made.clear_host()
    assert made.host_free() == made.tiers.host.pool.arenas["full"].num_pages


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_a_small_host_does_not_turn_storage_off(ratio: float) -> None:
    """sglang#26449: a ratio of 1 did."""
    with cases(ratio=ratio) as made:
        for tokens in (TOKENS, OTHERS, range(200, 232)):
            put(made.memory, tokens)
            made.rest()
            made.evict()
        assert len(made.store.blobs) == 24
        assert made.on_host(TOKENS) == 0
        assert made.storage.prefetches.prefetch("one", key(TOKENS))
        made.rest()
        match = made.memory.cache.match_prefix(key(TOKENS))
        assert match.host_hit_length == 32
        assert made.tiers.moves.loads.bring_back("one", match, fits=True)
        made.rest()
        assert matched(made.memory, TOKENS) == 32
        made.tiers.forget("one")


@pytest.mark.parametrize("policy", ["wait_complete", "timeout", "best_effort"])
def test_a_finished_prefetch_is_noticed_at_once(policy: str) -> None:
    """sglang#32724: only when its request's turn came. Here nobody asks for the request in between."""
    with cases(prefetch_policy=policy) as made:
        stored(made)
        assert made.storage.prefetches.prefetch("one", key(TOKENS))
        assert made.storage.prefetches.waits("one") == (policy != "best_effort")
        made.mover.do_all()
        made.tiers.poll()
        made.mover.do_all()
        made.tiers.poll()
        assert not made.storage.prefetches.waits("one")
        assert made.on_host(TOKENS) == 32
        made.tiers.forget("one")


@pytest.mark.parametrize("kinds", [(), ("window",), ("state",), ("window", "state")], ids="+".join)
@pytest.mark.parametrize("steps", range(4))
def test_an_abort_leaves_no_host_page_behind(kinds: tuple[str, ...], steps: int) -> None:
    """sglang#9927, #37103, #13483: at any time after the prefetch began; what is read twice is freed, too."""
    with cases(kinds=kinds) as made:
        driver = Driver(made.memory)
        driver.run(TOKENS)
        driver.check()
        made.rest()
        made.clear_host()
        arenas = made.tiers.host.pool.arenas
        assert made.storage.prefetches.prefetch("one", key(TOKENS[:31]))
        for _ in range(steps):
            made.mover.do("reads")
            made.tiers.poll()
        made.tiers.forget("one")
        made.rest()
        made.tiers.host.clear()
        assert {g: a.num_pages - a.allocator.available_pages() for g, a in arenas.items()} == dict.fromkeys(
            arenas, 0
        )


@pytest.mark.parametrize("kinds", [(), ("window",), ("state",), ("window", "state")], ids="+".join)
def test_a_page_that_storage_has_no_longer_is_a_miss(kinds: tuple[str, ...]) -> None:
    """sglang#30322, #31881, #40193: storage said that it has all pages; one is gone when it is read."""
    with cases(kinds=kinds) as made:
        driver = Driver(made.memory)
        driver.run(TOKENS)
        made.rest()
        made.clear_host()
        count = len(made.store.blobs)
        assert made.storage.prefetches.prefetch("one", key(TOKENS[:31]))
        assert made.mover.do("reads")
        made.tiers.poll()
        full = [name for name in made.store.blobs if len(made.store.blobs[name]) > 500]
        made.store.discard(full[3])
        made.rest()
        assert made.on_host(TOKENS) == matched(made.memory, TOKENS) == 0
        made.tiers.forget("one")
        assert made.host_free() == 32
        assert driver.run(TOKENS) == 0, "it is computed"
        made.rest()
        assert len(made.store.blobs) == count, "and stored again"


def test_storage_that_lost_the_end_of_a_prefix_is_asked_for_less() -> None:
    with cases() as made:
        stored(made)
        made.store.discard(list(made.store.blobs)[5])
        assert made.storage.prefetches.prefetch("one", key(TOKENS))
        made.rest()
        assert made.on_host(TOKENS) == 20
        made.tiers.forget("one")
