"""KVSender and KVReceiver: chunks, epochs, failures, without and with real transports."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import PageDiffers, TransferError
from common.host import host_identity
from kvcache.page_runs import PageIds, as_pages
from kvtransfer.pages import PageWrite
from kvtransfer.receiver import KVReceiver
from kvtransfer.select import open_sender
from kvtransfer.sender import KVSender, SenderThreads, Sent
from tests.kvtransfer.peers import SHORT, gpu_for, permuted, pool, pools, receiving, receiving_groups
from wire.checksums import ChecksumMode, PageChecksums
from wire.messages.transfer import GroupTarget, KVDone, TransferEndpoint

SIZE = 4  # tokens a page
NOWHERE = TransferEndpoint("recorder", "")


class Recorder:
    """A SenderTransport that records writes. `gate` holds every write back, `failure` fails it."""

    def __init__(self) -> None:
        self.writes: list[PageWrite] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.failure: str | None = None

    def write(self, endpoint: TransferEndpoint, write: PageWrite) -> int:
        self.entered.set()
        assert self.gate.wait(10)
        if self.failure is not None:
            raise TransferError(self.failure)
        self.writes.append(write)
        return 10 * len(write)

    def suspend(self, endpoint: TransferEndpoint) -> None: ...

    def resume(self, endpoint: TransferEndpoint) -> None: ...

    def drain(self, endpoint: TransferEndpoint) -> None: ...

    def close(self) -> None: ...


@contextmanager
def sending(transport: Recorder, threads: int = 2) -> Iterator[tuple[SenderThreads, queue.SimpleQueue[Sent]]]:
    sent: queue.SimpleQueue[Sent] = queue.SimpleQueue()
    senders = SenderThreads(transport, {}, sent.put, threads=threads)
    try:
        yield senders, sent
    finally:
        transport.gate.set()
        senders.close()


def source(pages: int) -> PageIds:
    """`pages` pages of the sender's pool; never the scratch page."""
    return np.arange(1, 1 + pages)


def target(first_page: int, tokens: int, at: int = 100) -> dict[str, GroupTarget]:
    pages = -(-tokens // SIZE) - first_page
    return {"full": GroupTarget(first_page, list(range(at, at + pages)))}


@settings(max_examples=60)
@given(st.integers(1, 60), st.lists(st.integers(1, 59), max_size=8), st.data())
def test_every_page_goes_once_in_order_and_the_partial_one_last(
    tokens: int, chunk_ends: list[int], data: st.DataObject
) -> None:
    pages = -(-tokens // SIZE)
    first = data.draw(st.integers(0, pages - 1), label="pages that decode has already")
    ends = sorted(end for end in chunk_ends if end < tokens)
    mine = np.arange(1000, 1000 + pages)
    transport = Recorder()
    with sending(transport) as (senders, sent):
        sender = KVSender(senders, 7, 2, SIZE, NOWHERE, target(first, tokens))
        assert sender.start_send_idx == first * SIZE
        for end in ends:
            sender.send({"full": mine[: -(-end // SIZE)]}, end)
            assert sender.start_send_idx == max(first, end // SIZE) * SIZE
        sender.send({"full": mine}, tokens, last=True)
        over = sent.get(timeout=10)
    assert (over.room, over.epoch, over.error, over.kv_bytes) == (7, 2, None, 10 * (pages - first))
    src = np.concatenate([write.src_pages for write in transport.writes])
    dst = np.concatenate([write.dst_pages for write in transport.writes])
    assert src.tolist() == mine[first:].tolist()
    assert dst.tolist() == list(range(100, 100 + pages - first))
    if tokens % SIZE:
        assert all(mine[-1] not in write.src_pages for write in transport.writes[:-1])
    assert sent.empty()


def test_what_is_sent_is_what_was_given_whatever_becomes_of_the_array() -> None:
    transport = Recorder()
    transport.gate.clear()
    with sending(transport) as (senders, sent):
        sender, pages = KVSender(senders, 1, 0, SIZE, NOWHERE, target(0, 8)), source(2)
        sender.send({"full": pages}, 8, last=True)
        pages[:] = 99
        transport.gate.set()
        assert sent.get(timeout=10).error is None
    assert transport.writes[0].src_pages.tolist() == [1, 2]


def test_a_target_that_does_not_fit_the_prompt_fails_the_room() -> None:
    transport = Recorder()
    with sending(transport) as (senders, sent):
        sender = KVSender(senders, 1, 0, SIZE, NOWHERE, target(0, 8))
        sender.send({"full": source(3)}, 12, last=True)
        assert "the target ends at page 2 of group full, which has 3" in (sent.get(timeout=10).error or "")


GROUPS = {"full": GroupTarget(1, [11, 12]), "window": GroupTarget(2, [31]), "state": GroupTarget(0, [7])}


def test_other_groups_leave_whole_after_the_last_chunk() -> None:
    transport = Recorder()
    with sending(transport) as (senders, sent):
        sender = KVSender(senders, 1, 0, SIZE, NOWHERE, GROUPS)
        assert sender.start_send_idx == SIZE, "what the primary group lacks counts, whatever the others do"
        sender.send({"full": source(2)}, 8)
        tails = {"window": as_pages([0, 0, 5]), "state": as_pages([9])}
        sender.send({"full": source(3), **tails}, 12, last=True)
        assert sent.get(timeout=10) == Sent(1, 0, 40)
    moved = [(w.group, w.src_pages.tolist(), w.dst_pages.tolist()) for w in transport.writes]
    assert moved == [
        ("full", [2], [11]),
        ("full", [3], [12]),
        ("window", [5], [31]),
        ("state", [9], [7]),
    ]


def test_a_primary_group_without_bytes_is_not_sent() -> None:
    transport = Recorder()
    with sending(transport) as (senders, sent):
        sender = KVSender(senders, 1, 0, SIZE, NOWHERE, {"window": GROUPS["window"]})
        sender.send({"full": source(2)}, 8)
        sender.send({"full": source(3), "window": as_pages([0, 0, 5])}, 12, last=True)
        assert sent.get(timeout=10) == Sent(1, 0, 10)
    assert [write.group for write in transport.writes] == ["window"]


@pytest.mark.parametrize(
    ("tails", "says"),
    [
        ({"window": [0, 0, 5]}, "ends at page 1 of group state, which has 0"),
        ({"window": [0, 0, 5, 6], "state": [9]}, "ends at page 3 of group window, which has 4"),
        ({"window": [4, 5, 0], "state": [9]}, "does not hold pages 2 to 3 of group window"),
        ({"window": [4, 5, 6], "state": [0]}, "does not hold pages 0 to 1 of group state"),
    ],
)
def test_a_target_that_wants_what_is_not_there_fails_the_room(tails: dict[str, list[int]], says: str) -> None:
    transport = Recorder()
    with sending(transport) as (senders, sent):
        sender = KVSender(senders, 1, 0, SIZE, NOWHERE, GROUPS)
        mine = {group: as_pages(pages) for group, pages in tails.items()}
        sender.send({"full": source(3), **mine}, 12, last=True)
        assert says in (sent.get(timeout=10).error or "")
    assert not transport.writes
    assert sent.empty()


def test_abort_waits_for_the_write_in_progress_and_reports_once() -> None:
    transport = Recorder()
    transport.gate.clear()
    with sending(transport) as (senders, sent):
        sender = KVSender(senders, 1, 0, SIZE, NOWHERE, target(0, 12))
        sender.send({"full": source(1)}, 4)
        sender.send({"full": source(2)}, 8)
        assert transport.entered.wait(10)
        sender.abort("the client left")
        assert sent.empty(), "its pages are still being read"
        transport.gate.set()
        over = sent.get(timeout=10)
        sender.abort("again")
        sender.send({"full": source(3)}, 12, last=True)
    assert over.error == "the client left"
    assert len(transport.writes) == 1
    assert sent.empty()


def test_abort_before_the_first_chunk_reports_too() -> None:
    transport = Recorder()
    with sending(transport) as (senders, sent):
        sender = KVSender(senders, 1, 0, SIZE, NOWHERE, target(0, 4))
        sender.abort("the client left")
        ended = sent.get(timeout=10)
        assert (ended.error, ended.aborted) == ("the client left", True)
        sender.send({"full": source(1)}, 4, last=True)
    assert not transport.writes
    assert sent.empty()


def test_a_failed_write_ends_the_room_and_not_its_neighbour() -> None:
    transport = Recorder()
    with sending(transport, threads=1) as (senders, sent):
        transport.failure = "the wire broke"
        rooms = [KVSender(senders, room, 0, SIZE, NOWHERE, target(0, 8)) for room in (1, 2)]
        rooms[0].send({"full": source(1)}, 4)
        ended = sent.get(timeout=10)
        assert (ended.error, ended.aborted) == ("the wire broke", False)
        transport.failure = None
        rooms[0].send({"full": source(2)}, 8, last=True)
        rooms[1].send({"full": source(2)}, 8, last=True)
        assert sent.get(timeout=10) == Sent(2, 0, 20)
    assert sent.empty()


def test_rooms_take_turns() -> None:
    transport = Recorder()
    transport.gate.clear()
    with sending(transport, threads=1) as (senders, sent):
        one, two = (KVSender(senders, room, 0, SIZE, NOWHERE, target(0, 12)) for room in (1, 2))
        for end in (4, 8, 12):
            one.send({"full": source(3)}, end, last=end == 12)
        two.send({"full": source(3)}, 12, last=True)
        transport.gate.set()
        assert [sent.get(timeout=10).room for _ in range(2)] == [2, 1]


@pytest.mark.parametrize("staged", [False, True], ids=["in place", "staged"])
@pytest.mark.parametrize("backend", ["cuda_ipc", "shm", "tcp", "mooncake"])
def test_a_hand_off_end_to_end(backend: str, staged: bool) -> None:
    """Two senders to one receiver; checksums; a new epoch on new pages."""
    tokens, page_bytes = 30, 4096
    pages = -(-tokens // SIZE)
    with receiving(backend, 40, page_bytes, staged=staged and backend != "shm") as (receiver, data):
        outs = []
        for seed in (1, 2):
            regions = {"full": pool(20, page_bytes, seed, staged=staged, memory=gpu_for(backend))}
            sent: queue.SimpleQueue[Sent] = queue.SimpleQueue()
            transport = open_sender(regions, host_identity(), backend, bounds=SHORT)
            outs.append((regions, transport, SenderThreads(transport, regions, sent.put), sent))
        for room, (regions, _, senders, sent) in enumerate(outs):
            for epoch in (0, 1):
                ids = (np.arange(pages) * 2 + 1 + room) + epoch * 20
                kv = KVReceiver(receiver, room, epoch, tokens, {"full": GroupTarget(0, ids.tolist())})
                sender = KVSender(
                    senders,
                    room,
                    epoch,
                    SIZE,
                    receiver.endpoints[0],
                    {"full": GroupTarget(0, ids.tolist())},
                    checks=ChecksumMode.ALL,
                )
                mine = permuted(np.random.default_rng(room), 20, pages)
                sender.send({"full": mine}, 13)
                if epoch == 0:
                    sender.abort("restarted")
                    assert sent.get(timeout=10).error == "restarted"
                    assert kv.abort().wait(5)
                    continue
                sender.send({"full": mine}, tokens, last=True)
                over = sent.get(timeout=10)
                assert over.error is None
                done = KVDone(room, epoch, tokens, 5, over.kv_bytes, checksums=over.checksums)
                assert kv.commit(done, ChecksumMode.ALL) == pages * page_bytes
                assert kv.commit(done) == pages * page_bytes, "a repeat is answered alike"
                assert kv.landed.backend == backend
                assert torch.equal(data[torch.from_numpy(ids)], regions["full"].tensor[mine])
        for _, transport, senders, _ in outs:
            senders.close()
            transport.close()


SHAPES = {"full": (40, 4096), "window": (20, 192), "state": (5, (1 << 20) + 64)}
"""Pages of keys and values, or of latents: kvtransfer does not know what the bytes mean."""


def test_pages_of_both_tiers_leave_in_order() -> None:
    transport = Recorder()
    with sending(transport) as (senders, sent):
        sender = KVSender(senders, 1, 0, SIZE, NOWHERE, {**target(0, 20), "state": GroupTarget(0, [7])})
        pages = {"full": as_pages([1, 2, 0, 0, 5]), "state": as_pages([0])}
        below = {"full": as_pages([0, 9, 7, 8, 0]), "state": as_pages([3])}
        sender.send(pages, 20, last=True, on_host=below)
        assert sent.get(timeout=10).error is None
    moved = [(w.group, w.on_host, w.src_pages.tolist(), w.dst_pages.tolist()) for w in transport.writes]
    assert moved == [
        ("full", False, [1, 2], [100, 101]),
        ("full", True, [7, 8], [102, 103]),
        ("full", False, [5], [104]),
        ("state", True, [3], [7]),
    ]


def test_a_page_on_neither_tier_fails_the_room() -> None:
    transport, told = Recorder(), []
    with sending(transport) as (senders, sent):
        sender = KVSender(senders, 1, 0, SIZE, NOWHERE, target(0, 8))
        sender.send({"full": as_pages([1, 0])}, 8, on_host={"full": as_pages([0, 0])}, on_read=told.append)
        assert "does not hold pages 0 to 2 of group full" in (sent.get(timeout=10).error or "")
    assert told == [False]


def test_who_lends_pages_is_told_once_that_they_are_not_read_any_more() -> None:
    transport = Recorder()
    transport.gate.clear()
    with sending(transport) as (senders, sent):
        sender = KVSender(senders, 1, 0, SIZE, NOWHERE, target(0, 16))
        told: list[tuple[int, bool]] = []

        def lend(number: int, end: int, last: bool = False) -> None:
            sender.send({"full": source(4)}, end, last, on_read=lambda landed: told.append((number, landed)))

        lend(1, 4)
        lend(2, 4)  # nothing new
        assert told == [(2, True)]
        assert transport.entered.wait(10)
        lend(3, 8)
        sender.abort("not wanted")
        assert told == [(2, True), (3, False)], "what is being written is not over"
        lend(4, 12)
        assert told[2:] == [(4, False)]
        transport.gate.set()
        assert sent.get(timeout=10).error == "not wanted"
        assert told[3:] == [(1, False)]
        lend(5, 16, last=True)
        assert told[4:] == [(5, False)]
        other = KVSender(senders, 2, 0, SIZE, NOWHERE, target(0, 16))
        other.send({"full": source(4)}, 16, last=True, on_read=lambda landed: told.append((6, landed)))
        assert sent.get(timeout=10).error is None
        assert told[5:] == [(6, True)]
        assert sum(len(write) for write in transport.writes) == 5


@pytest.mark.parametrize("backend", ["shm", "tcp", "mooncake"])
def test_a_hand_off_from_both_tiers(backend: str) -> None:
    tokens = 32
    with receiving_groups(backend, SHAPES) as (receiver, theirs):
        regions, arenas = pools(SHAPES, seed=3), pools({g: (60, size) for g, (_, size) in SHAPES.items()}, 9)
        sent: queue.SimpleQueue[Sent] = queue.SimpleQueue()
        transport = open_sender(regions, host_identity(), backend, bounds=SHORT, arenas=arenas)
        senders = SenderThreads(transport, regions, sent.put, arenas=arenas)
        groups = {
            "full": GroupTarget(0, [30, 9, 10, 11, 5, 4, 31, 32]),
            "window": GroupTarget(5, [8, 3, 4]),
            "state": GroupTarget(0, [4]),
        }
        kv = KVReceiver(receiver, 1, 0, tokens, groups)
        endpoint = receiver.endpoints[0]
        assert transport.reads_host(endpoint)
        sender = KVSender(senders, 1, 0, SIZE, endpoint, groups, checks=ChecksumMode.ALL)
        here = {"full": as_pages([7, 6, 0, 0, 0, 0, 0, 2]), "window": as_pages([0] * 6 + [3, 0])}
        below = {"full": as_pages([0, 0, 50, 51, 3, 2, 59, 0]), "window": as_pages([0] * 5 + [55, 0, 1])}
        sender.send({"full": here["full"]}, 16, on_host={"full": below["full"]})
        sender.send(
            {**here, "state": as_pages([0])}, tokens, last=True, on_host={**below, "state": as_pages([5])}
        )
        over = sent.get(timeout=20)
        assert over.error is None
        done = KVDone(1, 0, tokens, 5, over.kv_bytes, checksums=over.checksums)
        assert kv.commit(done, ChecksumMode.ALL) == over.kv_bytes
        for group, at in groups.items():
            for page, i in zip(at.page_ids, range(at.first_page, 8), strict=False):
                on_host = int(below[group][i]) if group != "state" else 5
                region, src = (arenas, on_host) if on_host else (regions, int(here[group][i]))
                assert torch.equal(theirs[group][page], region[group].tensor[src]), (group, i)
        assert kv.abort().passed
        senders.close()
        transport.close()


@pytest.mark.parametrize("staged", [False, True], ids=["in place", "staged"])
@pytest.mark.parametrize("backend", ["cuda_ipc", "shm", "tcp", "mooncake"])
def test_a_hand_off_of_three_groups(backend: str, staged: bool) -> None:
    """Primary pages chunk by chunk, the window and the state at the end; every group is checked."""
    tokens = 30
    with receiving_groups(backend, SHAPES, staged=staged and backend != "shm") as (receiver, theirs):
        regions = pools(SHAPES, seed=3, staged=staged, memory=gpu_for(backend))
        sent: queue.SimpleQueue[Sent] = queue.SimpleQueue()
        transport = open_sender(regions, host_identity(), backend, bounds=SHORT)
        senders = SenderThreads(transport, regions, sent.put)
        groups = {
            "full": GroupTarget(2, [30, 9, 10, 11, 5, 4]),
            "window": GroupTarget(5, [8, 3, 4]),
            "state": GroupTarget(0, [4]),
        }
        kv = KVReceiver(receiver, 1, 0, tokens, groups)
        sender = KVSender(senders, 1, 0, SIZE, receiver.endpoints[0], groups, checks=ChecksumMode.ALL)
        mine = permuted(np.random.default_rng(1), 40, 8)
        tails = {"window": as_pages([0, 0, 0, 0, 1, 2, 17, 18]), "state": as_pages([3])}
        for end in (13, 24):
            sender.send({"full": mine}, end)
        sender.send({"full": mine, **tails}, tokens, last=True)
        over = sent.get(timeout=20)
        assert over.error is None
        nbytes = {"full": 6 * 4096, "window": 3 * 192, "state": (1 << 20) + 64}
        assert over.kv_bytes == sum(nbytes.values())
        assert {group: len(sums) for group, sums in over.checksums.sums.items()} == {
            "full": 6,
            "window": 3,
            "state": 1,
        }
        wrong = PageChecksums(ChecksumMode.ALL, {**over.checksums.sums, "state": [1]})
        other = KVReceiver(receiver, 2, 0, tokens, {"window": GroupTarget(5, [1])})
        with pytest.raises(TransferError, match="1 of group window"):
            other.commit(KVDone(2, 0, tokens, 5, 0))
        done = KVDone(1, 0, tokens, 5, over.kv_bytes, checksums=over.checksums)
        assert kv.landed.nbytes == nbytes
        assert kv.commit(done, ChecksumMode.ALL) == over.kv_bytes
        for group, src in {"full": mine, **tails}.items():
            first, ids = groups[group].first_page, groups[group].page_ids
            assert torch.equal(theirs[group][ids], regions[group].tensor[src[first:]]), group
        again = KVReceiver(receiver, 3, 0, tokens, groups)
        repeat = KVSender(senders, 3, 0, SIZE, receiver.endpoints[0], groups, checks=ChecksumMode.ALL)
        repeat.send({"full": mine, **tails}, tokens, last=True)
        assert sent.get(timeout=20).error is None
        with pytest.raises(PageDiffers, match="page 0 of group state differs"):
            again.commit(KVDone(3, 0, tokens, 5, over.kv_bytes, checksums=wrong), ChecksumMode.ALL)
        assert again.abort().passed
        assert other.abort().passed
        senders.close()
        transport.close()


def test_a_target_with_room_for_more_is_filled_as_far_as_there_is() -> None:
    transport = Recorder()
    with sending(transport) as (senders, sent):
        sender = KVSender(
            senders, 1, 0, SIZE, NOWHERE, {**target(0, 24), "window": GroupTarget(1, [8, 3, 4])}
        )
        pages = {"full": source(3), "window": as_pages([0, 0, 5])}
        sender.send(pages, 12, last=True, needed_from={"window": 2})
        assert sent.get(timeout=10).error is None
    assert [(w.group, w.dst_pages.tolist()) for w in transport.writes] == [
        ("full", [100, 101, 102]),
        ("window", [3]),
    ]


def test_only_what_is_expected_can_be_missing() -> None:
    with receiving("tcp", 8, 64) as (receiver, _):
        kv = KVReceiver(receiver, 3, 1, 10, {"full": GroupTarget(0, [4, 1, 3, 2])})
        transport = open_sender({"full": pool(8, 64, 1)}, host_identity(), "tcp", bounds=SHORT)
        transport.write(receiver.endpoints[0], PageWrite(3, 1, "full", as_pages([4, 5]), as_pages([4, 1])))
        done = KVDone(3, 1, 12, 0, 128, output=[7, 7])
        for expected in (None, {"full": as_pages([4, 1, 3])}):
            with pytest.raises(TransferError, match="missing pages"):
                kv.commit(done, expected=expected)
        assert kv.commit(done, expected={"full": as_pages([4, 1])}) == 128
        transport.close()


def test_commit_refuses_what_is_not_its_own_or_not_complete() -> None:
    with receiving("tcp", 8, 64) as (receiver, _):
        kv = KVReceiver(receiver, 3, 1, 10, {"full": GroupTarget(0, [1, 2, 3])})
        assert kv.landed.total == 0
        for done in (KVDone(4, 1, 10, 0, 0), KVDone(3, 0, 10, 0, 0)):
            with pytest.raises(TransferError, match="metadata of room"):
                kv.commit(done)
        with pytest.raises(TransferError, match="9 tokens"):
            kv.commit(KVDone(3, 1, 9, 0, 0))
        with pytest.raises(TransferError, match="missing pages: 3 of group full"):
            kv.commit(KVDone(3, 1, 10, 0, 192))
        transport = open_sender({"full": pool(8, 64, 1)}, host_identity(), "tcp", bounds=SHORT)
        transport.write(
            receiver.endpoints[0], PageWrite(3, 1, "full", as_pages([4, 5, 6]), as_pages([1, 2, 3]))
        )
        assert kv.landed.total == 192
        for said in (PageChecksums(), PageChecksums(ChecksumMode.SAMPLED, {"full": [1]})):
            with pytest.raises(TransferError, match="kv_checksums is all here, and the sender's"):
                kv.commit(KVDone(3, 1, 10, 0, 192, checksums=said), ChecksumMode.ALL)
        short = PageChecksums(ChecksumMode.ALL, {"full": [1, 2]})
        with pytest.raises(PageDiffers, match="2 checksums of group full came where 3 are expected"):
            kv.commit(KVDone(3, 1, 10, 0, 192, checksums=short), ChecksumMode.SAMPLED)
        assert kv.abort().passed
        with pytest.raises(TransferError, match="was aborted"):
            kv.commit(KVDone(3, 1, 10, 0, 192))
        transport.close()
