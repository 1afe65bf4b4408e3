"""The tree and every combination of groups against a model that acts as a scheduler does.

Requests come (matched, locked, attached), prefill in chunks that end at the cache's cut points, decode with a
sliding window and state flips, one forward behind if they like; end, are cut short or retracted. Prompts also
come by transfer, or stop coming and leave their pages in quarantine. All kinds of eviction happen in between.

`Contents` plays the KV: whatever a forward reads must have been written for exactly its tenant, namespace and
tokens. After every step all pools balance, no unlocked leaf is a tombstone, locks are where the rules say,
and a consumer of the events knows exactly the tree's pages.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvcache.common import alloc_for_decode, release_kv_cache
from kvcache.radix_key import Namespace
from kvcache.tree_node import TreeNode
from tests.kvcache.admissions import Admissions
from tests.kvcache.contents import FINAL, Live, Seen
from tests.kvcache.support import reference_hashes
from wire.page_hash import event_hashes

COMBINATIONS = ((), ("window",), ("state",), ("window", "state"))
LONGEST = 40


class GroupsMachine(Admissions):
    """See the top. `kinds` are the groups beside the full one."""

    steps: ClassVar[int] = 0
    published: ClassVar[int] = 0  # pages that became public
    merged: ClassVar[int] = 0  # nodes that gave way to copies
    demoted: ClassVar[int] = 0  # pages that stopped being public

    def teardown(self) -> None:
        if not hasattr(self, "memory"):
            return
        for live in self.live:
            self.land_all(live)
            if live.reserved is not None:
                self.give_up_reservation(live)
            else:
                release_kv_cache(self.memory, live.req)
        for owner in self.fences:
            self.memory.release_quarantine(owner)
        self.live, self.fences = [], []
        self.settle()
        self.everything_balances()
        self.cache.tree.evict("full", self.memory.num_pages)
        for allocator in self.memory.allocators.values():
            assert allocator.available_pages() == allocator.num_pages

    def settle(self) -> None:
        """Let what is still under way end."""

    # -- forwards ----------------------------------------------------------------------------------

    @precondition(lambda self: any(not live.reserved for live in self.live))
    @rule(index=st.integers(0, 99), chunk=st.integers(1, 9), token=st.integers(0, 1), more=st.integers(1, 6))
    def launch(self, index: int, chunk: int, token: int, more: int) -> None:
        """One chunk of prefill, or up to `more` steps of decode."""
        ready = [live for live in self.live if not live.reserved]
        live = ready[index % len(ready)]
        if len(live.out) > 1:
            self.land(live)
        if live.scheduled_len < live.prompt_len:
            self.launch_chunk(live, chunk)
            return
        for _ in range(more):
            if len(live.out) > 1:
                self.land(live)
            self.launch_decode(live, token)

    def launch_chunk(self, live: Live, chunk: int) -> None:
        req, start = live.req, live.scheduled_len
        end = live.prompt_len
        if start + chunk < end:
            end = max(
                (start + chunk) // self.size * self.size, min(end, start // self.size * self.size + self.size)
            )
        end = min(
            (cut for cut in self.cache.cut_points(req, live.prompt_len) if start < cut < end), default=end
        )
        if not self.window_for(live, end):
            return
        self.run(live, start, end, *(req.state_hold.prefill(end) if req.state_hold else (0, 0)))

    def launch_decode(self, live: Live, token: int) -> None:
        req, start = live.req, live.scheduled_len
        if start + 1 >= LONGEST:
            return
        if start == req.kv_allocated_len:
            if alloc_for_decode(self.memory, np.array([req.req_pool_idx]), np.array([start])) is None:
                return
            req.kv_allocated_len += self.size
        if self.memory.swa is not None and live.out == []:
            self.memory.free({"window": self.memory.swa.slide(req.req_pool_idx, start)})
        if not self.window_for(live, start + 1):
            return
        if self.memory.swa is not None and live.out == []:
            assert self.memory.swa.held_pages(req.req_pool_idx) <= -(-self.window // self.size) + 1
        if len(req.fill_ids) == start:
            req.fill_ids = np.append(req.fill_ids, np.int32(token))
        checkpoint = start % self.memory.config.mamba_track_interval == 0
        self.run(
            live, start, start + 1, *(req.state_hold.decode(start, checkpoint) if req.state_hold else (0, 0))
        )

    def window_for(self, live: Live, end: int) -> bool:
        swa, row = self.memory.swa, live.req.req_pool_idx
        return swa is None or swa.extend(row, end)

    def run(self, live: Live, start: int, end: int, read: int, write: int) -> None:
        """Forwards run in the order of their launches, so what one reads and writes may be settled now."""
        req, contents = live.req, self.contents
        contents.read(req, start)
        if self.memory.swa is not None and not live.out:
            most = -(-(self.window + end - start) // self.size) + 1
            assert self.memory.swa.held_pages(req.req_pool_idx) <= most
        if req.state_hold is not None:
            if start:
                assert contents.may_use(contents.state[read], contents.prefix(req, start))
            cached = self.cache.tree.all_pages("state")
            assert write in req.state_hold.private, "a forward writes to a state that is not the request's"
            assert write not in cached
            contents.state[write] = contents.prefix(req, end)
        contents.write(req, start, end)
        live.scheduled_len = end
        live.out.append(end)

    def land(self, live: Live) -> None:
        """The result of the oldest forward is here."""
        req = live.req
        req.kv_committed_len = live.out.pop(0)
        if not live.out:
            for pages in live.deferred:
                self.memory.free(pages)
            live.deferred = []
        if req.kv_committed_len > live.prompt_len:
            return
        if live.out:
            self.memory.free_group_begin()
        self.cache.cache_unfinished_req(req, chunked=req.kv_committed_len < live.prompt_len)
        if live.out:
            live.deferred.append(self.memory.free_group_take())
        row = self.memory.req_to_token_pool.req_to_token[req.req_pool_idx, : req.kv_committed_len]
        assert req.prefix_indices.tolist() == row.tolist()
        if self.memory.swa is not None:
            self.memory.free({"window": self.memory.swa.slide(req.req_pool_idx, req.kv_committed_len)})

    def land_all(self, live: Live) -> None:
        while live.out:
            self.land(live)

    @precondition(lambda self: any(live.out for live in self.live))
    @rule(index=st.integers(0, 99))
    def result(self, index: int) -> None:
        out = [live for live in self.live if live.out]
        self.land(out[index % len(out)])

    @precondition(lambda self: any(not live.reserved for live in self.live))
    @rule(index=st.integers(0, 99), is_insert=st.booleans())
    def finish(self, index: int, is_insert: bool) -> None:
        """Also an abort (nothing enters the tree) and a retraction (everything does)."""
        ready = [live for live in self.live if not live.reserved]
        live = ready[index % len(ready)]
        self.land_all(live)
        self.live.remove(live)
        release_kv_cache(self.memory, live.req, is_insert)
        assert live.req.state_hold is None

    @precondition(lambda self: self.memory.promotion is not None)
    @rule(
        tokens=Admissions.prompts,
        turn=st.integers(0, 99),
        fork=st.integers(0, 24),
        chunk=st.integers(1, 24),
        owners=st.lists(st.sampled_from(("a", "b", "c", "d")), min_size=2, max_size=4, unique=True),
        one_stays=st.booleans(),
    )
    def several_ask(
        self, tokens: list[int], turn: int, fork: int, chunk: int, owners: list[str], one_stays: bool
    ) -> None:
        """Tenants with one prompt, one after another; the last may go on."""
        for owner in owners:
            before = len(self.live)
            self.ask(tokens, owner, turn, fork)
            turn = 99 if turn >= 80 or len(self.prompts_seen) > 80 else len(self.prompts_seen) - 1
            fork, tokens = 0, self.prompts_seen[-1][1]
            if len(self.live) == before:
                return
            live = self.live[-1]
            while live.scheduled_len < live.prompt_len:
                start = live.scheduled_len
                self.launch_chunk(live, chunk)
                self.land_all(live)
                if live.scheduled_len == start:
                    return
            if not (one_stays and owner == owners[-1]):
                self.live.remove(live)
                release_kv_cache(self.memory, live.req, is_insert=True)

    def ask(self, tokens: list[int], tenant: str, turn: int, fork: int) -> None:
        """A request that waits for nothing else."""
        self.admit(tokens, Namespace("m"), tenant, 0, turn, fork)

    @precondition(lambda self: bool(self.nodes_with_founders()))
    @rule(
        which=st.integers(0, 99),
        pages=st.integers(0, 24),
        owner=st.sampled_from(("a", "d", "e")),
        guesses=st.lists(st.integers(2, 9), min_size=2, max_size=4, unique=True),
        ends=st.booleans(),
    )
    def one_guesses(self, which: int, pages: int, owner: str, guesses: list[int], ends: bool) -> None:
        """A tenant asks for several continuations of public pages, one after another; the epoch may end."""
        promoted = self.nodes_with_founders()
        path = promoted[which % len(promoted)].path()
        known = np.concatenate([step.token_array()[: step.num_tokens] for step in path]).tolist()
        left = len(known) - pages % path[-1].num_pages * self.size
        for guess in guesses:
            before = len(self.live)
            self.admit([*known[:left], guess, 0], path[-1].namespace, owner, 0, 99, 0)
            if len(self.live) > before:
                live = self.live.pop()
                release_kv_cache(self.memory, live.req, is_insert=True)
        if ends:
            self.end_epoch()

    @precondition(lambda self: self.memory.promotion is not None)
    @rule(
        tokens=Admissions.prompts,
        chunk=st.integers(1, 24),
        guesses=st.lists(st.integers(2, 9), min_size=3, max_size=4, unique=True),
        ends=st.booleans(),
    )
    def a_text_is_shared_and_guessed(
        self, tokens: list[int], chunk: int, guesses: list[int], ends: bool
    ) -> None:
        """As many tenants as any place needs ask it, the epoch ends, and one more guesses how it goes on."""
        self.several_ask(tokens, 99, 0, chunk, ["a", "b", "c"], False)
        self.end_epoch()
        promoted = [i for i, node in enumerate(self.nodes_with_founders()) if "c" in node.founders]
        if promoted:
            self.one_guesses(promoted[-1], 0, "e", guesses, ends)

    def nodes_with_founders(self) -> list[TreeNode]:
        return [node for node in self.cache.tree.nodes() if node.founders]

    @precondition(lambda self: self.memory.promotion is not None)
    @rule()
    def demotion_goes_on(self) -> None:
        """Between the ends of epochs: what was demoted is removed once nothing holds it."""
        self.memory.promotion.demotion.go_on()

    @precondition(lambda self: self.memory.promotion is not None)
    @rule()
    def end_epoch(self) -> None:
        """What enough tenants have becomes public, and what one seems to guess stops being so."""
        promotion = self.memory.promotion
        with self.demotion.epoch_ends():
            promotion.end_epoch()
        type(self).published += promotion.public_pages
        type(self).merged += promotion.merged_copies
        type(self).demoted += promotion.demotion.demoted_pages
        promotion.demotion.demoted_pages = 0
        promotion.public_pages = promotion.merged_copies = 0

    # -- eviction ----------------------------------------------------------------------------------

    @rule(tokens=st.integers(1, 30))
    def evict(self, tokens: int) -> None:
        self.evicts("full", -(-tokens // self.size))

    @precondition(lambda self: "window" in self.kinds)
    @rule(pages=st.integers(1, 8))
    def evict_window(self, pages: int) -> None:
        self.evicts("window", pages)

    @precondition(lambda self: "state" in self.kinds)
    @rule(slots=st.integers(1, 3))
    def evict_state(self, slots: int) -> None:
        self.evicts("state", slots)

    def evicts(self, group: str, wanted: int) -> None:
        allocator, before = self.memory.allocators[group], self.cache.tree.evictable(group)
        available = allocator.available_pages()
        freed = self.cache.tree.evict(group, wanted)
        assert freed >= min(wanted, before)
        assert freed == before - self.cache.tree.evictable(group)
        assert allocator.available_pages() == available + freed

    @precondition(lambda self: not self.live and self.memory.tiers is None)
    @rule()
    def evict_everything(self) -> None:
        self.cache.tree.evict("full", self.memory.num_pages)
        assert not any(len(self.cache.tree.all_pages(name)) for name in self.memory.allocators)

    # -- what always holds -------------------------------------------------------------------------

    @invariant()
    def everything_balances(self) -> None:
        if not hasattr(self, "memory"):
            return
        type(self).steps += 1
        held: dict[str, list[int]] = {spec.name: [] for spec in self.memory.specs}
        rows = []
        for live in self.live:
            req = live.req
            assert req.req_pool_idx is not None
            rows.append(req.req_pool_idx)
            held["full"] += self.row_pages(req, req.cache_protected_len).tolist()
            if self.memory.swa is not None:
                held["window"] += self.memory.swa.private_pages(req.req_pool_idx).tolist()
            if req.state_hold is not None:
                held["state"] += req.state_hold.private
            for pages in live.deferred:
                for name, ids in pages.items():
                    held[name] += ids.tolist()
        report = self.memory.check_memory(held, rows)
        for name, books in report.groups.items():
            parts = (
                books.free,
                books.evictable,
                books.protected,
                books.held,
                books.quarantined,
                books.pending,
            )
            assert sum(parts) == books.total, name

    @invariant()
    def the_tree_holds_what_its_tokens_say_and_events_rebuild_it(self) -> None:
        if not hasattr(self, "memory") or self.memory.config.prefix_cache == "none":
            return
        names = []
        for node in self.cache.tree.nodes():
            self.locks_are_where_they_should_be(node)
            extra = 1 if node.namespace.is_bigram else 0
            path = node.path()
            tokens = np.concatenate([step.token_array()[: step.num_tokens] for step in path]).tolist()
            tokens += path[-1].token_array()[path[-1].num_tokens :].tolist()
            expected = reference_hashes(node.namespace, tokens, self.size)[-node.num_pages :]
            assert event_hashes(node.page_digests(self.size)) == expected, "a chain that knows the tenant"
            if node.is_resident:
                names += reference_hashes(node.namespace, tokens, self.size, node.tenant)[-node.num_pages :]
            if not node.is_resident:
                continue
            end = len(tokens) - extra
            seen = (node.tenant, node.namespace, tuple(tokens[:end]))
            contents, last = self.contents, int(node.value[-1]) * self.size + self.size - 1
            assert self.may_hold(node, contents.kv[last], seen)
            if contents.kv[last][0].endswith(FINAL):
                assert node.permanently_private, "what was private for ever is so no longer"
            if "window" in self.kinds and (page := int(node.parts["window"][-1])):
                assert self.may_hold(node, contents.window[page, self.size - 1], seen)
            if "state" in self.kinds and (slot := node.parts["state"].slot):
                assert self.may_hold(node, contents.state[slot], seen)
        self.read_events()
        assert sorted(self.index.blocks) == sorted(names)

    def may_hold(self, node: TreeNode, found: Seen, wanted: Seen) -> bool:
        """Whether a node may have what was written as `found`. Of one that was demoted only tokens count."""
        return found[1:] == wanted[1:] if self.is_nobodys(node) else self.contents.may_use(found, wanted)

    def is_nobodys(self, node: TreeNode) -> bool:
        """Whether the node was demoted: no request finds it any more, its owner's neither. One that had it
        locked before has not ended."""
        return self.memory.promotion is not None and self.memory.promotion.demotion.holds(node)

    def read_events(self) -> None:
        self.index.read(*self.memory.take_events())

    def locks_are_where_they_should_be(self, node: TreeNode) -> None:
        free_leaf = node.is_resident and not node.resident_children and not node.lock_ref
        if "window" in self.kinds:
            assert self.memory.swa is not None
            pages = node.parts["window"]
            assert pages[-1] or not free_leaf, "a leaf that is a tombstone"
            assert node.lock_ref or not self.memory.swa.locks.counts[pages[pages != 0]].any()
        if "state" in self.kinds:
            state = node.parts["state"]
            assert state.slot or not free_leaf, "a leaf that is a tombstone"
            if self.memory.tiers is None:
                assert state.locks == sum(live.req.last_node is node for live in self.live)
            assert node.lock_ref > 0 or state.locks == 0


def machine(kinds: tuple[str, ...]) -> type[GroupsMachine]:
    """The machine for one combination, with its own count of steps."""
    return type(
        "_".join(("Machine", "full", *kinds)),
        (GroupsMachine,),
        {"kinds": kinds, "steps": 0, "published": 0, "merged": 0, "demoted": 0},
    )


@pytest.mark.parametrize("kinds", COMBINATIONS, ids="+".join)
def test_groups_against_the_model(kinds: tuple[str, ...]) -> None:
    run_state_machine_as_test(machine(kinds), settings=settings(max_examples=12, stateful_step_count=30))


@pytest.mark.invariants
@pytest.mark.timeout(900)  # a minute on an idle machine
@pytest.mark.parametrize("kinds", COMBINATIONS, ids="+".join)
def test_groups_against_the_model_for_long(kinds: tuple[str, ...]) -> None:
    long = machine(kinds)
    run_state_machine_as_test(
        long,
        settings=settings(
            max_examples=250,
            stateful_step_count=60,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
    assert long.steps >= 5000
    assert long.published > 50
    assert long.merged > 20
    assert long.demoted > 5
