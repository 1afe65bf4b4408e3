"""How requests come to the machine that plays scheduler: admitted, or reserved for a transfer."""

from __future__ import annotations

from itertools import takewhile
from typing import Any, ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)

from kvcache.allocator import NO_PAGES
from kvcache.base_prefix_cache import MatchResult
from kvcache.common import alloc_for_extend, release_kv_cache
from kvcache.eviction import POLICIES
from kvcache.memory import Memory
from kvcache.radix_key import Namespace, RadixKey
from kvcache.request import StateHold, state_slot
from kvcache.tenancy.config import TenancyConfig
from tests.kvcache.contents import Contents, Live
from tests.kvcache.support import Index, Request, groups, memory, request
from tests.kvcache.tenancy.demotion_model import DemotionModel
from wire.request import NO_MARKS, PromptMarks, page_owner

NAMESPACES = (
    Namespace("m"),
    Namespace("m", extra_key="lora"),
    Namespace("m", cache_salt="salt"),
    Namespace("m", is_bigram=True),
)
TENANTS = ("", "a", "b", "c")


def _common(one: list[int], other: list[int]) -> int:
    """How many tokens two lists begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class Admissions(RuleBasedStateMachine):
    """A memory with the groups `kinds` beside the full one, and who has come."""

    kinds: ClassVar[tuple[str, ...]] = ()

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        policy=st.sampled_from(sorted(POLICIES)),
        window=st.sampled_from([1, 3, 4, 7, 9]),
        tight=st.booleans(),
        radix=st.integers(0, 9),
        users=st.sampled_from([0, 2]),
        burst=st.sampled_from([0, 1, 1, 2]),
        listed=st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=16), max_size=2),
    )
    def build(
        self,
        page_size: int,
        policy: str,
        window: int,
        tight: bool,
        radix: int,
        users: int,
        burst: int,
        listed: list[list[int]],
    ) -> None:
        pages = 96 // page_size
        options: dict[str, Any] = {"eviction_policy": policy, "prefix_cache": "radix" if radix else "none"}
        options["tenancy"] = TenancyConfig(users, burst=burst, secret=b"s")
        if tight:
            options |= {"state_slots": 9, "window_tokens": 64}
        self.memory = self.make_memory(
            page_size, pages, rows=5, specs=groups(*self.kinds, window=window), max_context_len=48, **options
        )
        self.size, self.window = page_size, window
        self.cache = self.memory.cache
        self.listed, self.rooms = listed, 0
        self.contents, self.demotion = self.make_contents(), DemotionModel(self.memory)
        self.live: list[Live] = []
        self.fences: list[int] = []
        self.owners = 0
        self.index = Index()
        self.prompts_seen: list[tuple[Namespace, list[int]]] = []

    def make_memory(self, *sizes: int, **options: Any) -> Memory:
        return memory(*sizes, **options)

    def make_contents(self) -> Contents:
        return Contents(self.memory, self.listed)

    # -- requests come -----------------------------------------------------------------------------

    def key(self, req: Request, length: int) -> RadixKey:
        return RadixKey(req.fill_ids[:length], req.namespace, req.tenant_key, req.marks)

    def live_for(
        self, tokens: list[int], namespace: Namespace, tenant: str, priority: int = 0, mark: int | None = None
    ) -> Live:
        """A request with the marks that a router would give it: `mark` is where it becomes private."""
        agrees = [_common(one, tokens) for one in self.listed]
        whole = [len(one) for one, n in zip(self.listed, agrees, strict=True) if n == len(one)]
        marks = PromptMarks(max(agrees, default=0), max(whole, default=0), mark)
        self.rooms += 1
        owner = page_owner(tenant, marks, self.rooms)
        if marks == NO_MARKS:
            marks = NO_MARKS
        return Live(request(tokens, namespace=namespace, tenant=owner, priority=priority, marks=marks))

    def take(self, live: Live, match: Any, starts_at: int) -> bool:
        """As a scheduler admits: lock, row, window, slots, states; all or nothing."""
        built, req, total = self.memory, live.req, live.prompt_len
        self.cache.inc_lock_ref(match.last_device_node)
        prefix = len(match.device_indices)
        rows = built.req_to_token_pool.alloc(1)
        req.req_pool_idx, req.prefix_indices = rows[0] if rows else None, match.device_indices
        extended = rows is not None and alloc_for_extend(built, req, total)
        pair = built.states.alloc(2) if extended and built.states else NO_PAGES
        if rows is None or not extended or pair is None:
            if extended:
                built.allocator.free(
                    built.req_to_token_pool.req_to_token[rows[0], prefix : req.kv_allocated_len]
                )
            if rows:
                built.req_to_token_pool.free(rows)
            self.cache.dec_lock_ref(match.last_device_node)
            return False
        if built.swa is not None:
            built.swa.attach(rows[0], starts_at, match.part("window"))
        if built.states is not None:
            slot = state_slot(match.part("state"))
            req.state_hold = StateHold(pair.tolist(), slot, prefix, branching_len=match.branching_len)
        req.last_node = match.last_device_node
        req.cache_protected_len = req.kv_committed_len = live.scheduled_len = prefix
        self.live.append(live)
        if built.promotion is not None:
            self.demotion.admitted(req.last_node, req.tenant, total - prefix)
            built.promotion.admitted(req.tenant, req.last_node, total - prefix)
        return True

    prompts = st.lists(st.integers(0, 1), min_size=2, max_size=24)
    marked = st.sampled_from([None] * 7 + [0, 2, 5])

    @rule(
        tokens=prompts,
        namespace=st.sampled_from(NAMESPACES),
        tenant=st.sampled_from(TENANTS),
        priority=st.integers(0, 2),
        turn=st.integers(0, 99),
        fork=st.integers(0, 24),
        mark=marked,
    )
    def admit(
        self,
        tokens: list[int],
        namespace: Namespace,
        tenant: str,
        priority: int,
        turn: int,
        fork: int,
        mark: int | None = None,
    ) -> None:
        """A new prompt; or a known one, of any tenant, cut off at `fork`, that goes on with `tokens`."""
        if self.prompts_seen and turn < 80:
            namespace, known = self.prompts_seen[turn % len(self.prompts_seen)]
            tokens = (known[:fork] + tokens)[:24]
        self.prompts_seen.append((namespace, tokens))
        live = self.live_for(tokens, namespace, tenant, priority, mark)
        match = self.cache.match_prefix(self.key(live.req, len(tokens) - 1))
        length = len(match.device_indices)
        assert length <= match.branching_len <= len(tokens) - 1
        if "state" in self.kinds:
            assert bool(state_slot(match.part("state"))) == bool(length), (
                "a match ends where there is no state"
            )
        if self.waits(live, match):
            return
        if self.take(live, match, length):
            self.contents.read(live.req, length)

    def waits(self, live: Live, match: MatchResult) -> bool:
        """Whether the request waits for something before it is admitted."""
        del live, match
        return False

    @rule(
        tokens=prompts,
        namespace=st.sampled_from(NAMESPACES),
        tenant=st.sampled_from(TENANTS),
        mark=marked,
    )
    def reserve(self, tokens: list[int], namespace: Namespace, tenant: str, mark: int | None) -> None:
        live = self.live_for(tokens, namespace, tenant, mark=mark)
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
                ] = self.contents.wrote(req, position + 1)
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
