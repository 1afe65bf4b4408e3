"""Two workers whose tenants share pages, over one directory: what each finds there of the other's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from common.secrets import ClusterSecret
from kvcache.memory import Memory
from kvcache.radix_key import Namespace
from kvcache.storage.config import StorageConfig
from kvcache.storage.keys import visibility
from kvcache.tenancy.config import TenancyConfig
from kvcache.tiers import backlog
from kvcache.tiers.config import TierConfig
from kvcache.tiers.tiers import Tiers
from kvcache.tree_node import TreeNode
from tests.kvcache.support import HandMover, groups, key, memory, put, radix_cache

PAGE = 4
COMMON = list(range(3 * PAGE))
SECRET = ClusterSecret((b"of the tests of shared storage.",))


def with_end(*ends: int) -> list[int]:
    """The common text, and then a page for each of `ends`."""
    return [*COMMON, *(end for one in ends for end in [100 + one] * PAGE)]


class SharingWorker:
    """A memory with a small pool, over a directory."""

    def __init__(self, directory: Path, kinds: Sequence[str] = ()) -> None:
        self.mover = HandMover()
        storage = StorageConfig(backend="file", path=directory, secret=SECRET)
        tiers = TierConfig(
            ratio=2.0, load_back_threshold=1, storage=storage, model_digest=bytes(32), prefetch_threshold=1
        )
        self.memory: Memory = memory(
            PAGE, 32, specs=groups(*kinds), mover=self.mover, tiers=tiers, max_context_len=64,
            tenancy=TenancyConfig(users=2, secret=b"s"),
        )  # fmt: skip
        assert self.memory.tiers is not None
        self.tiers: Tiers = self.memory.tiers

    def rest(self) -> None:
        """Let everything that moves come to its end."""
        self.tiers.poll()
        while self.mover.waiting or self.mover.finished:
            self.mover.do_all()
            self.tiers.poll()

    def compute(self, tokens: Sequence[int], tenant: str) -> None:
        """A tenant has computed this, and it is stored."""
        put(self.memory, tokens, tenant=tenant)
        self.rest()

    def publish(self) -> None:
        """End the epoch, and store what has become public."""
        assert self.memory.promotion is not None
        self.memory.promotion.end_epoch()
        self.rest()

    def burst(self, tokens: Sequence[int]) -> None:
        """A tenant has guessed all of `tokens` too often; the epoch ends."""
        promotion = self.memory.promotion
        assert promotion is not None
        for _ in range(TenancyConfig.burst + 1):
            match = radix_cache(self.memory).match_prefix(key([*tokens, *[999] * PAGE], tenant="guesser"))
            assert match.last_device_node is not None
            promotion.admitted("guesser", match.last_device_node, PAGE)
        self.publish()

    def forget(self) -> None:
        """Nothing is on device or host."""
        self.memory.cache.tree.evict("full", 1000)
        self.tiers.host.clear()
        assert not list(self.memory.cache.tree.nodes())

    def read(self, tokens: Sequence[int], tenant: str) -> int:
        """Read what storage has for a tenant. How many tokens are cached then, on device and host."""
        assert self.tiers.storage is not None
        self.tiers.storage.prefetches.prefetch("one", key(tokens, tenant=tenant))
        self.rest()
        self.tiers.forget("one")
        match = radix_cache(self.memory).match_prefix(key(tokens, tenant=tenant))
        return len(match.device_indices) + match.host_hit_length

    def owners(self) -> list[tuple[str, int]]:
        """The tenants of the nodes in the tree, with their pages."""
        return sorted((node.tenant, node.num_pages) for node in self.memory.cache.tree.nodes())


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[tuple[SharingWorker, SharingWorker]]:
    with ExitStack() as stack:
        made = SharingWorker(tmp_path), SharingWorker(tmp_path)
        for one in made:
            stack.enter_context(one.memory)
        yield made
        for one in made:
            one.rest()
            assert one.tiers.is_idle
            one.memory.check_memory()


def stored(directory: Path, tenant: str) -> int:
    """Files under a tenant's names, or under public ones."""
    return len(list(directory.glob(f"??/{visibility(tenant).decode()}*")))


Workers = tuple[SharingWorker, SharingWorker]


def make_public(worker: SharingWorker) -> None:
    """Three tenants have computed the common text, and each a page of its own."""
    for number, tenant in enumerate(("a", "b", "c")):
        worker.compute(with_end(number), tenant)
    worker.publish()


def test_a_public_page_that_lies_in_storage_alone_is_found_by_everybody(workers: Workers) -> None:
    first, second = workers
    make_public(first)
    first.forget()
    assert first.read(with_end(9), "d") == len(COMMON)
    assert first.owners() == [("", 3)]
    assert second.read(with_end(9), "d") == len(COMMON), "on a worker that has never computed it"


def test_a_tenants_own_pages_are_read_below_public_ones(workers: Workers) -> None:
    first, second = workers
    make_public(first)
    assert second.read(with_end(0), "a") == len(COMMON) + PAGE
    assert second.owners() == [("", 3), ("a", 1)]
    assert second.read(with_end(0), "b") == len(COMMON), "the page of another tenant"


def test_what_is_private_here_and_public_there_is_found_under_both_names(
    workers: Workers, tmp_path: Path
) -> None:
    first, second = workers
    second.compute(with_end(0, 1, 2), "a")  # private: one tenant is not enough
    make_public(first)
    assert (stored(tmp_path, ""), stored(tmp_path, "a")) == (3, 6)
    second.forget()
    assert second.read(with_end(0, 1, 2, 3), "a") == len(COMMON) + 3 * PAGE
    assert second.owners() == [("", 3), ("a", 3)], "of two equal ways the public one"
    assert second.read(with_end(7), "d") == len(COMMON)


def test_what_is_read_under_a_tenants_names_stays_its_own(workers: Workers, tmp_path: Path) -> None:
    first, second = workers
    first.compute(with_end(0), "a")
    assert second.read(with_end(0), "a") == len(COMMON) + PAGE
    assert second.owners() == [("a", 4)]
    assert stored(tmp_path, "") == 0
    for tenant in ("b", ""):
        assert second.read(with_end(0), tenant) == 0


def test_the_longer_way_is_read_though_the_tree_has_a_private_one(workers: Workers) -> None:
    first, second = workers
    make_public(first)
    second.compute(COMMON[: 2 * PAGE], "d")
    assert second.read(with_end(9), "d") == len(COMMON)
    assert second.owners() == [("", 3), ("d", 2)]
    second.memory.cache.tree.evict("full", 1000)
    second.publish()
    assert second.owners() == [("", 1), ("", 2)], "the private copy gives way to what was read"


def test_a_longer_private_way_is_continued(workers: Workers) -> None:
    first, second = workers
    make_public(first)
    second.compute(with_end(5, 6, 7), "d")
    second.memory.cache.tree.evict("full", 1000)
    second.tiers.host.clear()
    second.compute(with_end(5), "d")
    assert second.read(with_end(5, 6, 7, 8), "d") == len(COMMON) + 3 * PAGE
    assert second.owners() == [("d", 2), ("d", 4)], "what was read is below what the tree had"


def test_what_became_public_while_it_was_read_privately_is_dropped(workers: Workers) -> None:
    first, second = workers
    first.compute(with_end(0), "a")
    assert second.tiers.storage is not None
    second.tiers.storage.prefetches.prefetch("one", key(with_end(0), tenant="a"))
    assert second.mover.do("reads")  # what is there: private pages alone
    second.tiers.poll()
    put(second.memory, COMMON)  # of everybody, meanwhile
    second.rest()
    assert second.tiers.host.pool.arenas["full"].allocator.available_pages() == 64 - 3 - 1
    second.tiers.forget("one")
    assert second.owners() == [("", 3), ("a", 1)]


def test_what_stops_being_public_is_removed_from_storage(workers: Workers, tmp_path: Path) -> None:
    first, second = workers
    make_public(first)
    assert (stored(tmp_path, ""), stored(tmp_path, "a")) == (3, 4)
    first.burst(COMMON)
    assert first.memory.promotion is not None
    assert first.memory.promotion.demotion.demoted_pages == 3
    assert (stored(tmp_path, ""), stored(tmp_path, "a")) == (0, 4), "a tenant's own blobs stay"
    for worker in workers:
        assert worker.read(with_end(9), "d") == 0
    assert second.read(with_end(0), "a") == len(COMMON) + PAGE
    assert first.read(with_end(0), "a") == len(COMMON) + PAGE, "its own, though the place is barred"


def test_what_storage_could_not_remove_is_tried_again(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = workers
    storage = first.tiers.storage
    assert storage is not None
    now, remove = 0.0, storage.backend.remove
    monkeypatch.setattr(storage, "_clock", lambda: now)
    make_public(first)
    calls: list[int] = []

    def broken(keys: Sequence[bytes]) -> list[bool]:
        calls.append(len(keys))
        return [*remove(keys[:1]), *[False] * (len(keys) - 1)]

    monkeypatch.setattr(storage.backend, "remove", broken)
    first.burst(COMMON)
    assert (stored(tmp_path, ""), calls) == (2, [3])
    first.rest()
    assert calls == [3], "not in every turn of the loop"
    monkeypatch.setattr(storage.backend, "remove", remove)
    now += 60.0
    first.rest()
    assert stored(tmp_path, "") == 0


def test_pages_that_wait_for_another_removal_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "_MOST_AGAIN", 3)
    waiting = backlog.StorageBacklog()
    pages = [bytes([number]) * 32 for number in range(6)]
    waiting.withdraw(pages[4:])
    waiting.withdraw_again(pages[:4])
    assert waiting.take_withdrawn() == pages[3:]
    assert waiting.take_withdrawn() == []


def test_what_was_put_off_comes_back_parents_first() -> None:
    upper = TreeNode(None, Namespace("m"), b"", b"", 1, 0)
    lower = TreeNode(upper, Namespace("m"), b"", b"", 1, 0)
    waiting = backlog.StorageBacklog()
    waiting.put_off(lower, 0.0, 0.0)
    waiting.divided(upper, lower)  # the tree divides the node that was put off
    waiting.resume(29.0)
    assert waiting.first() is None
    waiting.resume(31.0)
    assert waiting.first() is upper
    waiting.drop(upper)
    assert (waiting.first(), len(waiting)) == (lower, 1)


@pytest.mark.parametrize("kinds", [("window",), ("state",), ("window", "state")])
def test_other_groups_come_under_the_same_names(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    made = SharingWorker(tmp_path, kinds)
    with made.memory:
        wanted = key(with_end(0))
        held = {
            group: made.memory.allocators[group].alloc_pages(4 if group != "state" else 1) for group in kinds
        }
        pages = made.memory.allocator.alloc_pages(4)
        assert pages is not None
        assert all(part is not None for part in held.values())
        offers = {group: part for group, part in held.items() if part is not None}
        radix_cache(made.memory).insert(wanted, pages, offers=offers)
        made.rest()
        made.forget()
        assert made.read([*with_end(0), 1], "a") == len(COMMON) + PAGE
        assert made.owners() == [("", 4)]
