"""What was fetched from another worker enters the tree unlocked, as others need to find the tree."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcache.memory import Memory
from kvcache.radix_key import RadixKey
from kvcache.tenancy.config import TenancyConfig
from kvcache.tiers.config import TierConfig
from kvcache.tree_node import TreeNode
from tests.kvcache.support import HandMover, groups, key, memory, radix_cache
from wire.request import PromptMarks

PAGE = 4
PUBLIC = range(2 * PAGE)


@pytest.fixture
def built() -> Iterator[Memory]:
    """A memory with states where tenants share, which has two public pages on its host alone, and no state
    after them."""
    mover = HandMover()
    tiers, tenancy = TierConfig(ratio=2.0, load_back_threshold=1), TenancyConfig(users=2, secret=b"s")
    sizes = PAGE, 32, 8
    with memory(*sizes, groups("state"), mover, tiers=tiers, tenancy=tenancy, max_context_len=64) as made:
        pages, state = made.allocator.alloc_pages(2), made.allocators["state"].alloc_pages(1)
        assert pages is not None
        assert state is not None
        radix_cache(made).insert(key(PUBLIC), pages, offers={"state": state})
        assert mover.do("backups")
        assert made.tiers is not None
        made.tiers.poll()
        made.cache.tree.evict("full", 2)
        host = made.tiers.host
        other = host.alloc({"state": host.pool.arenas["state"].num_pages})
        assert other is not None
        host.pool.free(other)
        yield made


def fetched(built: Memory, wanted: RadixKey) -> int:
    """Pages for `wanted` and a state have come; how many tokens are cached of it now."""
    pages = built.allocator.alloc_pages(len(wanted) // PAGE)
    state = built.allocators["state"].alloc_pages(1)
    assert pages is not None
    assert state is not None
    match = built.cache.insert_copy(wanted, pages, 0, {"state": state}, None)
    for name, ids in (("full", pages), ("state", state)):
        kept = set(built.cache.tree.all_pages(name).tolist())
        built.allocators[name].free_page_ids(ids[[page not in kept for page in ids.tolist()]])
    built.check_memory()
    return len(match.device_indices)


def nodes(built: Memory) -> list[TreeNode]:
    return list(built.cache.tree.nodes())


def test_public_pages_that_end_without_a_state_stay_on_the_host(built: Memory) -> None:
    """A tenant leaves no state there, and no request could go on from them."""
    assert fetched(built, key(PUBLIC, tenant="a")) == 0
    assert [node.is_resident for node in nodes(built)] == [False]


def test_who_has_no_tenant_leaves_the_state(built: Memory) -> None:
    assert fetched(built, key(PUBLIC)) == len(PUBLIC)
    assert [node.is_resident for node in nodes(built)] == [True]


def test_what_goes_on_below_public_pages_brings_them_to_the_device(built: Memory) -> None:
    assert fetched(built, key(range(3 * PAGE), tenant="a")) == 3 * PAGE
    assert [node.is_resident for node in nodes(built)] == [True, True]


def test_pages_that_are_private_for_ever_become_no_public_ones(built: Memory) -> None:
    wanted = key(range(3 * PAGE), tenant="a", marks=PromptMarks(0, 0, 0))
    assert fetched(built, wanted) == 0
    assert [node.is_resident for node in nodes(built)] == [False]
