"""Snapshots: what a replay beyond the buffer is answered with, against the tree itself."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcache.config import KVEventsConfig
from kvcache.publisher import EventPublisher
from kvcache.snapshot import TreeSnapshot
from tests.kvcache.driver import Driver
from tests.kvcache.support import Index, groups, memory, put
from tests.support.kv_events_reader import Pages, Replay
from tests.support.tree_worker import TreeWorker
from wire.events import AllBlocksCleared, BlockRemoved, BlockStored, decode_batch

SECONDS = 10.0


def names_in(payloads: list[bytes]) -> list[int]:
    """Every page that these batches say is stored."""
    events = [event for payload in payloads for event in decode_batch(payload).events]
    return [name for event in events if isinstance(event, BlockStored) for name in event.block_hashes]


def test_a_snapshot_is_of_its_moment_whatever_the_tree_does_then() -> None:
    built = memory()
    put(built, range(16))
    put(built, range(100, 140))
    snapshot = built.snapshot().public
    before = [event for batch in snapshot.batches(1) for event in batch]
    put(built, [*range(8), *range(50, 58)])  # splits
    built.cache.tree.evict("full", 10)
    assert [event for batch in snapshot.batches(1) for event in batch] == before
    consumer = Index()
    consumer.read(before)
    assert len(consumer.blocks) == 14


@example(sizes=[1] * 5, at_most=4)
@given(sizes=st.lists(st.integers(1, 9), max_size=30), at_most=st.integers(1, 12))
def test_a_snapshot_has_no_more_batches_than_it_may(sizes: list[int], at_most: int) -> None:
    built = memory(1, 512)
    for i, size in enumerate(sizes):
        put(built, [1000 + i] * size)
    snapshot = built.snapshot().public
    with mock.patch("kvcache.snapshot._BATCH_PAGES", 1):
        batches = list(snapshot.batches(at_most))
    assert 1 <= len(batches) <= at_most
    assert all(batches)
    consumer = Index()
    for batch in batches:
        consumer.read(batch)
    assert len(consumer.blocks) == sum(sizes)


def test_a_large_tree_comes_in_batches_of_a_bounded_size() -> None:
    built = memory(1, 20_000)
    for i in range(30):
        put(built, [i] * 600)
    snapshot = built.snapshot().public
    pages = [
        sum(len(event.block_hashes) for event in batch if isinstance(event, BlockStored))
        for batch in snapshot.batches(10_000)
    ]
    assert sum(pages) == 18_000
    assert max(pages) < 4096 + 600


def test_who_comes_too_late_gets_all_that_is_cached_and_then_what_follows() -> None:
    with TreeWorker(buffer_batches=4) as worker, Replay(worker.publisher.public.replay_address) as replay:
        for i in range(12):
            worker.put([i] * 8)
        worker.evict(24)
        snapshot = replay.ask(0)
        assert list(snapshot) == [12], "one batch, under the last number"
        assert decode_batch(snapshot[12]).events[0] == AllBlocksCleared()
        assert sorted(names_in([*snapshot.values()])) == sorted(worker.pages())
        worker.put([50] * 8)
        assert list(replay.ask(13)) == [13]
        assert list(replay.ask(10)) == [10, 11, 12, 13], "the buffer reaches back so far"
        assert list(replay.ask(9)) == [13], "and no further"
        pages = Pages("model")
        pages.apply(replay.ask(5), first=13)
        assert set(pages.held) == worker.pages()


@pytest.mark.parametrize(
    ("bounds", "most", "tokens"),
    [
        *(({"buffer_batches": most}, most, 3000) for most in (1, 2, 4)),
        ({"buffer_bytes": 1}, 1, 1500),
        ({"buffer_bytes": 60_000}, 3, 1500),
    ],
)
def test_the_numbers_of_a_snapshot_lie_above_what_the_peer_has(
    bounds: dict[str, int], most: int, tokens: int
) -> None:
    """One batch would hold it; with this many pages it has as many as there may be."""
    with (
        TreeWorker(**bounds, page_size=1, pages=40_000) as worker,
        Replay(worker.publisher.public.replay_address) as replay,
    ):
        for i in range(10):
            worker.put([i] * tokens)
        for start in range(10 - most):
            numbers = list(replay.ask(start))
            assert numbers == list(range(10 - len(numbers), 10))
            assert numbers[0] > start
            assert len(numbers) <= most
        snapshot, pages = replay.ask(0), Pages("model")
        pages.apply(snapshot, first=min(snapshot))
        assert set(pages.held) == worker.pages()


def test_peers_that_wait_share_one_snapshot() -> None:
    built = memory()
    wanted = threading.Semaphore(0)
    config = KVEventsConfig(enable=True, buffer_batches=2)
    with EventPublisher(config, None, wanted.release) as publisher, ExitStack() as cleanup:
        for number in range(5):
            publisher.publish([BlockRemoved([number], "GPU")])
        peers = [cleanup.enter_context(Replay(publisher.public.replay_address)) for _ in range(3)]
        for peer in peers:
            peer.send(0)
            peer.send(1)
        for _ in range(6):
            assert wanted.acquire(timeout=SECONDS)
        assert publisher.snapshot_wanted
        put(built, range(8))
        publisher.publish_snapshot(*built.snapshot())
        assert not publisher.snapshot_wanted
        answers = [peer.receive() for peer in peers]
        assert all(answer == answers[0] for answer in answers)
        assert len(names_in([*answers[0].values()])) == 2
        assert publisher.public.snapshots == 1
        publisher.publish_snapshot(*built.snapshot())
        for peer in peers:
            assert list(peer.ask(3)) == [3, 4], "each peer was answered once"
        assert publisher.public.snapshots == 1, "nobody waits any more"


def test_a_snapshot_nobody_waits_for_is_not_sent() -> None:
    with EventPublisher(KVEventsConfig(enable=True, buffer_batches=2), None, lambda: None) as publisher:
        publisher.publish_snapshot(TreeSnapshot(4, []), TreeSnapshot(4, []))
        publisher.publish([AllBlocksCleared()])
        with Replay(publisher.public.replay_address) as replay:
            assert list(replay.ask(2**64 - 1)) == []
            assert list(replay.ask(0)) == [0]
        assert publisher.public.snapshots == 0


OPERATIONS = st.one_of(
    st.tuples(
        st.just("run"),
        st.lists(st.sampled_from([1, 2]), min_size=1, max_size=24),
        st.sampled_from([4, 8, 99]),
    ),
    st.tuples(st.just("full"), st.integers(1, 8), st.none()),
    st.tuples(st.just("state"), st.integers(1, 4), st.none()),
    st.tuples(st.just("lose"), st.none(), st.none()),
    st.tuples(st.just("join"), st.none(), st.none()),
)


@settings(max_examples=40)
@given(operations=st.lists(OPERATIONS, max_size=25), buffer=st.sampled_from([1, 2, 5]))
def test_replays_and_snapshots_say_what_the_tree_holds(
    operations: list[tuple[str, object, object]], buffer: int
) -> None:
    """A model with states, whose eviction alone is silent. A consumer that knows nothing of snapshots asks
    for what it lacks after each operation, loses what it knows, or joins anew."""
    with TreeWorker(buffer, pages=64, specs=groups("state")) as worker:
        driver = Driver(worker.memory)
        replay = Replay(worker.publisher.public.replay_address)
        consumer, expected = Index(), 0
        for what, first, second in [*operations, ("read", None, None)]:
            with worker.turn() as built:
                if what == "run":
                    driver.run(first, chunk=second)  # type: ignore[arg-type]
                elif what in ("full", "state"):
                    built.cache.tree.evict(what, first)  # type: ignore[arg-type]
            if what == "lose":
                continue
            if what == "join":
                consumer, expected = Index(), 0
            for number, payload in replay.ask(expected).items():
                assert number >= expected
                consumer.read(decode_batch(payload).events)
                expected = number + 1
            assert set(consumer.blocks) == worker.pages()
        replay.close()
