"""What a router knows of tenants' pages: events of a real tree in the index, found by the prompts' names."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvcache.memory import Memory
from router.index.global_index import GlobalIndex, as_hashes
from router.index.page_table import PageTable, PythonPageTable, make_page_table
from tests.kvcache.support import NAMESPACE, memory, put
from wire.events import BlockStored, encode_batch
from wire.page_hash import event_hashes, owned_digests, page_digests

PAGE = 4
TOKENS = [1] * PAGE + [2] * PAGE + [3] * PAGE
tables = pytest.mark.parametrize("table", [make_page_table, PythonPageTable])


class Seen:
    """One worker's tree, and the index of a router that hears its events."""

    def __init__(self, table: PageTable) -> None:
        self.memory = memory(page_size=PAGE)
        self.index = GlobalIndex(table)
        self.index.join("w")

    def tell(self) -> None:
        for events, is_private in zip(self.memory.take_events(), (False, True), strict=True):
            assert self.index.apply("w", encode_batch(1.0, events), is_private) == []

    def names(self, tenant: str) -> list[int]:
        """What a tenant's pages of TOKENS are called."""
        digests = page_digests(NAMESPACE.seed, np.array(TOKENS, np.int32).tobytes(), PAGE)
        return event_hashes(owned_digests(digests, tenant))

    def found(self, tenant: str) -> int:
        """How many leading pages of TOKENS the router finds for a tenant."""
        return int(self.index.find(as_hashes(self.names(tenant))).pages[0])


def fill(built: Memory) -> None:
    put(built, TOKENS, tenant="a")
    put(built, TOKENS[: 2 * PAGE], tenant="b")
    put(built, TOKENS[:PAGE])


@tables
def test_a_tenant_is_told_of_its_own_pages_only(table: Callable[[], PageTable]) -> None:
    seen = Seen(table())
    fill(seen.memory)
    seen.tell()
    assert [seen.found(tenant) for tenant in ("a", "b", "", "c")] == [3, 2, 1, 0]
    assert len(seen.index) == 6


@tables
def test_the_removal_of_one_tenants_copy_leaves_the_others(table: Callable[[], PageTable]) -> None:
    seen = Seen(table())
    fill(seen.memory)
    seen.memory.cache.tree.evict("full", 3)  # the oldest: all of a's
    seen.tell()
    assert [seen.found(tenant) for tenant in ("a", "b", "")] == [0, 2, 1]


@tables
def test_a_snapshot_knows_the_tenants(table: Callable[[], PageTable]) -> None:
    seen = Seen(table())
    fill(seen.memory)
    put(seen.memory, TOKENS[:PAGE] + [9] * PAGE, tenant="a")  # a node below another: its parent is a's
    seen.tell()
    held = seen.index.held("w")
    public, private = (next(one.batches(at_most=1)) for one in seen.memory.snapshot())
    parents = {event.parent_block_hash for event in private if isinstance(event, BlockStored)}
    assert parents == {None, seen.names("a")[0]}
    for events, is_private, left in ((public, False, [3, 2, 1]), (private, True, [3, 2, 1])):
        assert seen.index.apply("w", encode_batch(1.0, events), is_private) == []
        assert [seen.found(tenant) for tenant in ("a", "b", "")] == left, "a stream clears its own pages"
    assert seen.index.held("w") == held
    seen.index.clear("w")
    assert [seen.found(tenant) for tenant in ("a", "b", "")] == [3, 2, 0]
    seen.index.clear("w", is_private=True)
    assert seen.index.held("w") == set()
