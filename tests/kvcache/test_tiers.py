"""Moves between tiers that end after the tree has gone on: what they bring twice is free again."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence

import pytest

from common.secrets import ClusterSecret
from kvcache.memory import Memory
from kvcache.storage.blob_store import Held, Outcome
from kvcache.storage.config import StorageConfig
from kvcache.tiers.config import TierConfig
from kvcache.tiers.prefetches import Prefetches
from kvcache.tiers.report import tier_report
from kvcache.tiers.tiers import Tiers
from scheduler.metrics import SchedulerMetrics
from tests.kvcache.storage.support import MemoryStore
from tests.kvcache.support import HandMover, key, matched, memory, put, set_clock
from wire.messages.any_message import AnyMessage
from wire.messages.caches import CacheCleared, ClearCache
from worker.clearing import CacheClearing
from worker.figures import worker_figures

STORAGE = StorageConfig(
    backend="tests.kvcache.storage.support:MemoryStore",
    secret=ClusterSecret((b"of the tests of the tiers alone.",)),
)
TOKENS = range(32)  # eight pages


@pytest.fixture
def mover() -> HandMover:
    return HandMover()


@pytest.fixture
def built(mover: HandMover) -> Iterator[Memory]:
    tiers = TierConfig(
        ratio=2.0, load_back_threshold=1, storage=STORAGE, model_digest=bytes(32), prefetch_threshold=1
    )
    with memory(4, 16, mover=mover, tiers=tiers, max_context_len=64) as made:
        yield made


def tiers_of(built: Memory) -> Tiers:
    assert built.tiers is not None
    return built.tiers


def rest(built: Memory, mover: HandMover) -> None:
    """Let everything that moves come to its end."""
    while mover.waiting or mover.finished:
        mover.do_all()
        tiers_of(built).poll()


def evict(built: Memory) -> None:
    """Leave nothing on the device."""
    built.cache.tree.evict("full", built.num_pages)


def free_on_host(built: Memory) -> int:
    return tiers_of(built).host.pool.arenas["full"].allocator.available_pages()


def begin_load(built: Memory) -> None:
    match = built.cache.match_prefix(key(TOKENS))
    assert match.host_hit_length == 32
    assert tiers_of(built).moves.loads.bring_back("one", match, fits=True)


def test_a_load_of_what_was_computed_meanwhile_frees_its_pages(built: Memory, mover: HandMover) -> None:
    put(built, TOKENS)
    rest(built, mover)
    evict(built)
    begin_load(built)
    put(built, TOKENS)
    rest(built, mover)
    tiers_of(built).forget("one")
    assert matched(built, TOKENS) == 32
    assert built.check_memory().free_pages == 8


def test_what_was_loaded_may_leave_the_host(built: Memory, mover: HandMover) -> None:
    put(built, TOKENS)
    rest(built, mover)
    evict(built)
    begin_load(built)
    assert tiers_of(built).host.alloc({"full": 32}) is None, "the source of a load has given way"
    rest(built, mover)
    tiers_of(built).forget("one")
    taken = tiers_of(built).host.alloc({"full": 32})
    assert taken is not None
    tiers_of(built).host.pool.free(taken)
    built.check_memory()


def begin_prefetch(built: Memory, mover: HandMover) -> None:
    """The pages are in storage alone; host pages for them are taken, and nothing is read yet."""
    put(built, TOKENS)
    rest(built, mover)
    evict(built)
    tiers = tiers_of(built)
    taken = tiers.host.alloc({"full": 32})
    assert taken is not None
    tiers.host.pool.free(taken)
    assert matched(built, TOKENS) == 0
    assert tiers.storage is not None
    assert tiers.storage.prefetches.prefetch("one", key(TOKENS))
    assert mover.do("reads")
    tiers.poll()


def test_a_prefetch_of_what_was_backed_up_meanwhile_frees_its_pages(built: Memory, mover: HandMover) -> None:
    begin_prefetch(built, mover)
    put(built, TOKENS)
    assert mover.do("backups")
    tiers_of(built).poll()
    rest(built, mover)
    tiers_of(built).forget("one")
    assert free_on_host(built) == 24
    built.check_memory()


def test_a_prefetch_that_fails_frees_its_pages(built: Memory, mover: HandMover) -> None:
    begin_prefetch(built, mover)
    assert mover.do("reads", fails=True)
    rest(built, mover)
    tiers_of(built).forget("one")
    assert free_on_host(built) == 32
    assert matched(built, TOKENS) == 0
    built.check_memory()


@pytest.mark.parametrize("is_refused", [False, True])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_prefetch_that_nobody_wanted_for_a_moment_goes_on(
    built: Memory, mover: HandMover, steps: int, is_refused: bool
) -> None:
    """A client asks the same again after its request was ended, also when the mover has left out the next
    step by then."""
    only_in_storage(built, mover)
    tiers = tiers_of(built)
    assert tiers.storage is not None
    prefetches = tiers.storage.prefetches
    assert prefetches.prefetch("one", key(TOKENS))
    for _ in range(steps):
        mover.do("reads")
        tiers.poll()
    tiers.forget("one")
    if is_refused:
        mover.do("reads")
    assert prefetches.prefetch("two", key(TOKENS))
    assert prefetches.waits("two")
    rest(built, mover)
    assert prefetches.arrived("two") == 32
    tiers.forget("two")
    built.check_memory()


SYSTEM = range(8)
ONE, OTHER = [*SYSTEM, *range(100, 116)], [*SYSTEM, *range(200, 224)]


def two_in_storage(built: Memory, mover: HandMover) -> Prefetches:
    """ONE and OTHER are in storage alone."""
    for tokens in (ONE, OTHER):
        put(built, tokens)
        rest(built, mover)
        evict(built)
    tiers = tiers_of(built)
    tiers.host.clear()
    assert tiers.storage is not None
    return tiers.storage.prefetches


def test_prompts_that_part_are_all_read(built: Memory, mover: HandMover) -> None:
    prefetches = two_in_storage(built, mover)
    for user, tokens in (("one", ONE), ("other", OTHER), ("again", OTHER), ("part", ONE[:16])):
        assert prefetches.prefetch(user, key(tokens))
        assert prefetches.prefetch(user, key(tokens)), "it asks in each turn of a loop"
    assert mover.count("reads") == len(prefetches) == 1
    while not prefetches.arrived("one"):
        assert all(prefetches.waits(user) for user in ("one", "other", "again", "part"))
        mover.do("reads")
        tiers_of(built).poll()
    assert [prefetches.waits(user) for user in ("one", "other", "again", "part")] == [
        False,
        True,
        True,
        False,
    ]
    rest(built, mover)
    for tokens in (ONE, OTHER):
        assert built.cache.match_prefix(key(tokens)).host_hit_length == len(tokens)
    assert prefetches.arrived("again") == len(OTHER) - len(SYSTEM)
    for user in ("one", "other", "again", "part"):
        assert not prefetches.waits(user)
        tiers_of(built).forget(user)
    built.check_memory()


def test_nobody_waits_for_the_prompt_of_a_request_that_was_ended(built: Memory, mover: HandMover) -> None:
    prefetches = two_in_storage(built, mover)
    tiers = tiers_of(built)
    assert prefetches.prefetch("one", key(ONE))
    mover.do("reads")
    tiers.poll()
    tiers.forget("one")
    for user, tokens in (("other", OTHER), ("part", ONE[:16]), ("gone", TOKENS)):
        assert prefetches.prefetch(user, key(tokens))
    tiers.forget("gone")
    assert not prefetches.waits("gone")
    rest(built, mover)
    assert built.cache.match_prefix(key(ONE)).host_hit_length == 16
    assert prefetches.arrived("other") + prefetches.arrived("part") == len(OTHER) + 16 - len(SYSTEM)
    assert len(prefetches) == 0
    for user in ("other", "part"):
        tiers.forget(user)
    built.check_memory()


def test_each_user_waits_until_its_own_deadline(built: Memory, mover: HandMover) -> None:
    prefetches, now = two_in_storage(built, mover), [0.0]
    set_clock(prefetches, lambda: now[0])
    for now[0], user, tokens in ((0.0, "one", ONE), (0.6, "two", ONE), (0.8, "other", OTHER)):
        assert prefetches.prefetch(user, key(tokens))
    waiting = []
    for now[0] in (0.9, 1.1, 1.7, 1.9):
        waiting.append([user for user in ("one", "two", "other") if prefetches.waits(user)])
    assert waiting == [["one", "two", "other"], ["two", "other"], ["other"], []]
    for user in ("one", "two", "other"):
        tiers_of(built).forget(user)
    assert len(prefetches) == 0


class SlowStorage:
    """The storage's clock: each blob that is looked for or read takes `seconds`. A dead one finds none."""

    def __init__(self, built: Memory, seconds: float) -> None:
        storage = tiers_of(built).storage
        assert storage is not None
        self.tier, self.counts = storage.prefetches, storage.counts
        self.seconds, self.now, self.is_dead = seconds, 0.0, False
        exists, get = storage.backend.exists, storage.backend.get
        storage.backend.exists = lambda keys: (  # type: ignore[method-assign]
            self.take(len(keys)) or ([False] * len(keys) if self.is_dead else exists(keys))
        )
        storage.backend.get = lambda keys, into: self.take(len(keys)) or get(keys, into)  # type: ignore[method-assign]
        set_clock(storage.prefetches, lambda: self.now)

    def take(self, blobs: int) -> None:
        self.now += blobs * self.seconds


def only_in_storage(built: Memory, mover: HandMover) -> None:
    """TOKENS are in storage alone."""
    put(built, TOKENS)
    rest(built, mover)
    evict(built)
    tiers_of(built).host.clear()
    assert matched(built, TOKENS) == 0


def test_what_is_computed_sooner_is_not_read(built: Memory, mover: HandMover) -> None:
    slow = SlowStorage(built, 0.5)  # eight seconds for eight pages
    only_in_storage(built, mover)
    assert slow.tier.prefetch("one", key(TOKENS), tokens_per_s=8.0)
    assert slow.tier.waits("one"), "nothing was known of the storage"
    rest(built, mover)
    tiers_of(built).forget("one")
    only_in_storage(built, mover)
    assert not slow.tier.prefetch("two", key(TOKENS), tokens_per_s=8.0)
    assert not slow.tier.waits("two")
    for _ in range(70):  # it asks in each turn of a loop, until it has a place
        assert not slow.tier.prefetch("two", key(TOKENS), tokens_per_s=8.0)
    assert slow.counts.skipped_reads == 1, "one request has brought on a trial"
    tiers_of(built).forget("two")
    assert not slow.tier.prefetch("two", key(TOKENS), tokens_per_s=8.0)
    assert slow.counts.skipped_reads == 2
    assert slow.tier._refused == {"two"}
    tiers_of(built).forget("two")
    assert not slow.tier._refused, "a user that has gone is kept"
    assert slow.tier.prefetch("three", key(TOKENS), tokens_per_s=3.0), "computing takes ten seconds"
    rest(built, mover)
    tiers_of(built).forget("three")
    built.check_memory()


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_storage_that_became_faster_is_noticed(built: Memory, mover: HandMover, is_dead: bool) -> None:
    slow = SlowStorage(built, 1.0)
    only_in_storage(built, mover)
    slow.is_dead = is_dead
    slow.tier.prefetch("one", key(TOKENS))
    rest(built, mover)
    tiers_of(built).forget("one")
    assert not slow.tier.prefetch("two", key(TOKENS), tokens_per_s=8.0), "it is left alone, if dead, too"
    slow.seconds, slow.is_dead = 0.001, False
    tried = 0
    for number in range(40):
        only_in_storage(built, mover)
        slow.now += 10.0
        if slow.tier.prefetch(number, key(TOKENS), tokens_per_s=8.0):
            if slow.tier.waits(number):
                break
            tried += 1
            tiers_of(built).forget(number)  # it is computed meanwhile, and the trial goes on
            rest(built, mover)
    assert 0 < tried < 12, f"{tried} trials before a request waits again"
    rest(built, mover)
    tiers_of(built).forget(number)
    built.check_memory()


def test_a_trial_ends_in_time(built: Memory, mover: HandMover) -> None:
    slow = SlowStorage(built, 0.5)
    only_in_storage(built, mover)
    slow.tier.prefetch("one", key(TOKENS))
    rest(built, mover)
    tiers_of(built).forget("one")
    only_in_storage(built, mover)
    slow.now += 60.0
    slow.seconds = 1000.0
    began = slow.now
    assert slow.tier.prefetch("two", key(TOKENS), tokens_per_s=8.0)
    tiers_of(built).forget("two")
    while mover.waiting:
        mover.do_all()
        tiers_of(built).poll()
    assert slow.now - began <= 8 * slow.seconds, "the trial read on after its deadline"
    assert tiers_of(built).is_idle
    built.check_memory()


def test_a_storage_that_stands_still_makes_requests_wait_only_once(built: Memory, mover: HandMover) -> None:
    tiers, now = tiers_of(built), [0.0]
    assert tiers.storage is not None
    prefetches = tiers.storage.prefetches
    set_clock(prefetches, lambda: now[0])
    for number in range(50):
        prompt = key(range(1000 * number, 1000 * number + 32))
        assert prefetches.prefetch(number, prompt) == (number == 0)
        while prefetches.waits(number):
            now[0] += 0.05
        tiers.forget(number)
        assert len(prefetches) == 0, "what nobody wants is kept for a storage that does not answer"
        assert tiers.is_idle
    assert now[0] < 1.1
    assert mover.count("reads") == 1
    assert mover.do("reads")
    tiers.poll()
    assert prefetches.prefetch("later", key(TOKENS)), "it goes on"
    tiers.forget("later")
    rest(built, mover)


def test_a_prefetch_that_is_stopped_asks_for_no_more_names(
    built: Memory, mover: HandMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers, asked = tiers_of(built), list[int]()
    assert tiers.storage is not None
    monkeypatch.setattr("kvcache.tiers.prefetch_steps._ASK_NAMES", 3)

    def exists(names: Sequence[bytes]) -> list[bool]:
        asked.append(len(names))
        if len(asked) == 5:
            tiers.forget("two")
        return [False] * len(names)

    monkeypatch.setattr(tiers.storage.backend, "exists", exists)
    for user in ("one", "two"):
        assert tiers.storage.prefetches.prefetch(user, key(TOKENS))
        rest(built, mover)
    assert asked == [3, 3, 2, 3, 3]
    tiers.forget("one")


def test_what_could_not_be_stored_is_tried_again(built: Memory, mover: HandMover) -> None:
    storage, now = tiers_of(built).storage, [0.0]
    assert storage is not None
    storage._clock = lambda: now[0]
    store: MemoryStore = storage.backend._store  # type: ignore[attr-defined]
    store.fails = lambda verb: Outcome.TIMEOUT if verb == "write" else None
    put(built, TOKENS)
    tried = []
    for second in range(0, 2000, 10):
        now[0], before = float(second), storage.counts.failed_writes
        tiers_of(built).poll()
        rest(built, mover)
        if storage.counts.failed_writes > before:
            tried.append(second)
    assert tried == [0, 30, 90, 210, 450, 930, 1410, 1890]
    assert storage.queued()["to_storage"] == 1
    put(built, [*range(16), 500, 501, 502, 503])  # the node is split
    store.fails = lambda verb: None
    rest(built, mover)
    assert len(store.blobs) == 1
    now[0] += 480.0
    tiers_of(built).poll()
    rest(built, mover)
    assert len(store.blobs) == 9
    assert all(node.host is not None and node.host.stored for node in built.cache.tree.nodes())
    assert storage.queued()["to_storage"] == 0
    built.check_memory()


@pytest.mark.parametrize("goes", [True, False])
def test_what_could_not_be_stored_is_not_kept_for_that(built: Memory, mover: HandMover, goes: bool) -> None:
    """Its copy gives way, before or after its write has failed."""
    storage = tiers_of(built).storage
    assert storage is not None
    put(built, TOKENS)
    assert mover.do("backups")
    tiers_of(built).poll()
    evict(built)
    if goes:
        tiers_of(built).host.clear()
    assert mover.do("writes", fails=True)
    tiers_of(built).poll()
    tiers_of(built).host.clear()
    assert storage.queued()["to_storage"] == 0
    assert free_on_host(built) == 32
    built.check_memory()


def test_a_node_that_is_lost_while_it_is_stored_frees_its_copy_afterwards(
    built: Memory, mover: HandMover
) -> None:
    put(built, range(8))
    assert mover.do("backups", fails=True)
    put(built, range(16))
    assert mover.do("backups")
    tiers_of(built).poll()
    evict(built)  # the first pages are on no tier, and those after them are of no use
    assert matched(built, TOKENS) == 0
    assert free_on_host(built) == 30
    built.check_memory()
    rest(built, mover)
    assert free_on_host(built) == 32
    built.check_memory()


def test_without_storage_nothing_keeps_a_node_that_is_gone(mover: HandMover) -> None:
    tiers = TierConfig(ratio=2.0, load_back_threshold=1)
    with memory(4, 16, mover=mover, tiers=tiers, max_context_len=64) as made:
        put(made, TOKENS)
        (node,) = made.cache.tree.nodes()
        rest(made, mover)
        evict(made)
        assert tiers_of(made).host.clear() == 8
        assert not list(made.cache.tree.nodes())
        gc.collect()
        holders = [one for one in gc.get_referrers(node) if isinstance(one, (list, dict, set))]
        assert holders == []
        made.check_memory()


def test_what_storage_holds_is_asked_on_another_thread_and_not_always(
    built: Memory, mover: HandMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, asked, clock = tiers_of(built).storage, list[float](), [0.0]
    assert storage is not None
    storage._clock = lambda: clock[0]
    monkeypatch.setattr(MemoryStore, "held", lambda self: asked.append(clock[0]) or Held(3, 300))

    def told() -> tuple[int, int]:
        figures, report = worker_figures(built, SchedulerMetrics()), tier_report(built.tiers)
        return figures.storage_bytes, report["storage"]["blobs"]

    assert told() == told() == (0, 0)
    assert (asked, mover.count("looks")) == ([], 1)
    rest(built, mover)
    for clock[0], looks in ((0.5, 0), (1.5, 1)):
        assert told() == told() == (300, 3)
        assert (asked, mover.count("looks")) == ([0.0], looks)
    rest(built, mover)
    assert asked == [0.0, 1.5]


def test_a_clear_tells_what_it_has_removed(
    built: Memory, mover: HandMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, told = tiers_of(built).storage, list[object]()
    assert storage is not None
    page = memoryview(bytearray(64))
    assert storage.backend.set([b"public----------" + bytes([name] * 32) for name in range(3)], [page] * 3)
    monkeypatch.setattr(MemoryStore, "held", lambda self: Held(99, 9900))  # counted some time ago
    storage.clear(told.append)
    rest(built, mover)
    assert told == [3]


@pytest.mark.parametrize("can_clear", [True, False])
def test_nothing_from_before_a_clear_is_written_after_it(
    built: Memory, mover: HandMover, monkeypatch: pytest.MonkeyPatch, can_clear: bool
) -> None:
    """Each of the two nodes takes a quarter of the host: one waits for the other's write."""
    storage = tiers_of(built).storage
    assert storage is not None
    store: MemoryStore = storage.backend._store  # type: ignore[attr-defined]
    if not can_clear:
        monkeypatch.setattr(store, "clear", lambda prefix: None)
    put(built, TOKENS)
    put(built, range(100, 132))
    while mover.do("backups"):
        tiers_of(built).poll()
    assert (mover.count("writes"), storage.queued()["to_storage"]) == (1, 2)
    storage.clear(lambda told: None)
    rest(built, mover)
    assert len(store.blobs) == (0 if can_clear else 16)
    copies = [node.host for node in built.cache.tree.nodes()]
    assert [copy is not None and copy.stored for copy in copies] == [not can_clear] * 2
    built.check_memory()


def test_a_storage_that_cannot_be_cleared_says_so(
    built: Memory, mover: HandMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As LMCache's and AIBrix's."""
    put(built, TOKENS)
    rest(built, mover)
    monkeypatch.setattr(MemoryStore, "clear", lambda self, prefix: None)
    said: list[tuple[str, AnyMessage]] = []
    clearing = CacheClearing(built, lambda to, message: said.append((to, message)))
    clearing.clear("operator", ClearCache(["storage"], 1))
    rest(built, mover)
    problem = "storage: this backend cannot be cleared"
    assert said == [("operator", CacheCleared(1, {}, problem))]
    (node,) = built.cache.tree.nodes()
    assert node.host is not None
    assert node.host.stored, "it is there still"
