"""The tree against a model: requests with shared prefixes come, chunk, decode and end; pages are evicted.

After every rule all pools balance, a consumer of the events knows exactly the tree's pages, sizes equal
recomputed sums, and every page a request sees was written for exactly its tokens.
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
from tests.kvcache.support import Index, Request, memory, reference_hashes, request, tree_of
from wire.page_hash import event_hash

NAMESPACES = (Namespace("m"), Namespace("m", extra_key="lora"), Namespace("m", cache_salt="salt"))


class TreeMachine(RuleBasedStateMachine):
    """`content[slot]` plays the KV: the namespace and the tokens up to and with the one stored there."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        policy=st.sampled_from(sorted(POLICIES)),
        need_sort=st.booleans(),
    )
    def build(self, page_size: int, policy: str, need_sort: bool) -> None:
        self.memory = memory(page_size, 48 // page_size, rows=5, eviction_policy=policy, need_sort=need_sort)
        self.tree = tree_of(self.memory)
        self.index = Index()
        self.content: dict[int, tuple[Namespace, tuple[int, ...]]] = {}
        self.live: list[Request] = []

    def row(self, req: Request) -> list[int]:
        return self.memory.req_to_token_pool.req_to_token[req.req_pool_idx, : req.kv_allocated_len].tolist()

    def compute(self, req: Request) -> None:
        """The forward: every allocated token gets its KV, and all of it is committed."""
        for position in range(req.kv_committed_len, min(req.kv_allocated_len, len(req.fill_ids))):
            self.content[self.row(req)[position]] = (
                req.namespace,
                tuple(req.fill_ids[: position + 1].tolist()),
            )
        req.kv_committed_len = min(req.kv_allocated_len, len(req.fill_ids))

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=2, max_size=20),
        namespace=st.sampled_from(NAMESPACES),
        first_chunk=st.integers(1, 20),
        priority=st.integers(0, 2),
    )
    def start(self, tokens: list[int], namespace: Namespace, first_chunk: int, priority: int) -> None:
        req = request(tokens, namespace=namespace, priority=priority)
        match = self.tree.match_prefix(RadixKey(req.fill_ids[:-1], namespace))
        self.tree.inc_lock_ref(match.last_device_node)
        prefix = len(match.device_indices)
        req.prefix_indices, req.last_node = match.device_indices, match.last_device_node
        req.cache_protected_len = req.kv_committed_len = prefix
        if alloc_for_extend(self.memory, [req], [min(first_chunk, len(tokens) - prefix)]) is None:
            assert req.req_pool_idx is None, "a refused request was given a row"
            self.tree.dec_lock_ref(match.last_device_node)
            return
        self.compute(req)
        self.live.append(req)

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 99), chunk=st.integers(1, 8))
    def next_chunk(self, index: int, chunk: int) -> None:
        req = self.live[index % len(self.live)]
        left = len(req.fill_ids) - req.kv_allocated_len
        self.tree.cache_unfinished_req(req, chunked=left > 0)
        aligned = req.kv_committed_len // self.memory.page_size * self.memory.page_size
        assert req.cache_protected_len == aligned
        assert req.prefix_indices.tolist() == self.row(req)[: req.kv_committed_len]
        if left > 0 and alloc_for_extend(self.memory, [req], [min(chunk, left)]) is not None:
            self.compute(req)

    @precondition(lambda self: self.live)
    @rule(token=st.integers(0, 1), over=st.booleans())
    def decode(self, token: int, over: bool) -> None:
        """One step for all that are prefilled; `over` leaves the last slot without committed KV."""
        ready = [r for r in self.live if r.kv_allocated_len == len(r.fill_ids) < 30]
        if not ready or alloc_for_decode(self.memory, ready) is None:
            return
        for req in ready:
            req.fill_ids = np.append(req.fill_ids, np.int32(token))
            if not over:
                self.compute(req)

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 99), is_insert=st.booleans())
    def finish(self, index: int, is_insert: bool) -> None:
        release_kv_cache(self.memory, self.live.pop(index % len(self.live)), is_insert)

    @rule(tokens=st.integers(1, 30))
    def evict(self, tokens: int) -> None:
        evictable, before = self.tree.evictable_size(), self.memory.allocator.available_size()
        freed = self.tree.evict(tokens)
        assert freed >= min(tokens, evictable)
        assert self.memory.allocator.available_size() == before + freed

    @precondition(lambda self: not self.live)
    @rule()
    def reset(self) -> None:
        self.tree.reset()

    @invariant()
    def requests_see_their_own_tokens(self) -> None:
        for req in self.live:
            tokens = tuple(req.fill_ids.tolist())
            for position, slot in enumerate(self.row(req)[: req.kv_committed_len]):
                assert self.content[slot] == (req.namespace, tokens[: position + 1])

    @invariant()
    def the_tree_names_pages_of_its_own_tokens(self) -> None:
        page_size = self.memory.page_size
        for node in self.tree.nodes():
            path = b"".join(step.tokens for step in node.path())
            tokens = np.frombuffer(path, np.int32).tolist()
            names = reference_hashes(node.namespace, tokens, page_size)[-len(node.value) :]
            assert [event_hash(digest) for digest in node.page_digests(page_size)] == names
            last_slot = int(node.value[-1]) * page_size + page_size - 1
            assert self.content[last_slot] == (node.namespace, tuple(tokens))

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
        self.index.read(self.tree.take_events())
        size = self.memory.page_size
        names = [event_hash(d) for node in self.tree.nodes() for d in node.page_digests(size)]
        assert sorted(self.index.blocks) == sorted(names)


def test_tree_against_the_model() -> None:
    run_state_machine_as_test(
        TreeMachine, settings=settings(max_examples=50, stateful_step_count=30, deadline=None)
    )


@pytest.mark.invariants
def test_tree_against_the_model_for_long() -> None:
    run_state_machine_as_test(
        TreeMachine, settings=settings(max_examples=100, stateful_step_count=100, deadline=None)
    )
