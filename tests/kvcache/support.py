"""Small memories, requests, and an independent reader of KV events."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import torch

from kvcache.base_prefix_cache import MatchResult
from kvcache.config import CacheConfig, KVEventsConfig
from kvcache.layout import GroupSpec, KVGroupSpec, StateGroupSpec, StateTensor
from kvcache.memory import Memory, build_memory
from kvcache.radix_cache import RadixCache
from kvcache.radix_key import Namespace, RadixKey
from kvcache.request import StateHold
from kvcache.tiers.mover import Done, Failed, Work, WorkQueue
from kvcache.tiers.prefetches import Prefetches
from kvcache.tree_node import TreeNode
from wire.events import AnyEvent, encode_batch
from wire.request import NO_MARKS, PromptMarks

SPEC = KVGroupSpec(layer_ids=(0, 1), kv_heads=2, head_dim=4, dtype=torch.float32)
NAMESPACE = Namespace("model")


@dataclass
class Request:
    """The least that kvcache's CachedRequest asks for."""

    fill_ids: npt.NDArray[np.int32]
    namespace: Namespace = NAMESPACE
    tenant: str = ""
    priority: int = 0
    req_pool_idx: int | None = None
    kv_committed_len: int = 0
    kv_allocated_len: int = 0
    cache_protected_len: int = 0
    last_node: TreeNode | None = None
    state_hold: StateHold | None = None
    prefix_indices: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    marks: PromptMarks = NO_MARKS

    @property
    def tenant_key(self) -> str:
        return self.tenant


def request(tokens: Iterable[int], **fields: Any) -> Request:
    """A request that holds nothing yet."""
    return Request(np.array(list(tokens), np.int32), **fields)


def groups(*names: str, window: int = 8) -> tuple[GroupSpec, ...]:
    """Specs of a model with a full group and those named: "window", "state"."""
    more: dict[str, GroupSpec] = {
        "window": replace(SPEC, layer_ids=(2,), name="window", window=window),
        "state": StateGroupSpec((StateTensor(3, "conv", (2, 3), torch.float32),)),
    }
    return (SPEC, *(more[name] for name in names))


def memory(
    page_size: int = 4,
    pages: int = 64,
    rows: int = 8,
    specs: Sequence[GroupSpec] = (SPEC,),
    mover: WorkQueue | None = None,
    **options: Any,
) -> Memory:
    """A memory with KV events on and a context as long as the pool."""
    total = page_size * pages
    usual = {
        "mamba_track_interval": 2 * page_size,
        "max_context_len": total,
        "events": KVEventsConfig(enable=True),
    }
    config = CacheConfig(total, max_running_requests=rows, page_size=page_size, **{**usual, **options})
    return build_memory(config, specs, mover)


def radix_cache(built: Memory) -> RadixCache:
    """The cache of a memory that has prefix caching."""
    assert isinstance(built.cache, RadixCache)
    return built.cache


def key(
    tokens: Iterable[int],
    namespace: Namespace = NAMESPACE,
    tenant: str = "",
    marks: PromptMarks = NO_MARKS,
) -> RadixKey:
    """A key of plain ints."""
    return RadixKey(np.array(list(tokens), np.int32), namespace, tenant, marks)


def cached_tokens(built: Memory) -> int:
    """Tokens in the tree."""
    name = built.specs[0].name
    return (built.cache.tree.evictable(name) + built.cache.tree.protected(name)) * built.page_size


@contextmanager
def locked(built: Memory, tokens: Iterable[int]) -> Iterator[None]:
    """A lock on what is cached of a prefix, for the length of a block."""
    node = built.cache.match_prefix(key(tokens)).last_device_node
    built.cache.inc_lock_ref(node)
    yield
    built.cache.dec_lock_ref(node)


def pages_of(built: Memory, match: MatchResult) -> list[int]:
    """The page ids of a match."""
    pages: list[int] = (match.device_indices[:: built.page_size] // built.page_size).tolist()
    return pages


def put(
    built: Memory,
    tokens: Iterable[int],
    namespace: Namespace = NAMESPACE,
    tenant: str = "",
    marks: PromptMarks = NO_MARKS,
    **options: Any,
) -> list[int]:
    """Insert fresh pages for `tokens`, free the duplicates; the canonical page ids."""
    wanted = key(tokens, namespace, tenant, marks)
    pages = built.allocator.alloc_pages(len(wanted) // built.page_size)
    assert pages is not None
    inserted = radix_cache(built).insert(wanted, pages, **options)
    built.allocator.free_page_ids(pages[: inserted.prefix_len // built.page_size])
    return pages_of(built, inserted.match)


def matched(
    built: Memory,
    tokens: Iterable[int],
    namespace: Namespace = NAMESPACE,
    tenant: str = "",
    marks: PromptMarks = NO_MARKS,
) -> int:
    """How many tokens of a prefix are cached."""
    return len(built.cache.match_prefix(key(tokens, namespace, tenant, marks)).device_indices)


def reference_hashes(namespace: Namespace, tokens: list[int], page_size: int, tenant: str = "") -> list[int]:
    """The event names of a sequence's pages, computed from the written definition alone."""
    owner = hashlib.sha256(b"baton-owner-1" + tenant.encode()).digest()
    digest = hashlib.sha256(b"baton-kv-1")
    for part in (namespace.model, namespace.extra_key, namespace.cache_salt):
        digest.update(len(part.encode()).to_bytes(4, "little") + part.encode())
    digest.update(b"\x01" if namespace.is_bigram else b"\x00")
    last, names = digest.digest(), []
    units = len(tokens) - 1 if namespace.is_bigram else len(tokens)
    for start in range(0, units - page_size + 1, page_size):
        page = b"".join(
            token.to_bytes(4, "little")
            for unit in range(start, start + page_size)
            for token in tokens[unit : unit + (2 if namespace.is_bigram else 1)]
        )
        last = hashlib.sha256(last + page).digest()
        name = hashlib.blake2b(last, key=owner, digest_size=32).digest() if tenant else last
        names.append(int.from_bytes(name[:8], "big", signed=True))
    return names


class HandMover:
    """A WorkQueue without threads: work is done, and ends, when a test says so."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, Work, Done]] = []
        self.finished: list[tuple[Done, Any]] = []

    def submit(self, lane: str, work: Work, done: Done) -> None:
        """See WorkQueue."""
        self.waiting.append((lane, work, done))

    def count(self, lane: str) -> int:
        """How much work of a lane has not been begun."""
        return sum(name == lane for name, *_ in self.waiting)

    def do(self, lane: str, fails: bool = False, which: int = 0) -> bool:
        """Do a work of a lane, the first or another, or let it fail. Whether there was any."""
        of_lane = [i for i, (name, *_) in enumerate(self.waiting) if name == lane]
        if not of_lane:
            return False
        _, work, done = self.waiting.pop(of_lane[which % len(of_lane)])
        self.finished.append((done, Failed(OSError("no luck")) if fails else work()))
        return True

    def do_all(self) -> None:
        """Do all work."""
        while self.waiting:
            self.do(self.waiting[0][0])

    def take_done(self) -> bool:
        """See WorkQueue."""
        finished, self.finished = self.finished, []
        for done, result in finished:
            done(result)
        return bool(finished)

    def on_done(self, wake: Callable[[], None]) -> None:
        """See WorkQueue: whoever calls `do` knows."""

    def close(self) -> None:
        """See WorkQueue."""
        self.waiting = []


def set_clock(prefetches: Prefetches, clock: Callable[[], float]) -> None:
    """Give them another clock."""
    prefetches._clock = prefetches._steps._clock = prefetches._lane._clock = clock


class Index:
    """What a consumer of both streams believes of one tier: block name -> name of the block before it. Strict
    about what it is told."""

    def __init__(self, medium: str = "GPU") -> None:
        self.medium = medium
        self.public: dict[int, int | None] = {}
        self.private: dict[int, int | None] = {}
        self._ever_public: set[int] = set()

    @property
    def blocks(self) -> dict[int, int | None]:
        """Those of both streams."""
        assert not self.public.keys() & self.private.keys()
        return self.public | self.private

    def read(self, public: Sequence[AnyEvent], private: Sequence[AnyEvent] = ()) -> None:
        """Apply events as they travel: through our encoder and plain msgpack."""
        for events, blocks in ((public, self.public), (private, self.private)):
            for event in msgpack.unpackb(encode_batch(0.0, events))[1]:
                if event.get("medium", self.medium) == self.medium:
                    self._apply(event, blocks)

    def _apply(self, event: dict[str, Any], blocks: dict[int, int | None]) -> None:
        if event["type"] == "AllBlocksCleared":
            blocks.clear()
        elif event["type"] == "BlockRemoved":
            for name in event["block_hashes"]:
                del blocks[name]
        else:
            parent = event["parent_block_hash"]
            above = blocks.keys() | self._ever_public if blocks is self.private else blocks.keys()
            assert parent is None or parent in above or self.medium != "GPU", "an orphan"
            if blocks is self.private:
                assert event["token_ids"] == []
                assert not event.keys() & {"cache_salt", "extra_keys"}
            else:
                assert len(event["token_ids"]) == len(event["block_hashes"]) * event["block_size"]
                self._ever_public.update(event["block_hashes"])
            for name in event["block_hashes"]:
                assert name not in blocks, "stored twice"
                blocks[name] = parent
                parent = name
