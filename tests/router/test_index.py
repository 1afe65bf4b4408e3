from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from router.event_plane import EventPlane
from router.index import GlobalIndex, as_hashes
from router.sequence import SequenceRepair
from tests.router.conftest import wait_until
from tests.router.test_directory import record
from wire.events import AllBlocksCleared, AnyEvent, BlockRemoved, BlockStored, encode_batch


def stored(*hashes: int, medium: str | None = "GPU") -> BlockStored:
    return BlockStored(list(hashes), None, [0] * len(hashes), 1, None, medium, None)


def find(index: GlobalIndex, walk: list[int]) -> dict[str, int]:
    """Pages that each worker holds; workers with none are absent."""
    pages = index.find(as_hashes(walk)).pages
    return {name: int(count) for name, count in zip(index.names(), pages, strict=True) if name and count}


def test_a_match_is_the_number_of_leading_pages() -> None:
    index = GlobalIndex()
    for name, pages in {"a": [1, 2, 3], "b": [1, 2], "c": [2, 3]}.items():
        index.join(name)
        index.store(name, pages, "GPU")
    index.join("d")
    assert find(index, [1, 2, 3, 4]) == {"a": 3, "b": 2}
    assert find(index, [1, 2]) == {"a": 2, "b": 2}
    assert find(index, [9]) == {}
    assert find(index, []) == {}


def test_a_page_in_any_tier_counts_until_it_has_left_all() -> None:
    index = GlobalIndex()
    index.join("a")
    index.store("a", [1], "GPU")
    index.store("a", [1], "CPU_PINNED")
    index.remove("a", [1], "gpu")
    assert find(index, [1]) == {"a": 1}
    index.remove("a", [1], "CPU")
    assert find(index, [1]) == {}
    assert len(index) == 0
    with pytest.raises(ValueError, match="medium"):
        index.store("a", [1], "TAPE")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["store", "remove", "clear", "drop"]), st.sampled_from("abc"), st.integers(0, 5)
        ),
        max_size=60,
    )
)
def test_it_equals_a_set_per_worker(operations: list[tuple[str, str, int]]) -> None:
    index, truth = GlobalIndex(), {name: set[int]() for name in "abc"}
    for name in truth:
        index.join(name)
    for what, name, page in operations:
        if what == "store":
            index.store(name, [page], None)
            truth[name].add(page)
        elif what == "remove":
            index.remove(name, [page], None)
            truth[name].discard(page)
        else:
            if what == "drop":
                index.drop(name)
                index.join(name)
            else:
                index.clear(name)
            truth[name].clear()
        assert {worker: index.held(worker) for worker in truth} == truth
    walk = [0, 1, 2, 3]
    expected = {}
    for name, pages in truth.items():
        depth = next((i for i, page in enumerate(walk) if page not in pages), len(walk))
        if depth:
            expected[name] = depth
    assert find(index, walk) == expected


def test_batches_come_out_in_order_once() -> None:
    repair = SequenceRepair()
    assert repair.live(0, b"0") == [b"0"]
    assert repair.live(0, b"0") == []
    assert repair.live(2, b"2") == []
    gaps = [repair.gap]
    assert repair.replayed(1, b"1") == ([b"1", b"2"], False)
    assert [*gaps, repair.gap] == [True, False]
    assert repair.replayed(5, b"5") == ([b"5"], True)
    assert repair.expected == 6


class Publisher:
    """An independent publisher: PUB and replay ROUTER, with batches it can forget to send."""

    def __init__(self, keep: int = 1000) -> None:
        self._context = zmq.Context()
        self.pub = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        self.events = self._bind(self.pub)
        self.replay = self._bind(self._router)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=keep)
        self._number = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def publish(self, *events: AnyEvent, lose: bool = False, raw: bytes | None = None) -> None:
        payload = raw if raw is not None else encode_batch(0.0, list(events))
        self._kept.append((self._number, payload))
        if not lose:
            self.pub.send_multipart([b"kv-events", self._number.to_bytes(8, "big"), payload])
        self._number += 1

    def close(self) -> None:
        self._closing.set()
        self._thread.join(5)
        self._context.destroy(linger=0)

    def _bind(self, socket: zmq.Socket[bytes]) -> str:
        socket.bind("tcp://127.0.0.1:*")
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _serve(self) -> None:
        while not self._closing.is_set():
            if not self._router.poll(20):
                continue
            identity, empty, start = self._router.recv_multipart()
            for number, payload in list(self._kept):
                if number >= int.from_bytes(start, "big"):
                    frames = [identity, empty, b"kv-events", number.to_bytes(8, "big"), payload]
                    self._router.send_multipart(frames)
            end = (-1).to_bytes(8, "big", signed=True)
            self._router.send_multipart([identity, empty, b"", end, b""])


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    started = Publisher()
    yield started
    started.close()


@pytest.fixture
def plane() -> Iterator[EventPlane]:
    started = EventPlane(GlobalIndex(), None)
    yield started
    started.close()


def follow(plane: EventPlane, publisher: Publisher, incarnation: int = 1) -> GlobalIndex:
    plane.follow(record("w", incarnation, events=publisher.events, replay=publisher.replay))
    return plane._index


def test_what_was_published_before_is_replayed_and_the_rest_follows(
    plane: EventPlane, publisher: Publisher
) -> None:
    publisher.publish(stored(1, 2))
    index = follow(plane, publisher)
    wait_until(lambda: index.held("w") == {1, 2})
    publisher.publish(stored(3), BlockRemoved([1], "GPU"))
    wait_until(lambda: index.held("w") == {2, 3})
    publisher.publish(AllBlocksCleared())
    wait_until(lambda: index.held("w") == set())


def test_lost_batches_are_replayed_even_when_nothing_follows(plane: EventPlane, publisher: Publisher) -> None:
    index = follow(plane, publisher)
    publisher.publish(stored(1))
    publisher.publish(stored(2), lose=True)
    publisher.publish(stored(3))
    wait_until(lambda: index.held("w") == {1, 2, 3})
    publisher.publish(BlockRemoved([3], "GPU"), lose=True)
    wait_until(lambda: index.held("w") == {1, 2}, 3.0)


def test_beyond_the_replay_buffer_old_pages_are_forgotten(plane: EventPlane) -> None:
    publisher = Publisher(keep=2)
    index = follow(plane, publisher)
    publisher.publish(stored(1))
    wait_until(lambda: index.held("w") == {1})
    publisher.publish(BlockRemoved([1], "GPU"), lose=True)
    publisher.publish(stored(2), lose=True)
    publisher.publish(stored(3), lose=True)
    publisher.publish(stored(4))
    wait_until(lambda: index.held("w") == {3, 4})
    assert plane.resets == 1
    publisher.close()


def test_a_new_incarnation_starts_empty_and_a_lost_worker_is_dropped(
    plane: EventPlane, publisher: Publisher
) -> None:
    index = follow(plane, publisher)
    publisher.publish(stored(1, 2))
    wait_until(lambda: index.held("w") == {1, 2})
    reborn = Publisher()
    follow(plane, reborn, incarnation=2)
    reborn.publish(stored(7))
    wait_until(lambda: index.held("w") == {7})
    plane.forget("w")
    wait_until(lambda: len(index) == 0)
    reborn.close()


def test_a_bad_event_costs_nothing_else(plane: EventPlane, publisher: Publisher) -> None:
    index = follow(plane, publisher)
    publisher.publish(raw=b"\xc1")
    publisher.publish(stored(1, medium="TAPE"), stored(2))
    wait_until(lambda: index.held("w") == {2})
    assert plane.bad_events == 2
