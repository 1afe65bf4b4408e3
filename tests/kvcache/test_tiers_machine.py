"""The tree with a host tier, every combination of groups and every write policy, against the model of
test_groups_machine: requests come and go, copies to and from the host end in any order, late, or not at all.
Several requests have loads under way at once, of paths that share nodes or not.

The KV is a label in the real pools and arenas, which the real copies move. So what a forward reads, and what
every page on the host holds, is checked byte by byte where it counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test

from common.secrets import ClusterSecret
from kvcache.base_prefix_cache import MatchResult
from kvcache.common import release_kv_cache
from kvcache.memory import Memory
from kvcache.radix_key import Namespace, RadixKey
from kvcache.storage.config import StorageConfig
from kvcache.tiers.config import PREFETCH_POLICIES, WRITE_POLICIES, TierConfig
from kvcache.tiers.copier import nonzero
from kvcache.tiers.reads import TierRead
from kvcache.tree_node import TreeNode
from tests.kvcache.admissions import TENANTS, Admissions
from tests.kvcache.contents import Contents, Live, Seen
from tests.kvcache.support import HandMover, Index, memory, reference_hashes
from tests.kvcache.test_groups_machine import COMBINATIONS, GroupsMachine

SECRET = ClusterSecret((b"of the tests of the tiers alone.",))
STORAGE = StorageConfig(backend="tests.kvcache.storage.support:MemoryStore", secret=SECRET)
_NEVER_S = 1e9  # an example that takes long behaves as one that does not
LANES = ("backups", "loads", "writes", "reads", "reads")


class Labels(MutableMapping[Any, Seen]):
    """What was written where, as numbers in a tensor of float32."""

    def __init__(self, tensor: torch.Tensor, known: list[Seen], page_size: int | None = None) -> None:
        """`tensor` is indexed as the mapping is; with `page_size` by slot."""
        self.tensor = tensor
        self.known = known
        self.page_size = page_size

    def _at(self, key: Any) -> Any:
        return divmod(key, self.page_size) if self.page_size else key

    def __getitem__(self, key: Any) -> Seen:
        return self.known[int(self.tensor[self._at(key)])]

    def __setitem__(self, key: Any, seen: Seen) -> None:
        self.tensor[self._at(key)] = len(self.known)
        self.known.append(seen)

    def __delitem__(self, key: Any) -> None:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.known)


class LabelledContents(Contents):
    """Contents in the pools."""

    def __init__(self, built: Memory, listed: Sequence[list[int]]) -> None:
        super().__init__(built, listed)
        pools: dict[str, Any] = built.kv_caches
        self.known: list[Seen] = []
        self.kv = Labels(pools["full"].data[:, 1, 1, 1, :, 3], self.known, built.page_size)
        if "window" in pools:
            self.window = Labels(pools["window"].data[:, 0, 1, 1, :, 3], self.known)
        if "state" in pools:
            self.state = Labels(pools["state"].tensor(3, "conv")[:, 1, 2], self.known)

    def on_host(self, group: str) -> torch.Tensor:
        """The labels of a group's host pages, in the same form."""
        assert self.memory.tiers is not None
        host = self.memory.tiers.host
        pools: dict[str, Any] = self.memory.kv_caches
        raw = host.pool.arenas[group].bytes.view(torch.float32)
        if group == "state":
            return raw[:, 5]
        shaped = raw.view(len(raw), *pools[group].data.shape[1:])
        return shaped[:, -1, 1, 1, :, 3]


class TiersMachine(GroupsMachine):
    """See the top."""

    policy: ClassVar[str] = "write_through"
    prefetch: ClassVar[str] = ""  # the policy; "": no storage
    loads: ClassVar[int] = 0
    at_once: ClassVar[int] = 0  # how often a load was begun while another was under way
    prefetched: ClassVar[int] = 0  # pages
    read_below: ClassVar[int] = 0  # pages of the host that were read where they lay

    def make_memory(self, *sizes: int, **options: Any) -> Memory:
        self.mover = HandMover()
        self.waiting: list[Live] = []
        self.reading: list[tuple[TierRead, RadixKey]] = []
        self.host_index, self.storage_index = Index("CPU"), Index("STORAGE")
        options |= {"prefix_cache": "radix"}
        # A host that is too small for all, too.
        ratio = 0.4 if options.get("state_slots") else 2.0
        tiers = TierConfig(
            ratio=ratio,
            write_policy=self.policy,
            load_back_threshold=1,
            storage=STORAGE if self.prefetch else None,
            model_digest=bytes(32),
            prefetch_policy=self.prefetch or "timeout",
            prefetch_threshold=1,
            prefetch_base_s=_NEVER_S,
            prefetch_max_s=_NEVER_S,
        )
        return memory(*sizes, mover=self.mover, tiers=tiers, **options)

    def make_contents(self) -> Contents:
        return LabelledContents(self.memory, self.listed)

    def take(self, live: Live, match: Any, starts_at: int) -> bool:
        assert self.memory.tiers is not None
        taken = super().take(live, match, starts_at)
        if taken and match.last_device_node is not None:
            self.memory.tiers.moves.consider(match.last_device_node.path(), is_found=True)
        self.memory.tiers.forget(live)
        return taken

    def read_events(self) -> None:
        events = self.memory.take_events()
        indexes = self.index, self.host_index, self.storage_index
        for index in indexes:
            index.read(*events)
        names, stored, seen = [], [], self.contents
        assert isinstance(seen, LabelledContents)
        for node in self.cache.tree.nodes():
            if node.host is not None and not node.host.is_empty:
                tokens, held = _tokens(node), node.host.ids
                own = reference_hashes(node.namespace, tokens, self.size, node.tenant)[-node.num_pages :]
                names += own
                stored += own if node.host.told_stored else []
                end = len(tokens) - (1 if node.namespace.is_bigram else 0)
                self.holds(seen, node, held, tokens[:end])
        assert sorted(self.host_index.blocks) == sorted(names)
        assert sorted(self.storage_index.blocks) == sorted(stored)
        self.snapshots_say_the_same(indexes)
        self.stored_is_there()

    def snapshots_say_the_same(self, indexes: Sequence[Index]) -> None:
        """Who comes too late learns of each tier what the events have said."""
        public, private = (list(part.batches(at_most=3)) for part in self.memory.snapshot())
        for index in indexes:
            late = Index(index.medium)
            for batch in public:
                late.read(batch)
            for batch in private:
                late.read((), batch)
            assert late.blocks.keys() == index.blocks.keys()
            # Where tenants share, what follows a page that became public was told under its old name.
            assert self.memory.promotion is not None or late.blocks == index.blocks

    def stored_is_there(self) -> None:
        """Nothing is missing there of what events have told, nor of what is marked as stored in any group."""
        assert self.memory.tiers is not None
        storage = self.memory.tiers.storage
        if storage is None or self.mover.finished:  # a clear may be among what has ended
            return
        for node in self.cache.tree.nodes():
            if node.host is not None and node.host.told_stored:
                names = storage._keys.keys("full", node.page_digests(self.size), node.tenant)
                assert all(storage.backend.exists(names)), "a page that storage does not have was told"
            for group, ids in node.host.ids.items() if node.host is not None and node.host.stored else ():
                digests = node.page_digests(self.size)[-len(ids) :]
                kept = [digest for digest, page in zip(digests, ids, strict=True) if page]
                names = storage._keys.keys(group, kept, node.tenant)
                assert all(storage.backend.exists(names)), "what storage does not have is marked as stored"

    def holds(self, seen: LabelledContents, node: TreeNode, held: dict[str, Any], tokens: list[int]) -> None:
        """Every page of a copy has the node's KV."""
        size, first = self.size, len(tokens) // self.size - node.num_pages
        for group in ("full", "window"):
            labels = seen.on_host(group) if group in held else None
            for i, page in enumerate(held.get(group, ())):
                if page and labels is not None:
                    for offset in range(size):
                        known = seen.known[int(labels[page, offset])]
                        whole = (
                            node.tenant,
                            node.namespace,
                            tuple(tokens[: (first + i) * size + offset + 1]),
                        )
                        assert self.may_hold(node, known, whole)
        if held.get("state", np.zeros(1))[0]:
            label = seen.on_host("state")[int(held["state"][0])]
            wanted = (node.tenant, node.namespace, tuple(tokens))
            assert self.may_hold(node, seen.known[int(label)], wanted)

    # -- moves -------------------------------------------------------------------------------------

    @rule(
        lane=st.sampled_from(["backups", "loads", "writes", "reads", "reads"]),
        fails=st.integers(0, 9),
        count=st.integers(1, 3),
        which=st.integers(0, 3),
    )
    def move(self, lane: str, fails: int, count: int, which: int) -> None:
        """The mover does some work; one in ten fails. Loads end in any order."""
        for _ in range(count):
            self.mover.do(lane, fails == 0, which if lane == "loads" else 0)

    @rule()
    def poll(self) -> None:
        self.memory.tiers.poll()

    @rule(tokens=Admissions.prompts, turn=st.integers(0, 79), fork=st.integers(0, 24), more=st.integers(0, 6))
    def serve(self, tokens: list[int], turn: int, fork: int, more: int) -> None:
        """A whole request, often one like others before it."""
        before = len(self.live)
        self.ask(tokens, "", turn, fork)
        if len(self.live) == before:
            return
        live = self.live[-1]
        while live.scheduled_len < live.prompt_len:
            start = live.scheduled_len
            self.launch_chunk(live, 9)
            self.land_all(live)
            if live.scheduled_len == start:
                break
        for _ in range(more if live.scheduled_len == live.prompt_len else 0):
            self.launch_decode(live, 1)
            self.land_all(live)
        self.live.remove(live)
        release_kv_cache(self.memory, live.req, is_insert=True)

    def ask(self, tokens: list[int], tenant: str, turn: int, fork: int) -> None:
        """A request whose reads and loads end at once."""
        while len(self.waiting) > 3:
            self.retry(0, gives_up=True)
        before = len(self.waiting)
        super().ask(tokens, tenant, turn, fork)
        while len(self.waiting) > before:
            self.end_moves("reads", "loads")
            self.retry(before, gives_up=False)

    def end_moves(self, *lanes: str) -> None:
        """All work of these lanes ends."""
        while any(self.mover.do(lane) for lane in lanes):
            self.memory.tiers.poll()
        self.memory.tiers.poll()

    @rule(tokens=st.integers(10, 96))
    def press(self, tokens: int) -> None:
        """Backups end, and then the device is short of pages. In half of the cases others have used all."""
        assert self.memory.tiers is not None
        for node in list(self.cache.tree.nodes()) if tokens % 2 else ():
            self.memory.tiers.moves.consider(node.path(), is_found=True)
        self.end_moves("backups")
        self.evicts("full", -(-tokens // self.size))
        self.end_moves("backups")

    @rule(turns=st.lists(st.integers(0, 79), min_size=2, max_size=3), chance=st.integers(0, 3))
    def ask_again(self, turns: list[int], chance: int) -> None:
        """Who waits gives up. What was cached is on the host alone, or in storage, and several of the prompts
        come back at once."""
        while self.waiting:
            self.retry(0, gives_up=True)
        for turn in turns:
            self.serve([0, 1], turn, 24, 0)
        self.press(95)
        if not chance and self.memory.tiers.storage is not None:
            self.end_moves("writes")
            self.memory.tiers.host.clear()
        for turn in turns:
            self.admit([0, 1], Namespace("m"), "", 0, turn, 24)
        self.end_moves("reads")  # what storage has of them comes first
        for index in reversed(range(len(self.waiting))):
            self.retry(index, gives_up=False)

    @rule(chance=st.integers(0, 19))
    def clear_host(self, chance: int) -> None:
        """Everything goes from the host but what a move uses, and what is above that."""
        assert self.memory.tiers is not None
        host = self.memory.tiers.host
        if chance:
            return
        arena = host.pool.arenas["full"].allocator
        free = arena.available_pages()
        assert host.clear() == arena.available_pages() - free
        for node in self.cache.tree.nodes():
            if node.host is not None and not any(child.host for child in node.children.values()):
                assert node.host.locks or node.host.moving

    @precondition(lambda self: self.prompts_seen)
    @rule(
        which=st.integers(0, 99),
        tenant=st.sampled_from(TENANTS),
        whole=st.booleans(),
        start=st.integers(0, 3),
        pressed=st.booleans(),
    )
    def begin_read(self, which: int, tenant: str, whole: bool, start: int, pressed: bool) -> None:
        """A known prompt is to be sent to another worker from where it lies, often the one that was just
        served and is on the host by now."""
        if pressed:
            self.serve([0, 1], which % 80, 24, 0)
            self.press(95)
            which, tenant = -1, ""
        namespace, tokens = self.prompts_seen[which % len(self.prompts_seen)]
        key = self.key(self.live_for(tokens, namespace, tenant).req, len(tokens))
        key, reads = key[: len(key) // self.size * self.size], self.memory.tiers.reads
        if not self.reading:  # each read locks a part of the device
            groups = dict.fromkeys(self.memory.kv_caches, 0) | {"full": start}
            match = self.cache.match_prefix(key)
            read = reads.begin_whole(key, groups) if whole else reads.begin(key, start)
            if whole:
                cached = len(match.device_indices) + match.host_hit_length
                assert (read is not None) == (cached == len(key) > 0)
            if read is not None:
                assert not whole or read.pages * self.size == len(key)
                assert all((read.device[g] | read.host[g])[-1] or g == "full" for g in read.device)
                self.reading.append((read, key))

    @precondition(lambda self: self.reading)
    @rule(which=st.integers(0, 9))
    def end_read(self, which: int) -> None:
        """It finds what it was to find, whatever has happened since."""
        read, key = self.reading.pop(which % len(self.reading))
        tokens = key.tokens.tolist()

        def seen(length: int) -> Seen:
            return key.tenant, key.namespace, tuple(tokens[:length])

        contents = self.contents
        assert isinstance(contents, LabelledContents)
        for group in read.device:
            below = contents.on_host(group)
            for i, (page, host) in enumerate(zip(read.device[group], read.host[group], strict=True)):
                assert not (page and host)
                for offset in range(self.size if group != "state" else 0):
                    length = i * self.size + offset + 1
                    if page and group == "full":
                        assert contents.may_use(contents.kv[int(page) * self.size + offset], seen(length))
                    elif page:
                        assert contents.may_use(contents.window[int(page), offset], seen(length))
                    elif host:
                        assert contents.may_use(contents.known[int(below[host, offset])], seen(length))
                if group == "state":
                    label = contents.state[int(page)] if page else contents.known[int(below[host])]
                    assert contents.may_use(label, seen(read.pages * self.size))
        type(self).read_below += int(np.count_nonzero(read.host["full"]))
        self.memory.tiers.reads.end(read, is_whole=True)

    @rule(chance=st.integers(0, 19))
    def clear_storage(self, chance: int) -> None:
        """Everything goes from there, soon."""
        assert self.memory.tiers is not None
        if not chance and self.memory.tiers.storage is not None:
            self.memory.tiers.storage.clear(lambda held: None)

    def waits(self, live: Live, match: MatchResult) -> bool:
        tiers = self.memory.tiers
        assert tiers is not None
        if len(self.waiting) > 3:
            return False
        if tiers.storage is not None:
            tiers.storage.prefetches.prefetch(live, self.key(live.req, live.prompt_len - 1))
            if tiers.storage.prefetches.waits(live):
                self.waiting.append(live)
                return True
        if not tiers.moves.loads.wants(match):
            tiers.forget(live)
            return False
        waits = self.loads_for(live, match, is_next=len(self.waiting) % 2 == 0)
        if waits:
            self.waiting.append(live)
        return waits

    def loads_for(self, live: Live, match: MatchResult, is_next: bool) -> bool:
        """Whether the request waits for a load. `is_next`: it is its turn."""
        assert self.memory.tiers is not None
        loads = self.memory.tiers.moves.loads
        before = loads.loading
        if is_next:
            waits = loads.bring_back(live, match, fits=True)
        else:
            loads.bring_ahead(live, match)
            waits = loads.loading > before
        type(self).at_once += 0 < before < loads.loading
        return waits

    @precondition(lambda self: self.waiting)
    @rule(index=st.integers(0, 9), gives_up=st.booleans())
    def retry(self, index: int, gives_up: bool) -> None:
        tiers = self.memory.tiers
        assert tiers is not None
        live = self.waiting[index % len(self.waiting)]
        if not gives_up:
            if tiers.storage is not None and tiers.storage.prefetches.waits(live):
                return
            key = self.key(live.req, live.prompt_len - 1)
            match = self.cache.match_prefix(key)
            if tiers.moves.loads.wants(match) and self.loads_for(live, match, is_next=True):
                return
            length = len(match.device_indices)
            if self.take(live, match, length):
                self.contents.read(live.req, length)
        else:
            tiers.forget(live)
        self.waiting.remove(live)

    @rule(chance=st.integers(0, 4))
    def make_room(self, chance: int) -> None:
        """Memory is short: all that was loaded and is not used yet can be evicted."""
        if chance:
            return
        assert self.memory.tiers is not None
        loads = self.memory.tiers.moves.loads
        held = {live: loads.loaded_pages(live) for live in self.waiting}
        loads.make_room()
        still = [owner for owner, pages in held.items() if pages and loads.loaded_pages(owner)]
        assert len(still) <= loads.loading, "what was loaded stays locked"

    @invariant()
    def no_page_is_loaded_twice(self) -> None:
        if not hasattr(self, "memory"):
            return
        assert self.memory.tiers is not None
        under_way = [load for load in self.memory.tiers.moves.loads._loads.values() if not load.is_done]
        for group in self.memory.allocators:
            sources = [page for load in under_way for page in nonzero(load.host[group]).tolist()]
            assert len(sources) == len(set(sources))

    def settle(self) -> None:
        assert self.memory.tiers is not None
        host, storage = self.memory.tiers.host, self.memory.tiers.storage
        for live in self.waiting:
            self.memory.tiers.forget(live)
        self.waiting = []
        while self.reading:
            self.end_read(0)
        while self.mover.waiting or self.mover.finished:
            self.mover.do_all()
            self.memory.tiers.poll()
        assert self.memory.tiers.is_idle
        type(self).loads += self.memory.tiers.moves.counts.loads
        if storage is not None:
            type(self).prefetched += storage.counts.read_pages
        held = [len(node.host.ids["full"]) for node in self.cache.tree.nodes() if node.host is not None]
        arena = host.pool.arenas["full"]
        assert arena.num_pages - arena.allocator.available_pages() == sum(held), "a host page is lost"


def _tokens(node: TreeNode) -> list[int]:
    path = node.path()
    tokens = np.concatenate([step.token_array()[: step.num_tokens] for step in path]).tolist()
    tail: list[int] = path[-1].token_array()[path[-1].num_tokens :].tolist()
    return tokens + tail


def cases() -> list[Any]:
    """Every combination of groups with every write policy, and the prefetch policies in turn."""
    prefetches = itertools.cycle((*PREFETCH_POLICIES, ""))
    return [
        pytest.param(kinds, policy, next(prefetches), id="+".join(("full", *kinds, policy)))
        for kinds in COMBINATIONS
        for policy in WRITE_POLICIES
    ]


def machine(kinds: tuple[str, ...], policy: str, prefetch: str) -> type[TiersMachine]:
    """The machine for one combination."""
    named = {"kinds": kinds, "policy": policy, "prefetch": prefetch, "steps": 0}
    named |= dict.fromkeys(("loads", "at_once", "prefetched", "read_below"), 0)
    return type("_".join(("Tiers", *kinds, policy, prefetch)), (TiersMachine,), named)


@pytest.mark.parametrize(("kinds", "policy", "prefetch"), cases())
def test_tiers_against_the_model(kinds: tuple[str, ...], policy: str, prefetch: str) -> None:
    short = settings(max_examples=8, stateful_step_count=40)
    run_state_machine_as_test(machine(kinds, policy, prefetch), settings=short)


@pytest.mark.invariants
@pytest.mark.timeout(900)  # a minute on an idle machine
@pytest.mark.parametrize(("kinds", "policy", "prefetch"), cases())
def test_tiers_against_the_model_for_long(kinds: tuple[str, ...], policy: str, prefetch: str) -> None:
    long = machine(kinds, policy, prefetch)
    run_state_machine_as_test(
        long,
        settings=settings(
            max_examples=200, stateful_step_count=60, suppress_health_check=[HealthCheck.too_slow]
        ),
    )
    assert all((long.loads, long.at_once, long.read_below)), "the rules do not reach what they are to test"
    assert long.prefetched or prefetch in ("", "best_effort")
