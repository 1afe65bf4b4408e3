"""What a router finds where tenants share, against the tree of the worker whose events it heard."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvcache.tenancy.config import TenancyConfig
from router.index.global_index import GlobalIndex, as_hashes
from router.index.mixed import find_mixed
from router.index.page_table import make_page_table
from tests.kvcache.support import NAMESPACE, matched, memory, put
from wire.events import encode_batch
from wire.page_hash import event_hashes, owned_digests, page_digests

PAGE = 4


@pytest.mark.parametrize("seed", range(20))
def test_the_index_finds_what_the_tree_finds(seed: int) -> None:
    """Two workers; every tenant asks for beginnings of common texts, which go on in several ways."""
    draw = random.Random(seed)
    workers = {name: memory(PAGE, 512, tenancy=TenancyConfig(2, secret=b"s")) for name in ("one", "two")}
    index = GlobalIndex(make_page_table())
    slots = {name: index.join(name) for name in workers}

    def text() -> list[int]:
        pages = draw.randrange(1, 7)
        ways = [draw.randrange(2) for _ in range(pages)]
        return [token for i in range(pages) for token in (100 * i + way for way in ways[: i + 1][-1:] * PAGE)]

    for _ in range(60):
        built = workers[draw.choice(list(workers))]
        put(built, text(), tenant=draw.choice(("a", "b", "c", "")))
        if draw.random() < 0.2:
            assert built.promotion is not None
            built.promotion.end_epoch()
        if draw.random() < 0.2:
            built.cache.tree.evict("full", draw.randrange(1, 6))
    for name, built in workers.items():
        for events, is_private in zip(built.take_events(), (False, True), strict=True):
            index.apply(name, encode_batch(1.0, events), is_private)
    assert any(not node.tenant for built in workers.values() for node in built.cache.tree.nodes())
    for tenant in ("a", "b", "c", "d"):
        for _ in range(30):
            tokens = text()
            digests = page_digests(NAMESPACE.seed, np.array(tokens, np.int32).tobytes(), PAGE)
            public, own = (as_hashes(event_hashes(owned_digests(digests, who))) for who in ("", tenant))
            found = find_mixed(index, public, own)
            for name, built in workers.items():
                assert found.pages[slots[name]] * PAGE == matched(built, tokens, tenant=tenant)
