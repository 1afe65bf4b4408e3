"""The tree against a model: requests with shared prefixes come, chunk, decode and end; pages are evicted.

After every rule all pools balance, a consumer of the events knows exactly the tree's pages, sizes equal
recomputed sums, and every page a request sees was written for exactly its tenant and tokens.
"""

from __future__ import annotations

import numpy as np
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

from kvcache.common import alloc_for_decode, alloc_for_extend, release_kv_cache
from kvcache.eviction import POLICIES
from kvcache.radix_key import Namespace, RadixKey
from kvcache.tenancy.config import TenancyConfig
from tests.kvcache.support import Index, Request, memory, radix_cache, reference_hashes, request
from tests.kvcache.tenancy.demotion_model import DemotionModel
from tests.kvcache.tenancy.usage_model import UsageModel
from wire.page_hash import event_hashes

NAMESPACES = (Namespace("m"), Namespace("m", extra_key="lora"), Namespace("m", cache_salt="salt"))
TENANTS = ("", "a", "b", "c", "d")
Whose = tuple[str, Namespace]


class TreeMachine(RuleBasedStateMachine):
    """`content[slot]` plays the KV: tenant, namespace and the tokens up to and with the one stored there."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        policy=st.sampled_from(sorted(POLICIES)),
        need_sort=st.booleans(),
        users=st.sampled_from([0, 2]),
        burst=st.sampled_from([0, 1, 1, 2]),
    )
    def build(self, page_size: int, policy: str, need_sort: bool, users: int, burst: int) -> None:
        tenancy = TenancyConfig(users, burst=burst, secret=b"s")
        self.memory = memory(
            page_size, 48 // page_size, rows=5, eviction_policy=policy, need_sort=need_sort, tenancy=tenancy
        )
        self.users = users
        self.owners: dict[tuple[Namespace, tuple[int, ...]], set[str]] = {}
        self.cache, self.tree = radix_cache(self.memory), self.memory.cache.tree
        self.index = Index()
        self.content: dict[int, tuple[Whose, tuple[int, ...]]] = {}
        self.live: list[Request] = []
        self.usage, self.demotion = UsageModel(self.memory), DemotionModel(self.memory)

    def row(self, req: Request) -> list[int]:
        return self.memory.req_to_token_pool.req_to_token[req.req_pool_idx, : req.kv_allocated_len].tolist()

    def compute(self, req: Request, end: int) -> None:
        """The forward: tokens up to `end`, or all there are, get their KV, and all of it is committed."""
        end = min(end, len(req.fill_ids))
        for position in range(req.kv_committed_len, end):
            tokens = tuple(req.fill_ids[: position + 1].tolist())
            self.content[self.row(req)[position]] = ((req.tenant, req.namespace), tokens)
            self.owners.setdefault((req.namespace, tokens), set()).add(req.tenant)
        req.kv_committed_len = end

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=2, max_size=20),
        whose=st.tuples(st.sampled_from(TENANTS), st.sampled_from(NAMESPACES)),
        first_chunk=st.integers(1, 20),
        priority=st.integers(0, 2),
    )
    def start(self, tokens: list[int], whose: Whose, first_chunk: int, priority: int) -> None:
        tenant, namespace = whose
        req = request(tokens, namespace=namespace, tenant=tenant, priority=priority)
        match = self.cache.match_prefix(RadixKey(req.fill_ids[:-1], namespace, tenant))
        self.cache.inc_lock_ref(match.last_device_node)
        prefix, page_size = len(match.device_indices), self.memory.page_size
        req.prefix_indices, req.last_node = match.device_indices, match.last_device_node
        req.cache_protected_len = req.kv_committed_len = prefix
        rows = self.memory.req_to_token_pool.alloc(1)
        req.req_pool_idx = rows[0] if rows else None
        if rows is None or not alloc_for_extend(self.memory, req, len(tokens)):
            assert req.kv_allocated_len == 0, "a refused request was given slots"
            self.memory.req_to_token_pool.free(rows or [])
            self.cache.dec_lock_ref(match.last_device_node)
            return
        assert req.kv_allocated_len == -(-len(tokens) // self.memory.page_size) * self.memory.page_size
        if self.memory.promotion is not None:
            self.demotion.admitted(req.last_node, tenant, len(tokens) - prefix)
            self.memory.promotion.admitted(tenant, req.last_node, len(tokens) - prefix)
            self.usage.found(tenant, self.row(req)[:prefix:page_size])
        self.compute(req, prefix + first_chunk)
        self.live.append(req)

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 99), chunk=st.integers(1, 8))
    def next_chunk(self, index: int, chunk: int) -> None:
        req = self.live[index % len(self.live)]
        left = len(req.fill_ids) - req.kv_committed_len
        promotion, before = self.memory.promotion, req.cache_protected_len
        aligned = req.kv_committed_len // self.memory.page_size * self.memory.page_size
        key = RadixKey(req.fill_ids[:aligned], req.namespace, req.tenant)
        may_grow = promotion is None or promotion.may_grow(key, req.last_node)
        self.cache.cache_unfinished_req(req, chunked=left > 0)
        assert req.cache_protected_len == (aligned if may_grow else before)
        if may_grow:
            self.usage.has(req.tenant, self.row(req)[: aligned : self.memory.page_size])
        assert req.prefix_indices.tolist() == self.row(req)[: req.kv_committed_len]
        self.compute(req, req.kv_committed_len + chunk)

    @precondition(lambda self: self.live)
    @rule(token=st.integers(0, 1), over=st.booleans())
    def decode(self, token: int, over: bool) -> None:
        """One step for all that are prefilled; `over` leaves the last slot without committed KV."""
        ready = [r for r in self.live if r.kv_committed_len >= len(r.fill_ids) - 1 and len(r.fill_ids) < 30]
        full = [req for req in ready if req.kv_allocated_len == len(req.fill_ids)]
        rows, lens = ([getattr(r, name) for r in full] for name in ("req_pool_idx", "kv_allocated_len"))
        if alloc_for_decode(self.memory, np.array(rows, np.int32), np.array(lens, np.int64)) is None:
            return
        for req in full:
            req.kv_allocated_len += self.memory.page_size
        for req in ready:
            req.fill_ids = np.append(req.fill_ids, np.int32(token))
            if not over:
                self.compute(req, len(req.fill_ids))

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 99), is_insert=st.booleans())
    def finish(self, index: int, is_insert: bool) -> None:
        req = self.live.pop(index % len(self.live))
        promotion, last = self.memory.promotion, req.last_node
        length = req.kv_committed_len // self.memory.page_size * self.memory.page_size
        key = RadixKey(req.fill_ids[:length], req.namespace, req.tenant)
        is_used = promotion is not None and is_insert and promotion.may_grow(key, last)
        release_kv_cache(self.memory, req, is_insert)
        if is_used:
            path, _ = self.tree.walk(key, below=last)
            pages = np.concatenate([np.empty(0, np.int32), *(node.value for node in path)])
            self.usage.has(req.tenant, (pages * self.memory.page_size).tolist())

    @rule(pages=st.integers(1, 30))
    def evict(self, pages: int) -> None:
        evictable, before = self.tree.evictable("full"), self.memory.allocator.available_pages()
        freed = self.tree.evict("full", pages)
        assert freed >= min(pages, evictable)
        assert self.memory.allocator.available_pages() == before + freed

    @precondition(lambda self: self.users)
    @rule()
    def end_epoch(self) -> None:
        assert self.memory.promotion is not None
        with self.usage.epoch_ends(), self.demotion.epoch_ends():
            self.memory.promotion.end_epoch()

    def may_see(self, tenant: str, content: tuple[Whose, tuple[int, ...]]) -> bool:
        """Whether a tenant may use KV: its own, or where tenants share what is public or enough have
        computed."""
        (owner, namespace), tokens = content
        if tenant == owner:
            return True
        owners = self.owners[namespace, tokens]
        return bool(self.users) and ("" in owners or len(owners) >= self.users)

    @invariant()
    def requests_see_what_is_theirs_of_their_tokens(self) -> None:
        for req in self.live:
            tokens = tuple(req.fill_ids.tolist())
            for position, slot in enumerate(self.row(req)[: req.kv_committed_len]):
                (_, namespace), seen = self.content[slot]
                assert (namespace, seen) == (req.namespace, tokens[: position + 1])
                assert self.may_see(req.tenant, self.content[slot])

    @invariant()
    def the_tree_names_pages_of_its_own_tokens(self) -> None:
        page_size = self.memory.page_size
        for node in self.tree.nodes():
            path = b"".join(step.tokens for step in node.path())
            tokens = np.frombuffer(path, np.int32).tolist()
            names = reference_hashes(node.namespace, tokens, page_size)[-len(node.value) :]
            assert event_hashes(node.page_digests(page_size)) == names, "a chain that knows the tenant"
            last_slot = int(node.value[-1]) * page_size + page_size - 1
            (_, namespace), seen = self.content[last_slot]
            assert (namespace, seen) == (node.namespace, tuple(tokens))
            assert self.may_see(node.tenant, self.content[last_slot])
            assert node.parent is not None
            is_gone = self.memory.promotion is not None and self.memory.promotion.demotion.holds(node)
            assert node.parent.tenant in ("", node.tenant) or is_gone, "a node below another tenant's"

    @invariant()
    def counters_are_what_the_model_counts(self) -> None:
        self.usage.check()

    @invariant()
    def everything_balances(self) -> None:
        held = [
            slot // self.memory.page_size
            for req in self.live
            for slot in self.row(req)[req.cache_protected_len :: self.memory.page_size]
        ]
        self.memory.check_memory({"full": held}, [req.req_pool_idx for req in self.live if req.req_pool_idx])

    @invariant()
    def events_rebuild_the_tree(self) -> None:
        self.index.read(*self.memory.take_events())
        names: list[int] = []
        for node in self.tree.nodes():
            tokens = np.frombuffer(b"".join(step.tokens for step in node.path()), np.int32).tolist()
            chained = reference_hashes(node.namespace, tokens, self.memory.page_size, node.tenant)
            names += chained[-node.num_pages :]
        assert sorted(self.index.blocks) == sorted(names)


def test_tree_against_the_model() -> None:
    run_state_machine_as_test(TreeMachine, settings=settings(max_examples=50, stateful_step_count=30))


@pytest.mark.invariants
def test_tree_against_the_model_for_long() -> None:
    run_state_machine_as_test(TreeMachine, settings=settings(max_examples=100, stateful_step_count=100))
