"""Fetches where tenants share: what was here when a fetch began may belong to others when its pages land."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache.memory import Memory
from kvcache.tenancy.config import TenancyConfig
from kvcache.tiers.config import TierConfig
from scheduler.fetches import Fetches, FetchHold
from scheduler.pages import Capacity, Pages
from scheduler.rates import Rates
from scheduler.req import Req
from tests.kvcache.support import HandMover, key, matched, memory, put
from wire.request import GenerateRequest, SamplingParams

PAGE = 4
TEXT = [7] * (6 * PAGE)
COMMON = TEXT[: 3 * PAGE]


def request(tokens: list[int], tenant: str) -> Req:
    sent = GenerateRequest(
        request_id="1",
        room=1,
        epoch=1,
        prompt=np.asarray(tokens, "<i4").tobytes(),
        sampling=SamplingParams(max_new_tokens=1),
        tenant=tenant,
    )
    return Req(sent, key(()).namespace, np.asarray(tokens, np.int32))


def begin(built: Memory, tokens: list[int], tenant: str) -> tuple[Fetches, FetchHold]:
    """A fetch of all that is missing here."""
    fetches = Fetches(Pages(built, Rates(lambda: 0.0)))
    hold = fetches.reserve(request(tokens, tenant), len(tokens), Capacity(0, 0))
    assert hold is not None
    return fetches, hold


def check(built: Memory, fetches: Fetches) -> None:
    built.check_memory({"full": [page for pages in fetches.pages() for page in pages["full"].tolist()]})


def test_pages_that_follow_what_was_demoted_meanwhile_are_given_back() -> None:
    built = memory(PAGE, 64, tenancy=TenancyConfig(users=2, burst=1, secret=b"s"))
    assert built.promotion is not None
    for tenant in ("a", "b", "c"):
        put(built, COMMON, tenant=tenant)
    built.promotion.end_epoch()
    fetches, hold = begin(built, TEXT, "x")
    assert (hold.have, hold.first_page) == (len(COMMON), 3)
    for _ in range(2):
        found = built.cache.match_prefix(key(COMMON, tenant="y"))
        built.promotion.admitted("y", found.last_device_node, 1)
    built.promotion.end_epoch()
    assert matched(built, TEXT, tenant="x") == 0
    assert fetches.commit(hold, 6) == 0
    check(built, fetches)
    built.promotion.tick(0.0)
    assert built.allocator.available_pages() == 64, "what was demoted goes with its last lock"


def test_pages_follow_what_was_here_though_others_have_more_by_now() -> None:
    """On the host alone: read from storage for somebody else, or evicted."""
    mover = HandMover()
    tiers, tenancy = TierConfig(ratio=2.0, load_back_threshold=1), TenancyConfig(users=2, secret=b"s")
    with memory(PAGE, 64, mover=mover, tiers=tiers, tenancy=tenancy, max_context_len=64) as built:
        assert built.tiers is not None
        put(built, COMMON, tenant="x")
        fetches, hold = begin(built, TEXT, "x")
        put(built, TEXT[: 5 * PAGE])
        while mover.waiting:
            mover.do_all()
            built.tiers.poll()
        assert built.cache.tree.evict("full", 5) == 5
        assert matched(built, TEXT, tenant="x") == 0
        assert fetches.commit(hold, 6) == 0
        check(built, fetches)


@pytest.mark.parametrize("pages", [2, 3, 4])
def test_fewer_pages_than_were_wanted(pages: int) -> None:
    built = memory(PAGE, 64, tenancy=TenancyConfig(users=2, secret=b"s"))
    put(built, COMMON, tenant="x")
    fetches, hold = begin(built, TEXT, "x")
    assert fetches.commit(hold, pages) == max(pages - 3, 0) * PAGE
    check(built, fetches)
    assert matched(built, TEXT, tenant="x") == max(pages, 3) * PAGE
