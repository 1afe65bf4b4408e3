"""A room moves from one decode worker to another, message by message."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from decode_node.room import DecodeHold
from kvtransfer.pages import PageWrite
from kvtransfer.select import PoolSender
from tests.support.hand_off import GROUPS, TRANSFER_S, Letter, held, prompt_of
from tests.support.two_decoders import TwoDecoders, two_decoders
from wire.messages.base import Receipt
from wire.messages.rooms import Abort, RejectKind, Timeline
from wire.messages.transfer import KVDone, KVFailed, KVTarget, TransferEndpoint
from wire.peer_monitors import PeerState
from wire.stages import RequestStage

every_model = pytest.mark.parametrize("groups", GROUPS, ids=lambda groups: "+".join(("full", *groups)))


@pytest.fixture
def two() -> Iterator[TwoDecoders]:
    with two_decoders() as workers:
        yield workers


@pytest.mark.covering("invariants")
@every_model
@pytest.mark.parametrize("backend", ["shm", "tcp"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_moved_room_goes_on_exactly_and_computes_nothing(
    groups: tuple[str, ...], backend: str, overlap: bool
) -> None:
    depth = 1 if overlap else 0
    with two_decoders(groups, kv_transfer_backend=backend, overlap_depth=depth) as two:
        two.ask(1, prompt_of(1, 50), 120)
        two.ask(2, prompt_of(2, 30), 60, where=1)
        two.until(1, 5)
        while two.computed(1) < 30:
            two.round()
        two.move(1)
        two.until_moved(1)
        assert two.streams[1].where == 1
        two.finish()
        assert two.streams[1].tokens == two.right(1, groups)
        assert two.streams[2].tokens == two.right(2, groups)
        assert two.computed(1) == 30, "only the other room's prompt was computed"
        two.settle()


@every_model
def test_back_and_forth_twenty_times(groups: tuple[str, ...]) -> None:
    with two_decoders(groups, overlap_depth=1) as two:
        stream = two.ask(1, prompt_of(1, 40), 400)
        two.until(1, 3)
        for times in range(1, 21):
            two.move(1)
            two.until_moved(1, times)
            two.until(1, len(stream.tokens) + 2)
        assert stream.finish is None
        two.finish()
        assert stream.tokens == two.right(1, groups)
        assert (two.computed(0), two.computed(1)) == (40, 0)
        assert {rejected.why for rejected in stream.rejected} == {RejectKind.MOVED}
        two.settle()


@pytest.mark.parametrize("acknowledged", [True, False])
def test_log_probabilities_go_along(two: TwoDecoders, acknowledged: bool) -> None:
    stream = two.ask(1, prompt_of(1, 40), 60, top_logprobs=2)
    two.until(1, 4)
    two.move(1)
    if not acknowledged:  # the router hears nothing more from the old worker
        while stream.moved == 0:
            two.round()
            lost = [one for one in two.network.letters if one.message.__struct_config__.tag == "ack"]
            for letter in lost:
                two.network.letters.remove(letter)
    two.finish()
    assert stream.tokens == two.right(1)
    assert len(stream.logprobs) == 60
    two.settle()


def test_the_room_goes_on_when_its_kv_is_lost_on_the_way(two: TwoDecoders) -> None:
    """KVDone never arrives: the room is paused for a bounded time."""
    stream = two.ask(1, prompt_of(1, 40), 300)
    two.until(1, 4)
    two.move(1)
    two.hold_back(KVDone)
    known = len(stream.tokens)
    for _ in range(5):
        two.round()
        two.network.letters[:] = [one for one in two.network.letters if not isinstance(one.message, KVDone)]
    assert len(stream.tokens) <= known + 2, "it is paused"
    two.clock.now += 11.0
    two.finish()
    assert stream.tokens == two.right(1)
    assert stream.moved == 0
    two.settle()


def test_a_room_that_could_not_be_taken_over_is_told_instead_of_confirmed(two: TwoDecoders) -> None:
    stream = two.ask(1, prompt_of(1, 40), 300)
    two.until(1, 4)
    two.move(1)
    letter = two.hold_back(KVDone)
    done = letter.message
    assert isinstance(done, KVDone)
    wrong = KVDone(done.room, done.epoch, done.context_tokens, done.first_token, done.kv_bytes + 1,
                   output=done.output)  # fmt: skip
    two.network.letters.insert(0, Letter(letter.sender, letter.to, wrong))
    two.deliver()
    answers = [one.message for one in two.network.letters if one.to == letter.sender]
    assert any(isinstance(one, KVFailed) for one in answers)
    assert not any(isinstance(one, Receipt) and one.of == "kv_done" for one in answers)
    two.finish()
    assert stream.tokens == two.right(1)
    assert stream.moved == 0
    assert two.computed(1) == 0
    two.settle()


@pytest.mark.parametrize("stage", [KVTarget, KVDone])
def test_a_move_that_the_router_gives_up_changes_nothing(two: TwoDecoders, stage: type) -> None:
    stream = two.ask(1, prompt_of(1, 40), 700)
    two.until(1, 4)
    for _ in range(3):
        two.move(1)
        late = two.hold_back(stage)
        two.cancel(1)
        for _ in range(4):
            two.round()
        two.network.letters.append(late)
        two.round()
    assert stream.moved == 0
    two.move(1)
    two.until_moved(1)
    two.finish()
    assert stream.tokens == two.right(1)
    assert two.computed(1) == 0
    two.settle()


@pytest.mark.parametrize("is_known", [False, True])
def test_a_worker_that_goes_down_takes_nothing_over(two: TwoDecoders, is_known: bool) -> None:
    """But one that was down before, and has sent a target since, does: it is reported down once more because
    it is watched now."""
    mailbox: Any = two.workers[0].parts.services.mailbox
    down = {two.workers[1].record().mailbox: PeerState.DOWN}
    stream = two.ask(1, prompt_of(1, 40), 300)
    two.until(1, 4)
    if is_known:
        mailbox.peers = dict(down)
        two.round()
    two.move(1)
    done = two.hold_back(KVDone)
    (room,) = two.workers[0].rooms()
    assert down.keys() <= set(room.peers)
    mailbox.peers = dict(down)
    two.round()
    if is_known:
        two.network.letters.append(done)
    two.finish()
    assert stream.moved == int(is_known)
    assert stream.tokens == two.right(1)
    two.settle()


def test_a_room_that_ends_meanwhile_is_not_moved(two: TwoDecoders) -> None:
    stream = two.ask(1, prompt_of(1, 40), 12)
    two.until(1, 4)
    two.move(1)
    target = two.hold_back(KVTarget)
    while stream.finish is None:
        two.round()
    two.network.letters.append(target)
    while not stream.rejected:
        two.round()
    assert "the room does not decode here" in stream.rejected[0].message
    assert stream.tokens == two.right(1)
    two.settle()


def test_a_room_that_outran_its_reservation_stays(two: TwoDecoders) -> None:
    stream = two.ask(1, prompt_of(1, 40), 900)
    two.until(1, 2)
    two.move(1)
    target = two.hold_back(KVTarget)
    two.until(1, 300)
    two.network.letters.append(target)
    while not stream.rejected:
        two.round()
    assert "the target ends at page" in stream.rejected[0].message
    two.move(1)
    two.until_moved(1)
    two.finish()
    assert stream.tokens == two.right(1)
    assert two.computed(1) == 0
    two.settle()


def test_a_client_that_leaves_during_a_move(two: TwoDecoders) -> None:
    two.ask(1, prompt_of(1, 40), 300)
    two.until(1, 4)
    two.move(1)
    two.hold_back(KVDone)
    two.cancel(1)
    two.network.letters.clear()
    for worker, epoch in ((0, 1), (1, 2)):
        two.post(worker, Abort(1, epoch))
    two.round()
    two.round()
    for worker in two.workers:
        assert not worker.rooms()
        assert held(worker) == {}
    two.settle()


def test_a_retracted_room_is_not_moved_before_it_runs_again() -> None:
    with two_decoders(max_total_tokens=160, overlap_depth=0) as two:
        streams = [two.ask(room, prompt_of(room, 30), 90) for room in (1, 2)]
        two.until(1, 3)
        two.until(2, 3)
        scheduler = two.workers[0].parts.role.scheduler
        two.move(1)
        two.move(2)
        two.finish()
        assert [stream.tokens for stream in streams] == [two.right(1), two.right(2)]
        assert scheduler.metrics.failed == 0
        two.settle()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set, nothing is written to another worker."""
    opened, write = threading.Event(), PoolSender.write

    def write_late(self: PoolSender, endpoint: TransferEndpoint, pages: PageWrite) -> int:
        assert opened.wait(TRANSFER_S)
        return write(self, endpoint, pages)

    monkeypatch.setattr(PoolSender, "write", write_late)
    return opened


@pytest.mark.parametrize("ends", [False, True])
def test_pages_on_their_way_are_kept_when_an_equal_room_is_cached_first(
    gate: threading.Event, ends: bool
) -> None:
    """The tree then has the other room's pages, and those that are sent are duplicates."""
    with two_decoders(hicache_ratio=1.0, hicache_decode_offload_tokens=8, chunked_prefill_size=64) as two:
        for room in (1, 2):
            two.ask(room, prompt_of(1, 270), 300)  # they do not end while pages are sent
        two.until(2, 6)
        two.move(2)
        target = two.hold_back(KVTarget)
        worker, req = two.workers[0], two.workers[0].rooms()[1].req
        memory = worker.parts.services.memory
        while req.kv_committed_len < req.cache_protected_len + 6:  # a page is not in the tree
            worker.turn([])
        two.network.letters.insert(0, target)
        two.deliver()
        sent = set(memory.req_to_token_pool.req_to_token[req.req_pool_idx, : req.kv_committed_len] // 4)
        before = req.cache_protected_len
        while req.cache_protected_len < before + 24:
            worker.turn([])
            assert not sent & {*memory.allocator.free_pages, *memory.allocator.release_pages}
        if ends:  # as when a worker that is to change its role hands its rooms back
            for room in worker.rooms():
                worker.parts.role.fail(room, RejectKind.DRAINING, "the worker is leaving")
            while not worker.parts.role.scheduler.idle:
                worker.turn([])
            gate.set()
            worker.close()
            memory.check_memory()
            return
        gate.set()
        two.until_moved(2)
        two.finish()
        assert [two.streams[room].tokens for room in (1, 2)] == [two.right(1), two.right(2)]
        two.settle()


def test_the_old_worker_sends_its_stages(two: TwoDecoders) -> None:
    two.ask(1, prompt_of(1, 40), 300)
    two.until(1, 4)
    two.move(1)
    timeline = two.hold_back(Timeline).message
    assert isinstance(timeline, Timeline)
    stages = [stamp.stage for stamp in timeline.stamps]
    assert timeline.epoch == 1
    assert stages[-1] is RequestStage.DECODE_PAUSED
    assert RequestStage.DECODE_TRANSFER_KV_CACHE in stages
    (room,) = two.workers[1].rooms()
    assert room.hold is DecodeHold.SCHEDULER  # type: ignore[attr-defined]
    two.finish()
    two.settle()


def test_a_room_that_is_not_wanted_any_more_where_it_should_go_stays_where_it_is(two: TwoDecoders) -> None:
    """The other worker has heard of the end of the move first, and then comes the KV."""
    stream = two.ask(1, prompt_of(1, 40), 120)
    two.until(1, 4)
    two.move(1)
    done = two.hold_back(KVDone)
    two.cancel(1)
    late = two.hold_back(KVFailed)
    assert late.sender == two.router
    two.network.letters.append(done)
    two.finish()
    assert not stream.lost
    assert stream.rejected == []
    assert stream.tokens == two.right(1)
    assert two.computed(1) == 0
    two.settle()
