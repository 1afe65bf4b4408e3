"""Hits and distinct tenants per node and epoch."""

from __future__ import annotations

import sys

import pytest

from kvcache.memory import Memory
from kvcache.report import node_reports, pretty_print
from kvcache.tenancy.config import TenancyConfig
from kvcache.tenancy.promotion import Promotion
from kvcache.tenancy.report import sharing_report
from kvcache.tenancy.usage import NodeUsage, Usage
from kvcache.tree_node import SharedTreeNode, TreeNode
from tests.kvcache.support import NAMESPACE, key, memory, put, radix_cache

PAGE = 4
COMMON = [7] * (3 * PAGE)
MOST_BYTES = 64  # a node, with its places for them


@pytest.fixture
def shared() -> Memory:
    """A memory in which two or three tenants make pages public."""
    return memory(PAGE, 64, tenancy=TenancyConfig(users=2, secret=b"s"))


def promotion(built: Memory) -> Promotion:
    assert built.promotion is not None
    return built.promotion


def ask(built: Memory, tokens: list[int], tenant: str) -> None:
    """A request is admitted."""
    found = built.cache.match_prefix(key(tokens, tenant=tenant))
    promotion(built).admitted(tenant, found.last_device_node, 0)


def usage(built: Memory, tokens: list[int], tenant: str = "") -> Usage:
    """Of the node in which a match ends."""
    last = radix_cache(built).match_prefix(key(tokens, tenant=tenant)).last_device_node
    assert last is not None
    assert last.parent is not None, "nothing is found"
    return promotion(built).usage.of(last)


def node() -> TreeNode:
    return SharedTreeNode(None, NAMESPACE, b"", b"", 0, 0)


def test_a_private_node_is_used_by_its_owner(shared: Memory) -> None:
    put(shared, COMMON, tenant="a")
    assert usage(shared, COMMON, "a") == (0, 1, 0, 0), "computed, and not found yet"
    ask(shared, COMMON, "a")
    ask(shared, COMMON, "a")
    ask(shared, COMMON, "b")
    assert usage(shared, COMMON, "a") == (2, 1, 0, 0)


def test_a_node_rolls_when_it_is_used_or_read(shared: Memory) -> None:
    put(shared, COMMON)
    for tenant in ("a", "b", "a"):
        ask(shared, COMMON, tenant)
    assert usage(shared, COMMON) == (3, 3, 0, 0), "two tenants, and who computed it"
    promotion(shared).end_epoch()
    assert usage(shared, COMMON) == (0, 0, 3, 3)
    ask(shared, COMMON, "a")
    assert usage(shared, COMMON) == (1, 1, 3, 3)
    promotion(shared).end_epoch()
    assert usage(shared, COMMON) == (0, 0, 1, 1)
    promotion(shared).end_epoch()
    assert usage(shared, COMMON) == (0, 0, 0, 0)


def test_two_epochs_without_use_are_zeros(shared: Memory) -> None:
    put(shared, COMMON)
    ask(shared, COMMON, "a")
    for _ in range(2):
        promotion(shared).end_epoch()
    assert usage(shared, COMMON) == (0, 0, 0, 0)


def test_tenants_are_exact_up_to_2k() -> None:
    counted, one = NodeUsage(4), node()
    seen = []
    for tenant in ("a", "b", "a", "c", "d", "e", "f"):
        counted.used([one], tenant, hits=1)
        seen.append(counted.of(one))
    assert seen == [(i + 1, users, 0, 0) for i, users in enumerate((1, 2, 2, 3, 4, 4, 4))]


def test_a_split_copies_and_a_merge_adds(shared: Memory) -> None:
    for tenant in ("a", "b", "c"):
        put(shared, [*COMMON, *[ord(tenant)] * PAGE], tenant=tenant)
        ask(shared, COMMON, tenant)
    ask(shared, COMMON, "a")
    assert usage(shared, COMMON, "a") == usage(shared, COMMON[:PAGE], "a") == (2, 1, 0, 0)
    promotion(shared).end_epoch()
    assert usage(shared, COMMON) == (0, 0, 4, 3)


def test_a_merge_unites_the_tenants() -> None:
    counted, one, other = NodeUsage(4), node(), node()
    for tenant in ("a", "b"):
        counted.used([one], tenant, hits=1)
    for tenant in ("b", "c"):
        counted.used([other], tenant, hits=1)
    counted.merge(one, other)
    assert counted.of(other) == (4, 3, 0, 0)
    counted.used([one], "d")
    counted.used([one], "e")
    counted.merge(one, other)
    assert counted.of(other) == (6, 4, 0, 0), "no more than 2K"


def test_counters_are_small_however_much_they_count() -> None:
    counted, one = NodeUsage(2000), node()
    counted.epoch = (1 << 32) - 2
    for tenant in range(2500):
        counted.used([one], f"tenant {tenant}", hits=1 << 27)
    counted.next_epoch()
    counted.used([one], "another", hits=1 << 29)
    assert counted.of(one) == ((1 << 22) - 1, 1, (1 << 22) - 1, 2000)
    more = sys.getsizeof(one) - sys.getsizeof(TreeNode(None, NAMESPACE, b"", b"", 0, 0))
    assert more + sys.getsizeof(one.usage) <= MOST_BYTES


def test_reports_have_owner_visibility_and_counters(shared: Memory) -> None:
    put(shared, COMMON)
    put(shared, [*COMMON, *[1] * PAGE], tenant="a")
    for tenant in ("a", "b"):
        ask(shared, COMMON, tenant)
    public, private = node_reports(shared.cache.tree, shared.promotion)
    names = ("tenant", "visibility", *Usage._fields)
    assert [public[name] for name in names] == ["", "public", 2, 3, 0, 0]
    assert [private[name] for name in names] == ["a", "private", 0, 1, 0, 0]
    lines = pretty_print(shared.cache.tree, shared.promotion).splitlines()
    assert lines[1:3] == [
        "public: nodes=1 tokens=12 hit_cur=2 u_cnt_l=3 hit_pre=0 u_pre=0",
        "private: nodes=1 tokens=4 hit_cur=0 u_cnt_l=1 hit_pre=0 u_pre=0",
    ]
    assert lines[3].endswith("hit_cur=2 u_cnt_l=3 hit_pre=0 u_pre=0")
    assert "private of a hit_cur=0" in lines[4]
    assert sharing_report(shared.cache.tree, shared.promotion).visibilities["public"]["tokens"] == 12


def test_without_sharing_nothing_is_counted() -> None:
    built = memory(PAGE, 64)
    put(built, COMMON, tenant="a")
    (only,) = built.cache.tree.nodes()
    assert only.usage == 0
    (report,) = node_reports(built.cache.tree)
    assert report["visibility"] == "private"
    assert "hit_cur" not in report
    assert sharing_report(built.cache.tree, None).visibilities == {}
