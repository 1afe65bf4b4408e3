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

from kvtransfer.pages import PageWrite, as_pages
from kvtransfer.poll import KVPoll
from kvtransfer.receiver import KVReceiver
from kvtransfer.select import open_sender
from kvtransfer.sender import KVSender, SenderPool, Sent
from tests.kvtransfer.peers import SHORT, pool, receiving
from wire.errors import TransferError
from wire.host import host_identity
from wire.messages import GroupTarget, KVDone, TransferEndpoint

SIZE = 4  # tokens a page
NOWHERE = TransferEndpoint("recorder", "")


class Recorder:
    """A SenderTransport that remembers; `gate` holds every write back, `failure` fails it."""

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

    def drain(self, endpoint: TransferEndpoint) -> None: ...

    def close(self) -> None: ...


@contextmanager
def sending(transport: Recorder, threads: int = 2) -> Iterator[tuple[SenderPool, queue.SimpleQueue[Sent]]]:
    sent: queue.SimpleQueue[Sent] = queue.SimpleQueue()
    senders = SenderPool(transport, {}, sent.put, threads=threads)
    try:
        yield senders, sent
    finally:
        transport.gate.set()
        senders.close()


def target(first_page: int, tokens: int, at: int = 100) -> dict[str, GroupTarget]:
    pages = -(-tokens // SIZE) - first_page
    return {"full": GroupTarget(first_page, list(range(at, at + pages)))}


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.lists(st.integers(1, 59), max_size=8), st.data())
def test_every_page_goes_once_in_order_and_the_partial_one_last(
    tokens: int, chunk_ends: list[int], data: st.DataObject
) -> None:
    pages = -(-tokens // SIZE)
    first = data.draw(st.integers(0, pages - 1), label="pages that decode has already")
    ends = sorted(end for end in chunk_ends if end < tokens)
    source = np.arange(1000, 1000 + pages)
    transport = Recorder()
    with sending(transport) as (senders, sent):
        sender = KVSender(senders, 7, 2, SIZE)
        assert sender.poll() is KVPoll.BOOTSTRAPPING
        sender.init(NOWHERE, target(first, tokens))
        assert sender.start_send_idx == first * SIZE
        for end in ends:
            sender.tmp_end_idx = end
            sender.send({"full": source[: -(-end // SIZE)]})
            assert sender.start_send_idx == max(first, end // SIZE) * SIZE
        sender.send({"full": source}, tokens, last=True)
        over = sent.get(timeout=10)
    assert (over.room, over.epoch, over.error, over.kv_bytes) == (7, 2, None, 10 * (pages - first))
    assert sender.poll() is KVPoll.SUCCESS
    src = np.concatenate([write.src_pages for write in transport.writes])
    dst = np.concatenate([write.dst_pages for write in transport.writes])
    assert src.tolist() == source[first:].tolist()
    assert dst.tolist() == list(range(100, 100 + pages - first))
    if tokens % SIZE:
        assert all(source[-1] not in write.src_pages for write in transport.writes[:-1])
    assert sent.empty()


def test_a_target_that_does_not_fit_the_prompt_fails_the_room() -> None:
    transport = Recorder()
    with sending(transport) as (senders, sent):
        sender = KVSender(senders, 1, 0, SIZE)
        sender.init(NOWHERE, target(0, 12))
        sender.send({"full": np.arange(2)}, 8, last=True)
        assert "page 2" in (sent.get(timeout=10).error or "")
    assert sender.poll() is KVPoll.FAILED


def test_abort_waits_for_the_write_in_progress_and_reports_once() -> None:
    transport = Recorder()
    transport.gate.clear()
    with sending(transport) as (senders, sent):
        sender = KVSender(senders, 1, 0, SIZE)
        sender.init(NOWHERE, target(0, 12))
        sender.send({"full": np.arange(1)}, 4)
        sender.send({"full": np.arange(2)}, 8)
        assert transport.entered.wait(10)
        sender.abort("the client left")
        assert sent.empty(), "its pages are still being read"
        transport.gate.set()
        over = sent.get(timeout=10)
        sender.abort("again")
        sender.send({"full": np.arange(3)}, 12, last=True)
    assert over.error == "the client left"
    assert len(transport.writes) == 1
    assert sender.poll() is KVPoll.FAILED
    assert sent.empty()


def test_abort_before_the_target_reports_too() -> None:
    with sending(Recorder()) as (senders, sent):
        sender = KVSender(senders, 1, 0, SIZE)
        sender.abort("no target came")
        assert sent.get(timeout=10).error == "no target came"
        sender.init(NOWHERE, target(0, 4))
        assert sender.poll() is KVPoll.FAILED


def test_a_failed_write_ends_the_room_and_not_its_neighbour() -> None:
    transport = Recorder()
    with sending(transport, threads=1) as (senders, sent):
        transport.failure = "the wire broke"
        rooms = [KVSender(senders, room, 0, SIZE) for room in (1, 2)]
        for sender in rooms:
            sender.init(NOWHERE, target(0, 8))
        rooms[0].send({"full": np.arange(1)}, 4)
        assert sent.get(timeout=10).error == "the wire broke"
        transport.failure = None
        rooms[0].send({"full": np.arange(2)}, 8, last=True)
        rooms[1].send({"full": np.arange(2)}, 8, last=True)
        assert sent.get(timeout=10) == Sent(2, 0, 20)
    assert sent.empty()


def test_rooms_take_turns() -> None:
    transport = Recorder()
    transport.gate.clear()
    with sending(transport, threads=1) as (senders, sent):
        one, two = (KVSender(senders, room, 0, SIZE) for room in (1, 2))
        for sender in (one, two):
            sender.init(NOWHERE, target(0, 12))
        for end in (4, 8, 12):
            one.send({"full": np.arange(3)}, end, last=end == 12)
        two.send({"full": np.arange(3)}, 12, last=True)
        transport.gate.set()
        assert [sent.get(timeout=10).room for _ in range(2)] == [2, 1]


@pytest.mark.parametrize("staged", [False, True], ids=["in place", "staged"])
@pytest.mark.parametrize("backend", ["shm", "tcp", "mooncake"])
def test_a_hand_off_end_to_end(backend: str, staged: bool) -> None:
    """Two senders to one receiver; checksums; a new epoch on new pages."""
    tokens, page_bytes = 30, 4096
    pages = -(-tokens // SIZE)
    with receiving(backend, 40, page_bytes, staged=staged and backend != "shm") as (receiver, data):
        outs = []
        for seed in (1, 2):
            regions = {"full": pool(20, page_bytes, seed, staged=staged)}
            sent: queue.SimpleQueue[Sent] = queue.SimpleQueue()
            transport = open_sender(regions, host_identity(), backend, bounds=SHORT)
            outs.append((regions, transport, SenderPool(transport, regions, sent.put, checksums=True), sent))
        for room, (regions, _, senders, sent) in enumerate(outs):
            for epoch in (0, 1):
                ids = (np.arange(pages) * 2 + 1 + room) + epoch * 20
                kv = KVReceiver(receiver, room, epoch, tokens)
                kv.pre_alloc({"full": GroupTarget(0, ids.tolist())})
                sender = KVSender(senders, room, epoch, SIZE)
                sender.init(receiver.endpoints[0], {"full": GroupTarget(0, ids.tolist())})
                source = np.random.default_rng(room).permutation(20)[:pages]
                sender.send({"full": source}, 13)
                if epoch == 0:
                    sender.abort("restarted")
                    assert sent.get(timeout=10).error == "restarted"
                    assert kv.abort().wait(5)
                    continue
                sender.send({"full": source}, tokens, last=True)
                over = sent.get(timeout=10)
                assert over.error is None
                done = KVDone(room, epoch, tokens, 5, over.kv_bytes, checksums=over.checksums)
                assert kv.commit(done, verify=True) == pages * page_bytes
                assert kv.commit(done) == pages * page_bytes, "a repeat is answered alike"
                assert kv.poll() is KVPoll.SUCCESS
                assert kv.landed.backend == backend
                assert torch.equal(data[torch.from_numpy(ids)], regions["full"].tensor[source])
        for _, transport, senders, _ in outs:
            senders.close()
            transport.close()


def test_commit_refuses_what_is_not_its_own_or_not_complete() -> None:
    with receiving("tcp", 8, 64) as (receiver, _):
        kv = KVReceiver(receiver, 3, 1, 10)
        assert kv.poll() is KVPoll.BOOTSTRAPPING
        kv.pre_alloc({"full": GroupTarget(0, [1, 2, 3])})
        assert kv.poll() is KVPoll.WAITING_FOR_INPUT
        for done in (KVDone(4, 1, 10, 0, 0), KVDone(3, 0, 10, 0, 0)):
            with pytest.raises(TransferError, match="metadata of room"):
                kv.commit(done)
        with pytest.raises(TransferError, match="9 tokens"):
            kv.commit(KVDone(3, 1, 9, 0, 0))
        with pytest.raises(TransferError, match="3 pages are missing"):
            kv.commit(KVDone(3, 1, 10, 0, 192))
        transport = open_sender({"full": pool(8, 64, 1)}, host_identity(), "tcp", bounds=SHORT)
        transport.write(
            receiver.endpoints[0], PageWrite(3, 1, "full", as_pages([4, 5, 6]), as_pages([1, 2, 3]))
        )
        assert kv.poll() is KVPoll.TRANSFERRING
        with pytest.raises(TransferError, match="checksums"):
            kv.commit(KVDone(3, 1, 10, 0, 192, checksums={"full": [1, 2, 3]}), verify=True)
        assert kv.abort().passed
        assert kv.poll() is KVPoll.FAILED
        with pytest.raises(TransferError, match="FAILED"):
            kv.commit(KVDone(3, 1, 10, 0, 192))
        transport.close()
