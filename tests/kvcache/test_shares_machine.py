"""Shares of memory against a model of who may be evicted: tenants x shares x requests x locks x evictions.

At every eviction the model looks at the whole tree: which leaves are free, what each tenant has, and what it
would have without its first leaf. The evictor has to take a leaf that the rules allow.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvcache.eviction import POLICIES, copies_first
from kvcache.observer import StorageMedium
from kvcache.shares.config import SharesConfig, TenantShare
from kvcache.tenancy.config import TenancyConfig
from kvcache.tree_node import TreeNode
from tests.kvcache.driver import Driver
from tests.kvcache.support import Request, groups, memory, put

PAGES, PAGE = 24, 2
TENANTS = ("", "a", "b", "c", "d")
SHARES = st.tuples(st.sampled_from([0.0, 0.2, 0.4]), st.sampled_from([0.4, 0.6, 1.0])).map(
    lambda pair: TenantShare(*pair)
)
NAMED = st.fixed_dictionaries({}, optional={"a": SHARES, "b": SHARES}) | st.just({"": TenantShare(0.2, 0.4)})


class SharesMachine(RuleBasedStateMachine):
    """An observer of the tree, too: it looks before a node goes."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)), named=NAMED, others=SHARES,
        users=st.sampled_from([0, 2]), kinds=st.sampled_from([(), (), ("window", "state")]),
        chance=st.randoms(),
    )  # fmt: skip
    def build(
        self, policy: str, named: dict[str, TenantShare], others: TenantShare, users: int, kinds: Any,
        chance: random.Random,
    ) -> None:  # fmt: skip
        self.shares, self.key = SharesConfig(named, others), copies_first(POLICIES[policy])
        self.exact = not kinds  # with other groups a leaf can go with the one below it
        self.memory = memory(
            PAGE, PAGES, rows=4, specs=groups(*kinds, window=4), eviction_policy=policy, shares=self.shares,
            tenancy=TenancyConfig(users, secret=b"s"), state_slots=24, window_tokens=PAGES * PAGE,
            mamba_track_interval=PAGE,
        )  # fmt: skip
        self.driver, self.tree = Driver(self.memory), self.memory.cache.tree
        self.tree.observers = (*self.tree.observers, self)
        self.allowed: str | None = None
        self.live: list[Request] = []
        evict = self.tree.evict

        def watched(group: str, pages: int, of: str | None = None) -> int:
            self.allowed = "any" if of is None else f"of {of}"
            freed = evict(group, pages, of)
            self.allowed = None
            return freed

        setattr(self.tree, "evict", watched)  # noqa: B010  a method is replaced
        for _ in range(12):  # the tree is not empty
            length = chance.randint(2, 9)
            tokens = [chance.randint(0, 9) * 10, *(chance.randint(0, 1) for _ in range(length))]
            self.driver.run(tokens, tenant=chance.choice(TENANTS))

    # -- the model ---------------------------------------------------------------------------------

    def held(self) -> Counter[str]:
        held: Counter[str] = Counter()
        for node in self.tree.nodes():
            held[node.tenant] += len(node.value)
        return held

    def rank(self, node: TreeNode, held: int) -> int:
        share = self.shares.named.get(node.tenant, self.shares.others if node.tenant else TenantShare())
        least, most = int(share.min_share * PAGES), int(share.max_share * PAGES)
        if held > most:
            return 0
        if held - node.num_pages >= least:
            return 1
        return 2 if held > least else 3

    def stored(self, node: TreeNode, medium: StorageMedium) -> None:
        """See TreeObserver."""

    def removed(self, node: TreeNode, medium: StorageMedium) -> None:
        """See TreeObserver."""
        if self.allowed is None or not self.exact:
            return
        free = [n for n in self.tree.nodes() if not n.children and not n.lock_ref]
        firsts: dict[str, TreeNode] = {}
        for leaf in sorted(free, key=lambda n: (self.key(n), n.created)):
            firsts.setdefault(leaf.tenant, leaf)
        assert firsts[node.tenant] is node, "not the tenant's first in policy order"
        held = self.held()
        if self.allowed != "any":
            assert self.allowed == f"of {node.tenant}", "trimmed another tenant"
            assert self.rank(node, held[node.tenant]) == 0, "trimmed without need"
            return
        lowest = min(self.rank(leaf, held[tenant]) for tenant, leaf in firsts.items())
        assert self.rank(node, held[node.tenant]) == lowest, "something else was to go first"

    # -- rules -------------------------------------------------------------------------------------

    @rule(
        first=st.integers(0, 9),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        tenant=st.sampled_from(TENANTS),
        stays=st.booleans(),
    )
    def request(self, first: int, tokens: list[int], tenant: str, stays: bool) -> None:
        if self.memory.primary.available_pages() < 6 or len(self.live) >= 3:
            return
        req = self.driver.admit([first * 10, *tokens], tenant=tenant)
        for _ in self.driver.prefill(req, 4):
            pass
        if stays:
            self.live.append(req)
        else:
            self.driver.finish(req)

    @rule(first=st.integers(0, 9), pages=st.integers(1, 3), tenant=st.sampled_from(TENANTS))
    def fetch(self, first: int, pages: int, tenant: str) -> None:
        """Pages come from elsewhere: nothing is trimmed for them."""
        if self.exact and self.memory.allocator.available_pages() >= pages:
            put(self.memory, [first * 10, *[1] * (pages * PAGE - 1)], tenant=tenant, is_copy=True)

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 9), is_insert=st.booleans())
    def finish(self, index: int, is_insert: bool) -> None:
        self.driver.finish(self.live.pop(index % len(self.live)), is_insert)

    @rule(pages=st.integers(1, 5))
    def evict(self, pages: int) -> None:
        evictable = self.tree.evictable("full")
        assert self.tree.evict("full", pages) >= min(pages, evictable), "less than was counted can be evicted"

    @precondition(lambda self: self.memory.promotion is not None)
    @rule()
    def end_epoch(self) -> None:
        assert self.memory.promotion is not None
        self.memory.promotion.end_epoch()

    @invariant()
    def everything_balances(self) -> None:
        self.driver.check()
        counted = self.tree.components[0].tenants
        if counted is not None:
            assert counted.held == +self.held()


def test_shares_against_the_model() -> None:
    run_state_machine_as_test(SharesMachine, settings=settings(max_examples=60, stateful_step_count=30))


@pytest.mark.invariants
def test_shares_against_the_model_for_long() -> None:
    run_state_machine_as_test(SharesMachine, settings=settings(max_examples=400, stateful_step_count=60))
