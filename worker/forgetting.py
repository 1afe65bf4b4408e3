"""TenantForgetting: what a worker does when tenants are forgotten.

Each tenant has a generation, which is part of its key string (wire/page_hash.py). With a new one nothing is
found of what the tenant has cached before. The worker removes it: from device and host in passes over the
tree, a part in each sweep of the loop, and from storage by the prefix of its keys. Streams that began before
go on in the old generation, so passes are repeated until none of them is left; then storage is cleared once
more.

A request that comes in an older generation, from a router that has not heard of the new one, runs in the new
one, and a worker that has not heard of it is lent nothing of the older ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from kvcache.memory import Memory
from kvcache.storage.blob_store import Held
from kvcache.storage.keys import visibility
from kvcache.tenancy.removal import DEVICE, HOST, Removed, TenantRemoval
from kvcache.tiers.mover import Failed
from wire.messages.any_message import AnyMessage
from wire.messages.caches import CacheTier, ForgetTenant, TenantForgotten, TierRemoval
from wire.messages.transfer import Fetch
from wire.page_hash import tenant_key, tenant_of_key
from wire.request import GenerateRequest
from wire.settings import TenantGeneration
from worker.command_answers import CommandAnswers
from worker.rooms import Rooms

_NODES = 64  # of the tree that are looked at between two looks at the clock
_SWEEP_S = 0.005  # what one sweep of the loop may take for it
_PAUSE_S = 1.0  # between two passes
_ANSWER_S = 5.0  # after which a worker says what it has removed so far
_CLEAN_PASSES = 2  # without anything left or in use, and then a tenant is forgotten


@dataclass(slots=True)
class _Forgotten:
    """A tenant that is being forgotten here, in all generations before `generation`."""

    generation: int
    older: list[int]
    until: float  # by then questions are answered
    removed: Removed = field(default_factory=Removed)
    blobs: Held = field(default_factory=Held)
    problem: str = ""
    passes: int = 0  # whole ones
    is_late: bool = False  # a pass is under way that did not begin with it
    clean_passes: int = 0  # the latest ones
    is_storage_due: bool = True
    is_clearing: bool = False
    asked: list[tuple[str, int]] = field(default_factory=list)  # (sender, token) that await an answer


class TenantForgetting:
    """One worker's. Engine loop's thread only."""

    def __init__(
        self,
        memory: Memory,
        rooms: Rooms[Any],
        send: Callable[[str, AnyMessage], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory = memory
        self._rooms = rooms
        self._clock = clock
        self._known: dict[str, TenantGeneration] = {}
        self._under_way: dict[str, _Forgotten] = {}
        self._answers = CommandAnswers[TenantForgotten](send)
        page_bytes = {layout.name: layout.page_bytes for layout in memory.layouts()}
        self._removal = TenantRemoval(memory.cache.tree, page_bytes, self._is_old)
        self._next_pass_at: float | None = None  # None: a pass is under way

    def learn(self, told: Mapping[str, TenantGeneration]) -> None:
        """Forget the tenants that have got a new generation since the last call."""
        for name, generation in told.items():
            known = self._known.get(name)
            if known is None or generation.revision > known.revision:
                self._learn(name, generation)

    def current(self, request: GenerateRequest) -> GenerateRequest:
        """The request, in its tenant's generation as far as this worker knows it."""
        known = self._known.get(request.tenant)
        if known is None or known.revision <= request.tenant_generation:
            return request
        return replace(request, tenant_generation=known.revision)

    def current_fetch(self, fetch: Fetch) -> Fetch:
        """The same for what a worker asks for that has not heard of the new generation either."""
        name, generation = tenant_of_key(fetch.tenant)
        known = self._known.get(name)
        if known is None or known.revision <= generation:
            return fetch
        return replace(fetch, tenant=tenant_key(name, known.revision))

    def forget(self, sender: str, message: ForgetTenant) -> None:
        """Act on a message. A pass over the tree comes before the answer."""
        key = sender, message.token
        if not self._answers.is_new(key):
            return
        self.learn({message.tenant: message.generation})
        under_way = self._under_way.get(message.tenant)
        if under_way is None:  # this worker has heard of it before, and is done
            self._answers.answer(key, TenantForgotten(message.token, 0, {}))
        else:
            under_way.asked.append(key)

    def tick(self, now: float) -> None:
        """Remove some more. Called in every sweep of the loop."""
        if not self._under_way:
            return
        if self._next_pass_at is not None and now >= self._next_pass_at:
            self._next_pass_at = None
            self._removal.begin()
        told = self._step() if self._next_pass_at is None else None
        if told is not None:
            self._next_pass_at = now + _PAUSE_S
            in_use = self._in_use()
            for name, one in list(self._under_way.items()):
                self._passed(name, one, told.get(name) or Removed(), name in in_use)
        for one in self._under_way.values():
            if one.asked and (now >= one.until or (one.passes and not one.is_clearing)):
                self._report(one)

    def _step(self) -> dict[str, Removed] | None:
        """What the pass has removed, if it is over."""
        until, told = self._clock() + _SWEEP_S, self._removal.step(_NODES)
        while told is None and self._clock() < until:
            told = self._removal.step(_NODES)
        return told

    # -- inside ------------------------------------------------------------------------------------

    def _learn(self, name: str, told: TenantGeneration) -> None:
        before, under_way = self._known.get(name), self._under_way.get(name)
        older = {0, *told.forgotten}
        if before is not None:
            older |= {before.revision, *before.forgotten}
        self._known[name] = told
        one = _Forgotten(told.revision, sorted(older), self._clock() + _ANSWER_S)
        if under_way is not None:
            one.asked = under_way.asked
        one.is_late = bool(self._under_way) and self._next_pass_at is None
        self._under_way[name] = one
        if not one.is_late:
            self._next_pass_at = self._clock()

    def _is_old(self, key: str) -> bool:
        name, generation = tenant_of_key(key)
        one = self._under_way.get(name)
        return one is not None and generation < one.generation

    def _in_use(self) -> set[str]:
        """The tenants for which something runs that may insert pages of an older generation."""
        keys = {room.req.tenant_key for room in self._rooms.active()}
        tiers = self._memory.tiers
        if tiers is not None and tiers.storage is not None:
            keys |= tiers.storage.prefetches.tenants()
        return {tenant_of_key(key)[0] for key in keys if self._is_old(key)}

    def _passed(self, name: str, one: _Forgotten, told: Removed, in_use: bool) -> None:
        """A pass is over."""
        one.removed.nodes += told.nodes
        one.removed.pages += told.pages
        one.removed.bytes += told.bytes
        one.removed.left_pages = told.left_pages
        if one.is_late:  # the pass may have gone by its nodes before
            one.is_late = False
            return
        one.passes += 1
        if told.nodes or told.left_pages or in_use:
            one.clean_passes, one.is_storage_due = 0, True
        else:
            one.clean_passes += 1
        if one.is_clearing:
            return
        if one.is_storage_due and (one.passes == 1 or one.clean_passes == _CLEAN_PASSES):
            self._clear_storage(name, one)
            one.is_storage_due = in_use or told.left_pages > 0
        elif one.clean_passes > _CLEAN_PASSES:
            self._report(one)
            del self._under_way[name]

    def _clear_storage(self, name: str, one: _Forgotten) -> None:
        one.is_storage_due = False
        tiers = self._memory.tiers
        if tiers is None or tiers.storage is None:
            return
        one.is_clearing = True

        def done(told: Held | Failed | None) -> None:
            one.is_clearing = False
            if isinstance(told, Failed):
                one.problem = f"storage: {told.error!r}"
                one.clean_passes, one.is_storage_due = 0, True  # it is tried again
            elif told is None:
                one.problem = (
                    "storage: this backend cannot remove by prefix; what is there is not found again"
                )
            else:
                one.problem = ""
                one.blobs = Held(one.blobs.blobs + told.blobs, one.blobs.nbytes + told.nbytes)

        tiers.storage.forget([visibility(tenant_key(name, old)) for old in one.older], done)

    def _report(self, one: _Forgotten) -> None:
        """Answer all that have asked."""
        tiers, removed = self._memory.tiers, one.removed
        told: dict[CacheTier, TierRemoval] = {
            "device": TierRemoval(removed.pages[DEVICE], removed.bytes[DEVICE])
        }
        unfinished: list[CacheTier] = [] if one.passes and not removed.left_pages else ["device"]
        if tiers is not None:
            told["host"] = TierRemoval(removed.pages[HOST], removed.bytes[HOST])
            if tiers.storage is not None:
                told["storage"] = TierRemoval(*one.blobs)
                if one.is_storage_due or one.is_clearing:
                    unfinished.append("storage")
        for key in one.asked:
            args = removed.nodes, told, removed.left_pages, unfinished, one.problem
            self._answers.answer(key, TenantForgotten(key[1], *args))
        one.asked = []
