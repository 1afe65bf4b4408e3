"""Driver: requests through the cache's interface as a scheduler takes them, forward by forward, no engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from kvcache.common import alloc_for_decode, alloc_for_extend, release_kv_cache
from kvcache.memory import Memory, MemoryReport
from kvcache.radix_key import RadixKey
from kvcache.request import StateHold, state_slot
from tests.kvcache.support import Request, request


class Driver:
    """One worker's requests. `forwards` counts those that were needed."""

    def __init__(self, built: Memory) -> None:
        self.memory = built
        self.live: list[Request] = []
        self.forwards = 0

    def admit(self, tokens: Iterable[int], **fields: Any) -> Request:
        """Match, lock and take what the prompt needs; there must be room."""
        built, req = self.memory, request(tokens, **fields)
        total = len(req.fill_ids)
        match = built.cache.match_prefix(RadixKey(req.fill_ids[:-1], req.namespace, req.tenant))
        built.cache.inc_lock_ref(match.last_device_node)
        prefix = len(match.device_indices)
        rows = built.req_to_token_pool.alloc(1)
        assert rows is not None
        row = req.req_pool_idx = rows[0]
        req.last_node, req.prefix_indices = match.last_device_node, match.device_indices
        assert alloc_for_extend(built, req, total), "no pages"
        if built.swa is not None:
            built.swa.attach(row, prefix, match.part("window"))
        if built.states is not None:
            pair = built.states.alloc(2)
            assert pair is not None
            live = state_slot(match.part("state"))
            req.state_hold = StateHold(pair.tolist(), live, prefix, branching_len=match.branching_len)
        req.cache_protected_len = req.kv_committed_len = prefix
        self.live.append(req)
        return req

    def prefill(self, req: Request, chunk: int = 1 << 30) -> Iterator[int]:
        """Forward after forward over the rest of the prompt; yields where each ended, before it is cached."""
        built, total = self.memory, len(req.fill_ids)
        while (start := req.kv_committed_len) < total:
            end = total if total - start <= chunk else (start + chunk) // built.page_size * built.page_size
            end = min((cut for cut in built.cache.cut_points(req, total) if start < cut < end), default=end)
            assert req.req_pool_idx is not None
            if built.swa is not None:
                assert built.swa.extend(req.req_pool_idx, end), "no window pages"
            if req.state_hold is not None:
                req.state_hold.prefill(end)
            self.forwards += 1
            req.kv_committed_len = end
            yield end
            built.cache.cache_unfinished_req(req, chunked=end < total)
            self.slide(req)

    def decode(self, req: Request, steps: int, token: int = 7) -> Iterator[int]:
        """Step after step; yields the length after each."""
        built = self.memory
        for _ in range(steps):
            length = req.kv_committed_len
            assert req.req_pool_idx is not None
            if length == req.kv_allocated_len:
                rows, lens = np.array([req.req_pool_idx]), np.array([length])
                assert alloc_for_decode(built, rows, lens) is not None, "no pages"
                req.kv_allocated_len += built.page_size
            self.slide(req)
            if built.swa is not None:
                assert built.swa.extend(req.req_pool_idx, length + 1), "no window pages"
            if req.state_hold is not None:
                req.state_hold.decode(length, length % built.config.mamba_track_interval == 0)
            if len(req.fill_ids) == length:
                req.fill_ids = np.append(req.fill_ids, np.int32(token))
            self.forwards += 1
            req.kv_committed_len = length + 1
            yield length + 1

    def slide(self, req: Request) -> None:
        """Give up what the request's next query does not see."""
        if self.memory.swa is not None:
            assert req.req_pool_idx is not None
            self.memory.free({"window": self.memory.swa.slide(req.req_pool_idx, req.kv_committed_len)})

    def finish(self, req: Request, is_insert: bool = True) -> None:
        """End the request."""
        self.live = [other for other in self.live if other is not req]
        release_kv_cache(self.memory, req, is_insert)

    def run(self, tokens: Iterable[int], steps: int = 0, chunk: int = 1 << 30, **fields: Any) -> int:
        """A whole request; returns how many tokens of its prompt were cached."""
        req = self.admit(tokens, **fields)
        hit = req.kv_committed_len
        for _ in self.prefill(req, chunk):
            pass
        for _ in self.decode(req, steps):
            pass
        self.finish(req)
        return hit

    def check(self) -> MemoryReport:
        """Balance every pool against what the live requests hold."""
        built = self.memory
        held: dict[str, list[int]] = {spec.name: [] for spec in built.specs}
        for req in self.live:
            assert req.req_pool_idx is not None
            row = built.req_to_token_pool.req_to_token[req.req_pool_idx]
            own = row[req.cache_protected_len : req.kv_allocated_len : built.page_size]
            held[built.specs[0].name] += (own // built.page_size).tolist()
            if built.swa is not None:
                held["window"] += built.swa.private_pages(req.req_pool_idx).tolist()
            if req.state_hold is not None:
                held["state"] += req.state_hold.private
        return built.check_memory(held, [req.req_pool_idx for req in self.live if req.req_pool_idx])
