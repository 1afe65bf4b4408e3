"""The tree and every combination of groups against a model that acts as a scheduler does.

Requests come (matched, locked, attached), prefill in chunks that end at the cache's cut points, decode with a
sliding window and state flips, one forward behind if they like; end, are cut short or retracted. Prompts also
come by transfer, or stop coming and leave their pages in quarantine. All kinds of eviction happen in between.

`Contents` plays the KV: whatever a forward reads must have been written for exactly its namespace and tokens.
After every step all pools balance, no unlocked leaf is a tombstone, locks are where the rules say, and a
consumer of the events knows exactly the tree's pages.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvcache.common import alloc_token_slots, release_kv_cache
from kvcache.eviction import POLICIES
from kvcache.memory import GroupPages, Memory
from kvcache.radix_key import Namespace, RadixKey
from kvcache.request import StateHold
from kvcache.tree_node import TreeNode
from tests.kvcache.support import Index, Request, groups, memory, reference_hashes, request, tree_of
from wire.page_hash import event_hash

NAMESPACES = (
    Namespace("m"),
    Namespace("m", extra_key="lora"),
    Namespace("m", cache_salt="salt"),
    Namespace("m", is_bigram=True),
)
COMBINATIONS = ((), ("window",), ("state",), ("window", "state"))
LONGEST = 40

Seen = tuple[Namespace, tuple[int, ...]]


class Live:
    """A request and what of it is under way."""

    def __init__(self, req: Request) -> None:
        self.req = req
        self.prompt_len = len(req.fill_ids)
        self.scheduled_len = 0
        self.out: list[int] = []  # ends of launched forwards that have not landed
        self.reserved: GroupPages | None = None  # what a transfer must bring
        self.deferred: list[GroupPages] = []  # freed while a forward was out


class Contents:
    """What was last written to every slot of every group, and what forwards must find there."""

    def __init__(self, built: Memory) -> None:
        self.memory = built
        self.kv: dict[int, Seen] = {}
        self.window: dict[tuple[int, int], Seen] = {}
        self.state: dict[int, Seen] = {}

    def prefix(self, req: Request, length: int) -> Seen:
        return req.namespace, tuple(req.fill_ids[:length].tolist())

    def write(self, req: Request, start: int, end: int) -> None:
        """Positions [start, end) get their KV, where the request has a place for it."""
        built, row = self.memory, req.req_pool_idx
        size = built.page_size
        for position in range(start, end):
            seen = self.prefix(req, position + 1)
            self.kv[int(built.req_to_token_pool.req_to_token[row, position])] = seen
            if built.swa is not None and position // size >= built.swa.private_from[row]:
                page = int(built.swa.table[row, position // size])
                assert page, "a forward writes to a window page that the request lacks"
                self.window[page, position % size] = seen

    def read(self, req: Request, start: int) -> None:
        """What a forward reads whose first query is at `start`."""
        built, row = self.memory, req.req_pool_idx
        size = built.page_size
        for position in range(start):
            slot = int(built.req_to_token_pool.req_to_token[row, position])
            assert self.kv[slot] == self.prefix(req, position + 1)
        if built.swa is not None:
            for position in range(max(0, start - built.swa.window + 1), start):
                page = int(built.swa.table[row, position // size])
                assert self.window[page, position % size] == self.prefix(req, position + 1)


class GroupsMachine(RuleBasedStateMachine):
    """See the top. `kinds` are the groups beside the full one."""

    kinds: ClassVar[tuple[str, ...]] = ()
    steps: ClassVar[int] = 0

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        policy=st.sampled_from(sorted(POLICIES)),
        window=st.sampled_from([1, 3, 4, 7, 9]),
        tight=st.booleans(),
        radix=st.integers(0, 9),
    )
    def build(self, page_size: int, policy: str, window: int, tight: bool, radix: int) -> None:
        pages = 96 // page_size
        options: dict[str, Any] = {"eviction_policy": policy, "prefix_cache": "radix" if radix else "none"}
        if tight:
            options |= {"state_slots": 9, "window_tokens": 64}
        self.memory = memory(
            page_size, pages, rows=5, specs=groups(*self.kinds, window=window), max_context_len=48, **options
        )
        self.size, self.window = page_size, window
        self.cache = self.memory.cache
        self.contents = Contents(self.memory)
        self.live: list[Live] = []
        self.fences: list[int] = []
        self.owners = 0
        self.index = Index()
        self.prompts_seen: list[tuple[Namespace, list[int]]] = []

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
        self.everything_balances()
        if self.memory.config.prefix_cache == "radix":
            self.cache.reset()
        for allocator in self.memory.allocators.values():
            assert allocator.available_pages() == allocator.num_pages

    # -- requests come -----------------------------------------------------------------------------

    def key(self, req: Request, length: int) -> RadixKey:
        return RadixKey(req.fill_ids[:length], req.namespace)

    def take(self, live: Live, match: Any, starts_at: int) -> bool:
        """As a scheduler admits: lock, row, window, slots, states; all or nothing."""
        built, req, total = self.memory, live.req, live.prompt_len
        self.cache.inc_lock_ref(match.last_device_node)
        prefix = len(match.device_indices)
        rows = built.req_to_token_pool.alloc(1)
        slots = alloc_token_slots(built, -(-(total - prefix) // self.size) * self.size) if rows else None
        pair = built.states.alloc(2) if slots is not None and built.states else []
        if rows is None or slots is None or pair is None:
            if slots is not None:
                built.allocator.free(slots)
            if rows:
                built.req_to_token_pool.free(rows)
            self.cache.dec_lock_ref(match.last_device_node)
            return False
        row = req.req_pool_idx = rows[0]
        if built.swa is not None:
            built.swa.attach(row, starts_at, match.window_pages)
        built.req_to_token_pool.write(row, 0, match.device_indices)
        built.req_to_token_pool.write(row, prefix, slots)
        if built.states is not None:
            req.state_hold = StateHold(pair, match.state_slot, prefix, branching_len=match.branching_len)
        req.last_node = match.last_device_node
        req.cache_protected_len = req.kv_committed_len = live.scheduled_len = prefix
        req.kv_allocated_len = prefix + len(slots)
        self.live.append(live)
        return True

    prompts = st.lists(st.integers(0, 1), min_size=2, max_size=24)

    @rule(
        tokens=prompts,
        namespace=st.sampled_from(NAMESPACES),
        priority=st.integers(0, 2),
        turn=st.integers(0, 99),
        fork=st.integers(0, 24),
    )
    def admit(self, tokens: list[int], namespace: Namespace, priority: int, turn: int, fork: int) -> None:
        """A new prompt; or a known one, cut off at `fork`, that goes on with `tokens`."""
        if self.prompts_seen and turn < 80:
            namespace, known = self.prompts_seen[turn % len(self.prompts_seen)]
            tokens = (known[:fork] + tokens)[:24]
        self.prompts_seen.append((namespace, tokens))
        live = Live(request(tokens, namespace=namespace, priority=priority))
        match = self.cache.match_prefix(self.key(live.req, len(tokens) - 1))
        length = len(match.device_indices)
        assert length <= match.branching_len <= len(tokens) - 1
        if "state" in self.kinds:
            assert bool(match.state_slot) == bool(length), "a match ends where there is no state"
        if self.take(live, match, length):
            self.contents.read(live.req, length)

    @rule(tokens=prompts, namespace=st.sampled_from(NAMESPACES))
    def reserve(self, tokens: list[int], namespace: Namespace) -> None:
        live = Live(request(tokens, namespace=namespace))
        req, total = live.req, len(tokens)
        match = self.cache.match_parts(self.key(req, total))
        if not self.take(live, match, total):
            return
        row, swa = req.req_pool_idx, self.memory.swa
        missing = self.row_pages(req, len(match.device_indices))
        live.reserved = {"full": missing}
        if swa is not None:
            if not swa.extend(row, total):
                self.live.remove(live)
                release_kv_cache(self.memory, req, is_insert=False)
                return
            live.reserved["window"] = swa.private_pages(row)
        if req.state_hold is not None:
            req.state_hold.live, req.state_hold.live_len = req.state_hold.private[0], total
            live.reserved["state"] = np.array([req.state_hold.live])

    def row_pages(self, req: Request, start: int) -> np.ndarray:
        row = self.memory.req_to_token_pool.req_to_token[req.req_pool_idx, start : req.kv_allocated_len]
        return row[:: self.size] // self.size

    @precondition(lambda self: any(live.reserved for live in self.live))
    @rule(index=st.integers(0, 99))
    def arrive(self, index: int) -> None:
        """The transfer brought everything."""
        waiting = [live for live in self.live if live.reserved]
        live = waiting[index % len(waiting)]
        req, live.reserved = live.req, None
        swa = self.memory.swa
        brought = req.cache_protected_len
        if swa is not None:  # pages of the window group may be missing where the others are not
            brought = min(brought, int(swa.private_from[req.req_pool_idx]) * self.size)
        for position in range(brought, live.prompt_len):
            if position >= req.cache_protected_len:
                self.contents.kv[
                    int(self.memory.req_to_token_pool.req_to_token[req.req_pool_idx, position])
                ] = self.contents.prefix(req, position + 1)
            if swa is not None and position // self.size >= swa.private_from[req.req_pool_idx]:
                page = int(swa.table[req.req_pool_idx, position // self.size])
                self.contents.window[page, position % self.size] = self.contents.prefix(req, position + 1)
        if req.state_hold is not None:
            self.contents.state[req.state_hold.live] = self.contents.prefix(req, live.prompt_len)
        req.kv_committed_len = live.scheduled_len = live.prompt_len
        self.cache.cache_unfinished_req(req)
        self.contents.read(req, live.prompt_len)

    @precondition(lambda self: any(live.reserved for live in self.live))
    @rule(index=st.integers(0, 99))
    def cancel(self, index: int) -> None:
        waiting = [live for live in self.live if live.reserved]
        live = waiting[index % len(waiting)]
        self.live.remove(live)
        self.give_up_reservation(live)

    def give_up_reservation(self, live: Live) -> None:
        req, built = live.req, self.memory
        assert live.reserved is not None
        assert req.req_pool_idx is not None
        if built.swa is not None:
            built.swa.release(req.req_pool_idx)
        if built.states is not None and req.state_hold is not None:
            built.states.free([slot for slot in req.state_hold.private if slot != req.state_hold.live])
        self.cache.dec_lock_ref(req.last_node)
        built.req_to_token_pool.free(req.req_pool_idx)
        self.owners += 1
        built.quarantine(live.reserved, self.owners)
        self.fences.append(self.owners)

    @precondition(lambda self: self.fences)
    @rule()
    def fence_passed(self) -> None:
        self.memory.release_quarantine(self.fences.pop(0))

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
            slots = alloc_token_slots(self.memory, self.size)
            if slots is None:
                return
            self.memory.req_to_token_pool.write(req.req_pool_idx, start, slots)
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
                assert contents.state[read] == contents.prefix(req, start)
            cached = self.cache.all_parts().get("state", ())
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

    # -- eviction ----------------------------------------------------------------------------------

    @rule(tokens=st.integers(1, 30))
    def evict(self, tokens: int) -> None:
        self.evicts("full", self.cache.evict, self.cache.evictable_size, tokens, self.size)

    @precondition(lambda self: "window" in self.kinds)
    @rule(pages=st.integers(1, 8))
    def evict_window(self, pages: int) -> None:
        self.evicts("window", self.cache.evict_window, self.cache.evictable_window_pages, pages, 1)

    @precondition(lambda self: "state" in self.kinds)
    @rule(slots=st.integers(1, 3))
    def evict_mamba(self, slots: int) -> None:
        self.evicts("state", self.cache.evict_mamba, self.cache.evictable_states, slots, 1)

    def evicts(self, group: str, evict: Any, evictable: Any, wanted: int, unit: int) -> None:
        allocator, before = self.memory.allocators[group], evictable()
        available = allocator.available_pages()
        freed = evict(wanted)
        assert freed >= min(wanted, before)
        assert freed == before - evictable()
        assert allocator.available_pages() == available + freed // unit

    @precondition(lambda self: not self.live)
    @rule()
    def reset(self) -> None:
        self.cache.reset()

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
        for node in tree_of(self.memory).nodes():
            self.locks_are_where_they_should_be(node)
            extra = 1 if node.namespace.is_bigram else 0
            path = node.path()
            tokens = np.concatenate([step.token_array()[: step.num_tokens] for step in path]).tolist()
            tokens += path[-1].token_array()[path[-1].num_tokens :].tolist()
            expected = reference_hashes(node.namespace, tokens, self.size)[-node.num_pages :]
            assert [event_hash(digest) for digest in node.page_digests(self.size)] == expected
            names += expected
            end = len(tokens) - extra
            seen = (node.namespace, tuple(tokens[:end]))
            assert self.contents.kv[int(node.value[-1]) * self.size + self.size - 1] == seen
            if "window" in self.kinds and (page := int(node.parts["window"][-1])):
                assert self.contents.window[page, self.size - 1] == seen
            if "state" in self.kinds and (slot := node.parts["state"]):
                assert self.contents.state[slot] == seen
        self.index.read(self.cache.take_events())
        assert sorted(self.index.blocks) == sorted(names)

    def locks_are_where_they_should_be(self, node: TreeNode) -> None:
        free_leaf = not node.children and not node.lock_ref
        if "window" in self.kinds:
            assert self.memory.swa is not None
            pages = node.parts["window"]
            assert pages[-1] or not free_leaf, "a leaf that is a tombstone"
            assert node.lock_ref or not self.memory.swa.locks.counts[pages[pages != 0]].any()
        if "state" in self.kinds:
            assert node.parts["state"] or not free_leaf, "a leaf that is a tombstone"
            assert node.mamba_lock == sum(live.req.last_node is node for live in self.live)
            assert node.lock_ref > 0 or node.mamba_lock == 0


def machine(kinds: tuple[str, ...]) -> type[GroupsMachine]:
    """The machine for one combination, with its own count of steps."""
    return type("_".join(("Machine", "full", *kinds)), (GroupsMachine,), {"kinds": kinds, "steps": 0})


@pytest.mark.parametrize("kinds", COMBINATIONS, ids="+".join)
def test_groups_against_the_model(kinds: tuple[str, ...]) -> None:
    run_state_machine_as_test(
        machine(kinds), settings=settings(max_examples=20, stateful_step_count=30, deadline=None)
    )


@pytest.mark.invariants
@pytest.mark.parametrize("kinds", COMBINATIONS, ids="+".join)
def test_groups_against_the_model_for_long(kinds: tuple[str, ...]) -> None:
    long = machine(kinds)
    run_state_machine_as_test(
        long,
        settings=settings(
            max_examples=250,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
    assert long.steps >= 5000
