"""The event plane against publishers: what the index says must be what the workers' trees hold, soon."""

from __future__ import annotations

import errno
import json
import random
import secrets
import subprocess
import sys
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from common.secrets import open_secret
from kvcache.tenancy.config import TenancyConfig
from router.events import feed as event_feed
from router.events.connection import PublisherConnection
from router.events.event_plane import EventPlane
from router.index.global_index import GlobalIndex
from router.placement.fleet import Fleet
from tests.router.conftest import ROOT, wait_until
from tests.router.directory.test_directory import record
from tests.support.kv_events_reader import Pages, Replay
from tests.support.raw_publisher import LossyProxy, RawPublisher
from tests.support.tree_worker import TreeWorker
from wire import sockets as wire_sockets
from wire.events import AllBlocksCleared, BlockRemoved, BlockStored
from wire.page_hash import event_hash, event_hashes, namespace_seed, owned_digests, page_digests

SOON_S = 1.0
SHARING = TenancyConfig(2, secret=b"s")


def stored(*hashes: int, medium: str | None = "GPU") -> BlockStored:
    return BlockStored(list(hashes), None, [0] * len(hashes), 1, None, medium, None)


class Seen:
    """A plane and its index."""

    def __init__(self) -> None:
        self.index = GlobalIndex()
        self.plane = EventPlane(self.index, None)

    def follow(self, publisher: Any, worker: str = "w", incarnation: int = 1, **fields: Any) -> None:
        """Follow a publisher, or all streams of a worker."""
        addresses = (
            {"events": publisher.events, "replay": publisher.replay}
            if isinstance(publisher, RawPublisher)
            else publisher.addresses
        )
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
    wait_until(lambda: seen.plane.unsure() == [])
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


def test_workers_without_events_give_their_slots_back(seen: Seen) -> None:
    fleet = Fleet(seen.index)
    for incarnation in range(1, 6):
        gone = record(f"w{incarnation}", incarnation)
        fleet.update([gone], 0.0)
        seen.plane.follow(gone)
        fleet.update([], 0.0)
        seen.plane.forget(gone.id)
        wait_until(lambda: not any(seen.index.names()))
    assert seen.index.slots == 1


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
        wait_until(lambda: seen.plane.unsure() == [])


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
    wait_until(lambda: seen.plane.unsure() == ["broken"])  # the replay may end after the live batch


# -- sockets that fail --------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stalled replays are abandoned, and failed sockets opened again, at once."""
    for name, seconds in {"_STALLED_S": 0.05, "_OPEN_AGAIN_S": 0.01, "_OPEN_AGAIN_AT_MOST_S": 0.05}.items():
        monkeypatch.setattr(event_feed, name, seconds)


@pytest.mark.usefixtures("impatient")
def test_when_sockets_run_out_all_are_followed_as_soon_as_there_are_some(
    publisher: RawPublisher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No replay is answered, so all replace a socket, and a closed one is freed a little later. For the last
    worker there is none."""
    names = [f"w{i}" for i in range(12)]
    monkeypatch.setattr(wire_sockets, "_MOST_SOCKETS", 2 + 2 * (len(names) - 1))
    seen = Seen()
    try:
        publisher.deaf = True
        publisher.publish(stored(1))
        for name in names:
            seen.follow(publisher, name)
        wait_until(lambda: "w11: its events cannot be followed now: Too many open files" in caplog.text)
        wait_until(lambda: publisher.asked > 4 * len(names))
        assert seen.plane.unsure() == names
        publisher.deaf = False
        seen.plane.forget("w0")
        for name in names[1:]:
            seen.wait_for({1}, name)
        wait_until(lambda: seen.plane.unsure() == [])
        assert caplog.text.count("w11: its events cannot be followed") == 1
    finally:
        seen.plane.close()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("step", ["request", "lost", "live", "replay"])
def test_a_socket_that_fails_costs_its_stream_a_new_beginning(
    seen: Seen, publisher: RawPublisher, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    seen.follow(publisher)
    publisher.publish(stored(1))
    seen.wait_for({1})
    failures, real = [zmq.ZMQError(errno.EMFILE)], getattr(PublisherConnection, step)

    def fail_once(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return real(*arguments)

    monkeypatch.setattr(PublisherConnection, step, fail_once)
    publisher.publish(stored(2))
    wait_until(lambda: not failures)
    seen.wait_for({1, 2})
    wait_until(lambda: seen.plane.unsure() == [])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_has_ended_blocks_nobody(
    seen: Seen, publisher: RawPublisher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(event_feed.Feed, "tick", fail)
    seen.follow(publisher)
    wait_until(lambda: "the index is no longer updated" in caplog.text)
    told = threading.Thread(target=lambda: [seen.plane.forget("x") for _ in range(5000)], daemon=True)
    told.start()
    told.join(timeout=10.0)
    assert not told.is_alive()


# -- trees --------------------------------------------------------------------------------------------------


TENANTS = ("", "", "ada", "bob", "eve")


def busy(worker: TreeWorker, rng: random.Random, turns: int, tenants: Sequence[str] = TENANTS) -> None:
    """Prompts with shared prefixes come, and pages go and become public."""
    for _ in range(turns):
        what = rng.random()
        if what < 0.25:
            worker.evict(rng.randrange(1, 200))
        elif what < 0.35 and worker.memory.promotion is not None:
            with worker.turn() as built:
                assert built.promotion is not None
                built.promotion.end_epoch()
        else:
            shared = [rng.randrange(3)] * rng.randrange(0, 60)
            own = [rng.randrange(1000) for _ in range(rng.randrange(4, 40))]
            worker.put([*shared, *own], rng.choice(tenants))


def agree(seen: Seen, workers: dict[str, TreeWorker]) -> None:
    """Within a second of the last change the index is the union of the trees."""
    trees = {name: worker.pages() for name, worker in workers.items()}
    assert any(trees.values())
    wait_until(lambda: {name: seen.index.held(name) for name in trees} == trees, SOON_S)


@contextmanager
def lossy(worker: TreeWorker, loss: float, seed: int) -> Iterator[dict[str, str]]:
    """Addresses of a worker whose live events are lost now and then."""
    with (
        LossyProxy(worker.addresses["events"], loss, seed) as public,
        LossyProxy(worker.addresses["private_events"], loss, seed + 1) as private,
    ):
        yield {**worker.addresses, "events": public.address, "private_events": private.address}
        assert public.lost or not loss


@pytest.mark.parametrize("buffer", [10_000, 4, 1])
def test_whatever_is_lost_the_index_is_the_union_of_the_trees(seen: Seen, buffer: int) -> None:
    """Three workers: one loses nothing, two lose some and much, within their buffers and beyond."""
    rng = random.Random(buffer)
    with ExitStack() as cleanup:
        workers = {name: cleanup.enter_context(TreeWorker(buffer, tenancy=SHARING)) for name in "abc"}
        for loss, (name, worker) in zip((0.0, 0.2, 0.9), workers.items(), strict=True):
            busy(worker, rng, 5)
            addresses = cleanup.enter_context(lossy(worker, loss, buffer))
            seen.follow(worker, name, **addresses)
        for _ in range(3):
            for worker in workers.values():
                busy(worker, rng, 30)
            agree(seen, workers)
        wait_until(lambda: seen.plane.unsure() == [])
        assert seen.plane.counters.gaps
        assert bool(seen.plane.counters.snapshots) == (buffer < 10_000)
        assert (seen.plane.resets, seen.plane.bad_events, seen.plane.counters.restarts) == (0, 0, 0)


def test_a_router_that_joins_late_knows_everything_soon(seen: Seen) -> None:
    with TreeWorker(buffer_batches=4) as worker:
        busy(worker, random.Random(1), 60)
        seen.follow(worker)
        agree(seen, {"w": worker})
        assert seen.plane.counters.snapshots == 2, "one of each stream"
        busy(worker, random.Random(2), 3)
        agree(seen, {"w": worker})
        late = Seen()
        try:
            late.follow(worker)
            agree(late, {"w": worker})
        finally:
            late.plane.close()


def test_an_overflowing_recorder_and_an_emptied_tree_are_followed(
    seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    with TreeWorker(buffer_batches=4, max_queued_events=3) as worker:
        seen.follow(worker)
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
        seen.follow(worker, **addresses)

        def known_in_part() -> bool:
            worker.put([random.randrange(1000)] * 8)
            return seen.plane.resets > 0 and bool(seen.index.held("w"))

        wait_until(known_in_part)
        assert seen.index.held("w") < worker.pages()
        assert seen.plane.unsure() == ["w"]
        worker.deaf = False
        wait_until(lambda: seen.plane.unsure() == [] and seen.index.held("w") == worker.pages())


@pytest.mark.parametrize("lost", ["events", "private_events"])
@pytest.mark.parametrize("buffer", [10_000, 2], ids=["replay", "snapshot"])
def test_a_promotion_while_one_stream_has_a_gap(seen: Seen, lost: str, buffer: int) -> None:
    """What is removed from one stream is stored on the other. Neither waits for the other, and in the end
    each page is known under the name that it has."""
    with (
        TreeWorker(buffer, tenancy=TenancyConfig(2, secret=b"s")) as worker,
        LossyProxy(worker.addresses[lost], 0.0, 1) as proxy,
    ):
        seen.follow(worker, **{lost: proxy.address})
        tenants = ("ada", "bob", "eve", "joe")
        for tenant in tenants:
            worker.put([1] * 16, tenant)
        worker.put([2] * 8, "ada")
        agree(seen, {"w": worker})
        assert not worker.public_pages()
        proxy.loss = 1.0
        with worker.turn() as built:
            assert built.promotion is not None
            built.promotion.end_epoch()
        worker.put([*[1] * 16, *[3] * 8], "ada")
        for i in range(4):
            worker.put([10 + i] * 4, "ada")
            worker.put([10 + i] * 4)
        wait_until(lambda: proxy.lost > 0)
        proxy.loss = 0.0
        assert len(worker.public_pages()) == 4 + 4
        assert worker.private_pages()
        agree(seen, {"w": worker})
        wait_until(lambda: seen.plane.unsure() == [])
        assert (seen.plane.resets, seen.plane.counters.restarts) == (0, 0)


def test_a_stream_that_is_lost_for_good_costs_the_other_nothing(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages are forgotten, and the worker is known in part, while the other stream's pages stay."""
    for name, seconds in {"_STALLED_S": 0.1, "_GIVE_UP_S": 0.3, "_SNAPSHOT_EVERY_S": 0.3}.items():
        monkeypatch.setattr(event_feed, name, seconds)
    with (
        TreeWorker(buffer_batches=2) as worker,
        LossyProxy(worker.addresses["private_events"], 0, 1) as proxy,
    ):
        seen.follow(worker, private_events=proxy.address)
        worker.put([1] * 8)
        worker.put([1] * 8, "ada")
        agree(seen, {"w": worker})
        worker.deaf, proxy.loss = True, 1.0
        for i in range(4):
            worker.put([50 + i] * 8, "ada")
        proxy.loss = 0.0

        def forgotten() -> bool:
            worker.put([random.randrange(1000)] * 8, "ada")
            return seen.plane.resets > 0

        wait_until(forgotten)
        assert worker.public_pages() <= seen.index.held("w")
        assert seen.plane.unsure() == ["w"]
        worker.deaf = False
        wait_until(lambda: seen.plane.unsure() == [] and seen.index.held("w") == worker.pages())


def test_a_new_secret_gives_private_pages_new_names(seen: Seen, tmp_path: Path) -> None:
    first, second = secrets.token_hex(16), secrets.token_hex(16)
    file = tmp_path / "secret"
    file.write_text(first)
    file.chmod(0o600)
    secret = open_secret(file)
    with TreeWorker(secret=secret) as worker:
        seen.follow(worker)
        worker.put([1] * 8)
        worker.put([1] * 8, "ada")
        agree(seen, {"w": worker})
        before = worker.private_pages()
        digests = page_digests(namespace_seed("model"), array("i", [1] * 8).tobytes(), 4)
        assert before == set(event_hashes(owned_digests(digests, "ada", first.encode())))
        file.write_text(f"{second}\n{first}")
        wait_until(lambda: secret is not None and secret.accepted[0] == second.encode())
        worker.evict(0)  # a turn
        assert not before & worker.private_pages()
        agree(seen, {"w": worker})
        worker.evict(16)
        wait_until(lambda: seen.index.held("w") == set())


# -- what others may read -----------------------------------------------------------------------------------


@pytest.mark.parametrize("buffer", [10_000, 3], ids=["replay", "snapshot"])
def test_the_public_stream_alone_tells_of_every_public_page_and_of_no_private_one(buffer: int) -> None:
    """Read by a decoder of its own, which follows the chain of tokens: an orphan and a private name are
    errors."""
    rng, seen_private = random.Random(buffer), False
    with (
        TreeWorker(buffer, tenancy=TenancyConfig(2, secret=b"s")) as worker,
        Replay(worker.addresses["replay"]) as public,
        Replay(worker.addresses["private_replay"]) as private,
    ):
        reader, first = Pages("model"), 0
        for _ in range(15):
            busy(worker, rng, 4)
            batches = public.ask(first)
            first = min(batches, default=first)
            reader.apply(batches, first)
            first += len(batches)
            assert set(reader.held) == worker.public_pages()
            told = b"".join(private.ask(0).values())
            nodes = list(worker.memory.cache.tree.nodes())
            below = [node for node in nodes if node.tenant and node.parent.parent and not node.parent.tenant]
            seen_private = seen_private or bool(below)
            assert not any(name.encode() in told for name in TENANTS if name)
            assert not any(node.tokens[:16] in told for node in nodes)
        assert seen_private, "a private page below a public one"
        assert reader.held


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
            held = first.do(put=[i] * 20, tenant="ada" if i % 2 else "")
        seen.wait_for(held, timeout_s=SOON_S)
        assert len(held) == 40
        first.kill()
        for i in range(8):
            second.do(put=[100 + i] * 12, tenant="" if i % 2 else "ada")
        held = second.do(evict=30)
        seen.plane.follow(record("w", 2, **second.addresses))
        seen.wait_for(held, timeout_s=SOON_S)
        assert held
        wait_until(lambda: seen.plane.unsure() == [])
        second.kill()
        seen.plane.forget("w")
        wait_until(lambda: len(seen.index) == 0, SOON_S)
    finally:
        first.kill() if first._process.returncode is None else None
        second.kill() if second._process.returncode is None else None
