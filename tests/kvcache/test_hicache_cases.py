"""Where hierarchical caches have gone wrong elsewhere, each as a case of ours; the rules of the host tier.

A case names SGLang's issue where it has one (docs/tiers.md says what holds).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from common.secrets import ClusterSecret
from kvcache.memory import Memory
from kvcache.storage.config import StorageConfig
from kvcache.tiers.config import TierConfig
from kvcache.tiers.storage_tier import StorageTier
from kvcache.tiers.tiers import Tiers
from tests.kvcache.storage.support import MemoryStore
from tests.kvcache.support import HandMover, groups, key, matched, memory, put

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
def cases(storage: bool = True, kinds: tuple[str, ...] = (), **options: Any) -> Iterator[Cases]:
    """At the end every page is accounted for, and nothing is left on its way."""
    mover = HandMover()
    usual = {"ratio": 2.0, "load_back_threshold": 1, "prefetch_threshold": 1, "model_digest": bytes(32)}
    tiers = TierConfig(**{**usual, "storage": STORAGE if storage else None, **options})  # type: ignore[arg-type]
    specs = groups(*kinds)
    with memory(4, 16, specs=specs, mover=mover, tiers=tiers, max_context_len=64) as built:
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
