"""The event plane against publishers: what the index says must be what the workers' trees hold, soon."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from router.events import feed as event_feed
from router.events.event_plane import EventPlane
from router.index.global_index import GlobalIndex
from tests.router.conftest import ROOT, wait_until
from tests.router.directory.test_directory import record
from tests.support.raw_publisher import LossyProxy, RawPublisher
from tests.support.tree_worker import TreeWorker
from wire.events import AllBlocksCleared, BlockRemoved, BlockStored
from wire.page_hash import event_hash, namespace_seed, page_digests

SOON_S = 1.0


def stored(*hashes: int, medium: str | None = "GPU") -> BlockStored:
    return BlockStored(list(hashes), None, [0] * len(hashes), 1, None, medium, None)


class Seen:
    """A plane and its index."""

    def __init__(self) -> None:
        self.index = GlobalIndex()
        self.plane = EventPlane(self.index, None)

    def follow(self, publisher: Any, worker: str = "w", incarnation: int = 1, **fields: Any) -> None:
        """Follow anything that has addresses."""
        addresses = {
            "events": getattr(publisher, "events", None) or publisher.address,
            "replay": getattr(publisher, "replay", None) or publisher.replay_address,
        }
        self.plane.follow(record(worker, incarnation, **{**addresses, **fields}))

    def wait_for(self, pages: set[int], worker: str = "w", timeout_s: float = 10.0) -> None:
        wait_until(lambda: self.index.held(worker) == pages, timeout_s)


@pytest.fixture
def seen() -> Iterator[Seen]:
    started = Seen()
    yield started
    started.plane.close()


@pytest.fixture
def publisher() -> Iterator[RawPublisher]:
    with RawPublisher() as started:
        yield started


# -- batches that a test writes itself -------------------------------------------------------------------


def test_what_was_published_before_is_replayed_and_the_rest_follows(
    seen: Seen, publisher: RawPublisher
) -> None:
    publisher.publish(stored(1, 2))
    seen.follow(publisher)
    seen.wait_for({1, 2})
    publisher.publish(stored(3), BlockRemoved([1], "GPU"))
    seen.wait_for({2, 3})
    publisher.publish(AllBlocksCleared())
    seen.wait_for(set())
    assert seen.plane.unsure() == []
    assert seen.plane.counters.restarts == 0


def test_lost_batches_are_replayed_even_when_nothing_follows(seen: Seen, publisher: RawPublisher) -> None:
    seen.follow(publisher)
    publisher.publish(stored(1))
    publisher.publish(stored(2), lose=True)
    publisher.publish(stored(3))
    seen.wait_for({1, 2, 3})
    publisher.publish(BlockRemoved([3], "GPU"), lose=True)
    seen.wait_for({1, 2})
    assert (seen.plane.resets, seen.plane.counters.restarts) == (0, 0)


def test_beyond_the_buffer_of_an_engine_without_snapshots_pages_are_forgotten(seen: Seen) -> None:
    with RawPublisher(keep=2) as publisher:
        seen.follow(publisher, page_hashes="foreign")
        publisher.publish(stored(1))
        wait_until(lambda: seen.plane.counters.batches == 1)
        publisher.publish(BlockRemoved([1], "GPU"), lose=True)
        publisher.publish(stored(2), lose=True)
        publisher.publish(stored(3), lose=True)
        publisher.publish(stored(4))
        wait_until(lambda: seen.plane.resets == 1)
        wait_until(lambda: seen.plane.unsure() == ["w"])
        wait_until(lambda: seen.plane.counters.batches == 3)


def test_without_a_replay_socket_a_gap_is_a_reset(seen: Seen, publisher: RawPublisher) -> None:
    seen.follow(publisher, replay="")
    publisher.publish(stored(0))
    wait_until(lambda: publisher.publish(AllBlocksCleared()) or seen.plane.counters.batches > 0)
    publisher.publish(stored(1))
    seen.wait_for({1})
    publisher.publish(BlockRemoved([1], "GPU"), lose=True)
    publisher.publish(stored(2))
    seen.wait_for({2})
    assert seen.plane.unsure() == ["w"]


def test_a_new_incarnation_starts_empty_and_a_lost_worker_is_dropped(
    seen: Seen, publisher: RawPublisher
) -> None:
    seen.follow(publisher)
    publisher.publish(stored(1, 2))
    seen.wait_for({1, 2})
    with RawPublisher() as reborn:
        seen.follow(reborn, incarnation=2)
        reborn.publish(stored(7))
        seen.wait_for({7})
        seen.plane.forget("w")
        wait_until(lambda: len(seen.index) == 0)


@pytest.mark.parametrize("page_hashes", ["baton", "foreign"])
@pytest.mark.parametrize("published", [0, 1, 3, 9])
def test_a_publisher_that_begins_anew_at_the_same_address_is_noticed(
    seen: Seen, published: int, page_hashes: str
) -> None:
    """Fewer batches than the router has seen, as many, or more: no number alone betrays it."""
    size = record().groups[0].page_size

    def block(page: int) -> BlockStored:
        return BlockStored([page], None, [page] * size, size, None, "GPU", None)

    def names(*pages: int) -> set[int]:
        if page_hashes == "baton":
            return set(pages)
        seed = namespace_seed("m")
        return {
            event_hash(page_digests(seed, array("i", [page] * size).tobytes(), size)[0]) for page in pages
        }

    with RawPublisher() as first:
        addresses = {"events": first.events, "replay": first.replay}
        seen.follow(first, page_hashes=page_hashes)
        for page in range(3):
            first.publish(block(page))
        seen.wait_for(names(0, 1, 2))
    with RawPublisher(**addresses) as second:
        others = [100 + page for page in range(published)]
        for page in others:
            second.publish(block(page), lose=True)
        seen.wait_for(names(*others))
        second.publish(block(55))
        seen.wait_for(names(55, *others))
        assert seen.plane.counters.restarts >= 1
        assert seen.plane.unsure() == []


def test_a_bad_event_costs_nothing_else(seen: Seen, publisher: RawPublisher) -> None:
    seen.follow(publisher)
    publisher.publish(raw=b"\xc1")
    publisher.publish(stored(1, medium="TAPE"), stored(2))
    publisher.publish(raw=b"\x92\x00\x92\x81\xa4type\xa1X" + b"\x81\xa4type\xb0AllBlocksCleared")
    publisher.publish(stored(3))
    seen.wait_for({3})
    assert seen.plane.bad_events == 3
    assert seen.plane.counters.bad_events == {"batch": 1, "medium": 1, "unknown_type": 1}
    publisher.pub.send_multipart([b"kv-events", b"short", b""])
    publisher.pub.send_multipart([b"kv-events"])
    publisher.publish(stored(4))
    seen.wait_for({3, 4})
    assert seen.plane.counters.bad_events["frames"] == 2


@pytest.mark.parametrize("fields", [{"events": "nonsense"}, {"replay": "nonsense"}])
def test_an_address_that_is_none_harms_nobody(
    seen: Seen, publisher: RawPublisher, fields: dict[str, str]
) -> None:
    seen.follow(publisher, "broken", **fields)
    seen.follow(publisher)
    publisher.publish(stored(1))
    seen.wait_for({1})


# -- trees --------------------------------------------------------------------------------------------------


def busy(worker: TreeWorker, rng: random.Random, turns: int) -> None:
    """Prompts with shared prefixes come, and pages go."""
    for _ in range(turns):
        if rng.random() < 0.3:
            worker.evict(rng.randrange(1, 200))
        else:
            shared = [rng.randrange(3)] * rng.randrange(0, 60)
            worker.put([*shared, *(rng.randrange(1000) for _ in range(rng.randrange(4, 40)))])


def agree(seen: Seen, workers: dict[str, TreeWorker]) -> None:
    """Within a second of the last change the index is the union of the trees."""
    trees = {name: worker.pages() for name, worker in workers.items()}
    assert any(trees.values())
    wait_until(lambda: {name: seen.index.held(name) for name in trees} == trees, SOON_S)


@contextmanager
def lossy(worker: TreeWorker, loss: float, seed: int) -> Iterator[dict[str, str]]:
    """Addresses of a worker whose live events are lost now and then."""
    with LossyProxy(worker.publisher.address, loss, seed) as proxy:
        yield {"events": proxy.address, "replay": worker.publisher.replay_address}
        assert proxy.lost or not loss


@pytest.mark.parametrize("buffer", [10_000, 4, 1])
def test_whatever_is_lost_the_index_is_the_union_of_the_trees(seen: Seen, buffer: int) -> None:
    """Three workers: one loses nothing, two lose some and much, within their buffers and beyond."""
    rng = random.Random(buffer)
    with ExitStack() as cleanup:
        workers = {name: cleanup.enter_context(TreeWorker(buffer)) for name in "abc"}
        for loss, (name, worker) in zip((0.0, 0.2, 0.9), workers.items(), strict=True):
            busy(worker, rng, 5)
            addresses = cleanup.enter_context(lossy(worker, loss, buffer))
            seen.follow(worker.publisher, name, **addresses)
        for _ in range(3):
            for worker in workers.values():
                busy(worker, rng, 30)
            agree(seen, workers)
        assert seen.plane.unsure() == []
        assert seen.plane.counters.gaps
        assert bool(seen.plane.counters.snapshots) == (buffer < 10_000)
        assert (seen.plane.resets, seen.plane.bad_events, seen.plane.counters.restarts) == (0, 0, 0)


def test_a_router_that_joins_late_knows_everything_soon(seen: Seen) -> None:
    with TreeWorker(buffer_batches=4) as worker:
        busy(worker, random.Random(1), 60)
        seen.follow(worker.publisher)
        agree(seen, {"w": worker})
        assert seen.plane.counters.snapshots == 1
        busy(worker, random.Random(2), 3)
        agree(seen, {"w": worker})
        late = Seen()
        try:
            late.follow(worker.publisher)
            agree(late, {"w": worker})
        finally:
            late.plane.close()


def test_an_overflowing_recorder_and_an_emptied_tree_are_followed(
    seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    with TreeWorker(buffer_batches=4, max_queued_events=3) as worker:
        seen.follow(worker.publisher)
        with worker.turn():
            for i in range(9):
                worker.put_silently([i] * 8)
        agree(seen, {"w": worker})
        assert caplog.text.count("not taken in time") == 1
        with worker.turn() as built:
            built.cache.tree.evict("full", 9 * 2)
            worker.put_silently([77] * 8)
        agree(seen, {"w": worker})


def test_a_worker_that_gives_no_snapshot_for_long_is_known_in_part_and_then_whole(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine is busy. Meanwhile nothing is believed that is not so."""
    for name, seconds in {"_STALLED_S": 0.1, "_GIVE_UP_S": 0.3, "_SNAPSHOT_EVERY_S": 0.3}.items():
        monkeypatch.setattr(event_feed, name, seconds)
    with TreeWorker(buffer_batches=4) as worker, lossy(worker, 0.5, 1) as addresses:
        worker.deaf = True
        for i in range(10):
            worker.put([i] * 8)
        seen.follow(worker.publisher, **addresses)

        def known_in_part() -> bool:
            worker.put([random.randrange(1000)] * 8)
            return seen.plane.resets > 0 and bool(seen.index.held("w"))

        wait_until(known_in_part)
        assert seen.index.held("w") < worker.pages()
        assert seen.plane.unsure() == ["w"]
        worker.deaf = False
        wait_until(lambda: seen.plane.unsure() == [] and seen.index.held("w") == worker.pages())


class WorkerProcess:
    """A TreeWorker in a process of its own."""

    def __init__(self, buffer_batches: int) -> None:
        command = [sys.executable, "-m", "tests.support.tree_worker", str(buffer_batches)]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.addresses: dict[str, str] = self._hear()

    def do(self, **command: Any) -> set[int]:
        """The pages of its tree afterwards."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return set(self._hear())

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def test_a_worker_that_is_killed_and_started_again_loses_its_old_pages_at_once(seen: Seen) -> None:
    first, second = WorkerProcess(4), WorkerProcess(4)
    try:
        seen.plane.follow(record("w", 1, **first.addresses))
        for i in range(8):
            held = first.do(put=[i] * 20)
        seen.wait_for(held, timeout_s=SOON_S)
        assert len(held) == 40
        first.kill()
        for i in range(8):
            second.do(put=[100 + i] * 12)
        held = second.do(evict=30)
        seen.plane.follow(record("w", 2, **second.addresses))
        seen.wait_for(held, timeout_s=SOON_S)
        assert held
        assert seen.plane.unsure() == []
        second.kill()
        seen.plane.forget("w")
        wait_until(lambda: len(seen.index) == 0, SOON_S)
    finally:
        first.kill() if first._process.returncode is None else None
        second.kill() if second._process.returncode is None else None
