"""DecodeRole message by message: reservations, quarantine, and every way in which a hand-off ends.

Prefill, scheduler, memory and the transport (shm) are the real ones; the test is the router and the network.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from common.errors import TransferError
from decode_node.room import DecodeHold, DecodeRoom
from tests.support.granted_writer import GrantedWriter
from tests.support.hand_off import GROUPS, ROUTER, TRANSFER_S, Letter, Pair, held, pair, prompt_of, right
from tests.support.members import write_secret
from wire.checksums import ChecksumMode, PageChecksums
from wire.messages.base import Receipt, RoomMessage, kind_of
from wire.messages.rooms import Abort, RejectKind, Reserved, Timeline, Tokens
from wire.messages.transfer import KVDone, KVFailed, KVTarget, Release
from wire.stages import RequestStage
from worker.holds import hold_report

PAGE_SIZE = 4
every_model = pytest.mark.parametrize("groups", GROUPS, ids=lambda groups: "+".join(("full", *groups)))


@pytest.fixture
def both() -> Iterator[Pair]:
    with pair() as workers:
        yield workers


def target_of(both: Pair, room: int, prompt: list[int], n: int = 6) -> KVTarget:
    """Ask. Returns the KVTarget that decode sends; it is lost, so decode sends it again later."""
    both.ask(room, prompt, n)
    target = both.hold_back(KVTarget).message
    assert isinstance(target, KVTarget)
    assert target.room == room
    return target


def room_of(both: Pair) -> DecodeRoom:
    """The only room on decode."""
    (room,) = both.decode.rooms()
    assert isinstance(room, DecodeRoom)
    return room


def from_prefill(both: Pair, message: RoomMessage) -> None:
    """A message of the prefill worker arrives at decode, which confirms it at once."""
    prefill, decode = both.prefill.record().mailbox, both.decode.record().mailbox
    both.arrive(Letter(prefill, decode, message))
    receipts = [letter for letter in both.network.letters if isinstance(letter.message, Receipt)]
    confirmed = [letter for letter in receipts if letter.to == prefill and letter.sender == decode]
    assert confirmed, "not confirmed"
    both.network.letters.remove(confirmed[-1])


@pytest.mark.parametrize("secret", [False, True])
def test_pages_over_tcp_are_encrypted_when_the_cluster_has_a_secret(secret: bool, tmp_path: Path) -> None:
    file = write_secret(tmp_path) if secret else None
    with pair(kv_transfer_backend="tcp", cluster_secret_file=file) as both:
        both.ask(1, prompt_of(1, 50), 6)
        letter = both.hold_back(KVTarget)
        (endpoint,) = letter.message.endpoints
        assert endpoint.params.get("cipher") == ("aes-256-gcm" if secret else None)
        both.arrive(letter)
        both.run_dry()
        assert both.outputs[1].tokens == right(both, 1)
        both.settle()


def test_who_has_no_part_in_a_room_is_not_heard(both: Pair) -> None:
    prefill, decode = both.prefill.record().mailbox, both.decode.record().mailbox
    both.ask(1, prompt_of(1, 50), 6)
    target = both.hold_back(KVTarget)
    stranger = "tcp://stranger:1"
    both.arrive(Letter(stranger, prefill, target.message))
    for lie in (KVDone(1, 1, 50, 7, 0), KVFailed(1, 1, "no"), Release(1, 1)):
        both.arrive(Letter(stranger, decode, lie))
    assert not [letter for letter in both.network.letters if letter.to == stranger]
    assert room_of(both).hold is DecodeHold.WAITING
    both.arrive(target)
    both.run_dry()
    assert both.outputs[1].tokens == right(both, 1)
    both.settle()


def sent_to_router(both: Pair, kind: type[Any]) -> list[Any]:
    """Messages of this kind from decode to the router that are on their way."""
    decode = both.decode.record().mailbox
    return [
        letter.message
        for letter in both.network.letters
        if (letter.sender, letter.to) == (decode, ROUTER) and isinstance(letter.message, kind)
    ]


def ended(both: Pair, room: int) -> None:
    """Nothing of the room is left on decode. A router that asks again gets its answer."""
    assert not both.decode.rooms()
    assert held(both.decode) == {}
    both.run_dry()
    if both.outputs[room].open:
        both.insist(room)
        both.run_dry()
        assert both.outputs[room].tokens == right(both, room)
    both.settle()


def test_decode_says_how_its_kv_came(both: Pair) -> None:
    both.ask(1, prompt_of(1, 50), 3)
    letter = both.hold_back(KVDone)
    both.arrive(letter)
    told = both.hold_back(Timeline)
    while told.sender != both.decode.record().mailbox:
        both.arrive(told)
        told = both.hold_back(Timeline)
    assert told.message.kv_from == both.prefill.record().mailbox
    assert told.message.kv_backend == "shm"
    assert told.message.kv_bytes == letter.message.kv_bytes > 0
    assert 0 < told.message.kv_seconds < TRANSFER_S
    both.arrive(told)
    both.run_dry()
    both.settle()


# -- reservations ---------------------------------------------------------------------------------------


def test_a_reservation_holds_a_row_and_what_is_not_cached_and_both_peers_hear_of_it(both: Pair) -> None:
    target = target_of(both, 1, prompt_of(1, 50))
    assert room_of(both).hold is DecodeHold.WAITING
    report = both.decode.check_memory()
    assert report.held_pages == len(target.groups["full"].page_ids) == 13
    assert report.held_rows == 1
    assert [(message.room, message.epoch) for message in sent_to_router(both, Reserved)] == [(1, 1)]
    both.start(1)
    for _ in range(len(both.network.letters)):
        both.deliver(0)
    assert len(both.decode.rooms()) == 1
    assert both.decode.check_memory().held_pages == 13, "a repeated start reserves nothing again"
    both.abort(1)
    both.run_dry()
    ended(both, 1)


def test_rooms_are_reserved_in_the_order_of_their_arrival() -> None:
    with pair(max_total_tokens=256) as both:
        target_of(both, 1, prompt_of(1, 150))
        for room, length in ((2, 120), (3, 8)):
            both.ask(room, prompt_of(room, length), 6)
        both.run_dry_without(both.prefill)
        holds = {room.room: room.hold for room in both.decode.rooms()}
        assert holds == {1: "waiting", 2: "bootstrap", 3: "bootstrap"}, "the small one passes nobody"
        both.pass_time(1.0)
        both.run_dry()
        for room in (1, 2, 3):
            assert both.outputs[room].tokens == right(both, room)
        both.settle()


def test_a_room_looks_into_storage_before_its_turn(tmp_path: Path) -> None:
    """Else a slow storage would let one room after the other wait."""
    storage: dict[str, Any] = {"hicache_storage_backend": "file", "hicache_storage_path": tmp_path / "kv"}
    with pair(max_total_tokens=256, hicache_ratio=1.0, **storage) as both:
        target_of(both, 1, prompt_of(1, 150))
        tiers, asked = both.decode.parts.services.memory.tiers, set[object]()
        assert tiers is not None
        assert tiers.storage is not None
        with mock.patch.object(tiers.storage.prefetches, "prefetch", lambda user, *_: asked.add(user)):
            for room in (2, 3):
                both.ask(room, prompt_of(room, 120), 6)
            both.run_dry_without(both.prefill)
        assert [room.hold for room in both.decode.rooms()] == ["waiting", "bootstrap", "bootstrap"]
        assert asked == {(2, 1), (3, 1)}
        both.run_dry()
        both.settle()


def test_a_restart_keeps_its_place_in_line() -> None:
    """Rooms that came later wait already when an earlier one comes from another worker."""
    with pair(max_total_tokens=256) as both:
        target_of(both, 1, prompt_of(1, 150))
        for room, arrived_ns in ((2, 20), (3, 30), (4, 25), (5, 10)):
            both.ask(room, prompt_of(room, 150), 6, arrived_ns=arrived_ns)
        both.run_dry_without(both.prefill)
        order: list[int] = []
        for _ in range(4):
            both.abort(order[-1] if order else 1)
            both.run_dry_without(both.prefill)
            both.turn(both.decode)
            order += [room.room for room in both.decode.rooms() if room.req.state == "reserved"]
        assert order == [5, 2, 4, 3]
        both.abort(3)
        both.run_dry()
        both.settle()


# -- the KV comes --------------------------------------------------------------------------------------


def test_the_first_message_repeats_the_token_that_prefill_has_sent(both: Pair) -> None:
    both.ask(1, prompt_of(1, 30), 5)
    done = both.hold_back(KVDone)
    both.run_dry()
    assert len(both.outputs[1].tokens) == 1, "token 0 does not wait for the transfer"
    both.arrive(done)
    (first, *_) = (run for tokens in sent_to_router(both, Tokens) for run in tokens.runs)
    assert (first.start, first.tokens[:1]) == (0, both.outputs[1].tokens)
    both.run_dry()
    assert both.outputs[1].tokens == right(both, 1)
    both.settle()


def test_a_done_of_an_older_epoch_commits_nothing(both: Pair) -> None:
    both.ask(1, prompt_of(1, 30), 5)
    stale = both.hold_back(KVDone).message
    both.restart(1, split=True)
    done = both.hold_back(KVDone)
    assert isinstance(stale, KVDone)
    assert isinstance(done.message, KVDone)
    assert (stale.epoch, done.message.epoch) == (1, 2)
    from_prefill(both, stale)
    assert room_of(both).hold is DecodeHold.WAITING
    both.arrive(done)
    both.run_dry()
    assert both.outputs[1].tokens == right(both, 1)
    both.settle()


@pytest.mark.parametrize("late", [KVFailed(1, 1, "late"), Release(1, 1), Abort(1, 1, "late")], ids=kind_of)
@pytest.mark.parametrize("hold", list(DecodeHold))
def test_a_late_end_of_an_older_epoch_does_not_end_the_new_one(
    hold: DecodeHold, late: KVFailed | Release | Abort
) -> None:
    with pair(max_total_tokens=256) as both:
        if hold is DecodeHold.BOOTSTRAP:
            target_of(both, 2, prompt_of(2, 150))  # takes the memory
        both.ask(1, prompt_of(1, 100), 6)
        both.run_dry_without(both.prefill)
        both.restart(1, split=True)
        both.run_dry_without(both.prefill)
        if hold is DecodeHold.SCHEDULER:
            both.arrive(both.hold_back(KVDone))
        (room,) = (room for room in both.decode.rooms() if room.room == 1)
        assert isinstance(room, DecodeRoom)
        assert (room.epoch, room.hold) == (2, hold)
        from_prefill(both, late)
        assert room in both.decode.rooms()
        assert room.hold is hold
        both.pass_time(1.0)
        both.run_dry()
        assert both.outputs[1].tokens == right(both, 1)
        both.settle()


def test_the_first_tokens_logprobs_come_with_the_kv(both: Pair) -> None:
    both.ask(1, prompt_of(1, 30), 5, top_logprobs=2)
    done = both.hold_back(KVDone)
    assert isinstance(done.message, KVDone)
    assert done.message.logprobs is not None
    assert len(done.message.logprobs.top) == 2
    both.arrive(done)
    (first, *_) = (run for tokens in sent_to_router(both, Tokens) for run in tokens.runs)
    assert first.logprobs is not None
    assert first.logprobs[0] == done.message.logprobs
    both.run_dry()
    both.settle()


def test_how_much_prefill_had_cached_comes_with_the_kv(both: Pair) -> None:
    for room, cached in ((1, 0), (2, 28)):  # of 30 tokens, in pages of 4; the last is always computed
        both.ask(room, prompt_of(1, 30), 5)
        done = both.hold_back(KVDone)
        assert isinstance(done.message, KVDone)
        assert done.message.cached_tokens == cached
        both.arrive(done)
        (first, *_) = (run for tokens in sent_to_router(both, Tokens) for run in tokens.runs)
        assert (first.room, first.cached_tokens) == (room, cached)
        both.run_dry()
    both.settle()


def test_a_done_for_a_room_that_is_not_here_is_confirmed_only(both: Pair) -> None:
    from_prefill(both, KVDone(7, 1, 30, 5, 0))
    assert not both.network.letters
    assert not both.decode.rooms()


def test_a_repeated_done_changes_nothing(both: Pair) -> None:
    both.ask(1, prompt_of(1, 30), 5)
    done = both.hold_back(KVDone).message
    assert isinstance(done, KVDone)
    for _ in range(3):
        from_prefill(both, done)
    both.run_dry()
    from_prefill(both, done)
    assert both.outputs[1].tokens == right(both, 1)
    both.settle()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"context_tokens": 29}, "29 tokens were computed where 30 are expected"),
        ({"kv_bytes": 1}, "bytes arrived"),
        ({"checksums": PageChecksums(ChecksumMode.ALL, {"full": [0] * 8})}, "page 0 of group full differs"),
        ({"checksums": PageChecksums(ChecksumMode.SAMPLED, {"full": [0]})}, "kv_checksums is all here"),
    ],
    ids=["tokens", "bytes", "checksums", "too few checksums"],
)
def test_a_done_that_does_not_fit_what_arrived_fails_the_room(changed: dict[str, Any], says: str) -> None:
    with pair(kv_checksums="all") as both:
        both.ask(1, prompt_of(1, 30), 5)
        done = both.hold_back(KVDone).message
        assert isinstance(done, KVDone)
        from_prefill(both, _changed(done, changed))
        both.run_dry()
        rejected = both.outputs[1].rejected
        assert rejected is not None
        assert rejected.why is RejectKind.FAILED
        assert says in rejected.message
        ended(both, 1)


@pytest.mark.parametrize("mode", [ChecksumMode.SAMPLED, ChecksumMode.ALL])
@pytest.mark.parametrize("group", ["full", "window", "state"])
def test_a_page_that_is_not_what_was_sent_is_never_read(group: str, mode: ChecksumMode) -> None:
    """The room starts again, on new pages, and prefill sends what it has cached."""
    groups = () if group == "full" else (group,)
    with pair(groups, kv_checksums=mode) as both:
        both.ask(1, prompt_of(1, 30), 5)
        done = both.hold_back(KVDone)
        assert isinstance(done.message, KVDone)
        assert done.message.checksums.mode is mode
        (room,) = both.decode.rooms()
        both.decode.parts.services.memory.kv_caches[group].bytes[room.req.reserved[group].pages] ^= 1
        both.arrive(done)
        both.run_dry()
        rejected = both.outputs[1].rejected
        assert rejected is not None
        assert rejected.why is RejectKind.FAILED
        assert f"of group {group} differs from what was sent" in rejected.message
        assert not both.outputs[1].tokens[1:], "something was decoded from a bad page"
        assert both.decode.parts.role.scheduler.metrics.bad_hand_offs == 1
        both.restart(1, split=True)
        both.run_dry()
        assert both.outputs[1].tokens == right(both, 1, groups)
        assert both.decode.parts.role.scheduler.metrics.bad_hand_offs == 1
        both.settle()


@pytest.mark.parametrize("prefill", list(ChecksumMode))
@pytest.mark.parametrize("decode", list(ChecksumMode))
def test_the_stricter_setting_of_two_workers_counts(prefill: ChecksumMode, decode: ChecksumMode) -> None:
    with pair(kv_checksums=decode, prefill_differs={"kv_checksums": prefill}) as both:
        both.ask(1, prompt_of(1, 30), 5)
        done = both.hold_back(KVDone)
        assert isinstance(done.message, KVDone)
        assert done.message.checksums.mode is prefill.stricter(decode)
        count = {ChecksumMode.NONE: 0, ChecksumMode.SAMPLED: 1, ChecksumMode.ALL: 8}
        assert len(done.message.checksums.sums.get("full", [])) == count[prefill.stricter(decode)]
        both.arrive(done)
        both.run_dry()
        assert both.outputs[1].tokens == right(both, 1)
        both.settle()


def _changed(done: KVDone, fields: dict[str, Any]) -> KVDone:
    return KVDone(**{**{name: getattr(done, name) for name in done.__struct_fields__}, **fields})


def test_a_done_before_every_page_has_landed_fails_the_room(both: Pair) -> None:
    target_of(both, 1, prompt_of(1, 30))
    from_prefill(both, KVDone(1, 1, 30, 5, 0))
    both.run_dry()
    rejected = both.outputs[1].rejected
    assert rejected is not None
    assert "missing pages: 8 of group full" in rejected.message
    ended(both, 1)


# -- the KV does not come ------------------------------------------------------------------------------


@every_model
def test_what_was_reserved_is_quarantined_until_the_fence(groups: tuple[str, ...]) -> None:
    """A write in progress cannot be recalled: pages and slots of every group wait until it is over."""
    with pair(groups) as both:
        target = target_of(both, 1, prompt_of(1, 50))
        offered = {name: set(group.page_ids) for name, group in target.groups.items()}
        writer = GrantedWriter(target)
        both.abort(1)
        both.run_dry_without(both.prefill)
        report = both.decode.check_memory()
        assert report.quarantined_pages == len(offered["full"])
        for name in groups:
            assert report.groups[name].quarantined == len(offered[name]) > 0
        assert not both.decode.rooms()
        again = target_of(both, 2, prompt_of(1, 50))
        for name, group in again.groups.items():
            assert not offered[name] & set(group.page_ids), f"{name}: offered to two writers"
        writer.end()
        both.turn(both.decode)
        report = both.decode.check_memory()
        assert report.quarantined_pages == 0
        assert all(report.groups[name].quarantined == 0 for name in groups)
        both.pass_time(1.0)
        both.run_dry()
        assert both.outputs[2].tokens == right(both, 2, groups)
        both.settle()


def test_pages_that_another_process_may_write_are_listed_with_their_age(both: Pair) -> None:
    prefill, decode = both.prefill.record().mailbox, both.decode
    began = time.monotonic()

    def listed() -> list[str]:
        rows = hold_report(decode.parts.services, time.monotonic(), []).holds
        pages = [row for row in rows if row.owner == prefill and "message" not in row.what]
        for row in pages:
            assert (row.holder, row.room, row.epoch) == (decode.id, 1, 1)
            assert row.age_s is not None
            assert 0 <= row.age_s <= time.monotonic() - began
        return [row.what for row in pages]

    assert listed() == []
    target = target_of(both, 1, prompt_of(1, 50))
    assert listed() == ["open pages"]
    writer = GrantedWriter(target)
    assert listed() == ["open pages", "grant, shm"]
    both.abort(1)
    both.run_dry_without(both.prefill)
    assert listed() == ["quarantine"]
    writer.end()
    both.turn(decode)
    assert listed() == []
    both.settle()


def test_a_worker_with_quarantined_pages_is_not_drained(both: Pair) -> None:
    writer = GrantedWriter(target_of(both, 1, prompt_of(1, 50)))
    both.abort(1)
    both.run_dry_without(both.prefill)
    assert both.decode.parts.role.busy
    assert not both.decode.rooms()
    for _ in range(2):
        assert not both.decode.drain(0.0)
        both.pass_time(1.0)
    writer.end()
    both.run_dry()
    assert not both.decode.parts.role.busy
    both.pass_time(1.0)
    assert both.decode.drain(0.0)
    both.settle()


def test_a_writer_of_an_older_epoch_is_refused(both: Pair) -> None:
    stale = target_of(both, 1, prompt_of(1, 30))
    both.restart(1, split=True)
    target = both.hold_back(KVTarget).message
    assert isinstance(target, KVTarget)
    assert target.epoch == 2
    with pytest.raises(TransferError, match="epoch 1 is not open"):
        GrantedWriter(stale)
    GrantedWriter(target).end()
    both.abort(1)
    both.run_dry()
    ended(both, 1)


def test_a_failure_on_prefill_is_told_to_the_router(both: Pair) -> None:
    target_of(both, 1, prompt_of(1, 30))
    from_prefill(both, KVFailed(1, 1, "no way to your pages"))
    both.run_dry()
    rejected = both.outputs[1].rejected
    assert rejected is not None
    assert (rejected.why, rejected.message) == (
        RejectKind.FAILED,
        "no KV came from prefill: no way to your pages",
    )
    assert rejected.blamed == both.prefill.record().mailbox
    ended(both, 1)


def test_kv_that_does_not_come_in_time_fails_the_room(both: Pair) -> None:
    target_of(both, 1, prompt_of(1, 30))
    both.network.letters.clear()  # prefill hears nothing, decode hears nothing
    both.clock.now += 121.0
    both.turn(both.decode)
    both.run_dry()
    rejected = both.outputs[1].rejected
    assert rejected is not None
    assert rejected.blamed == both.prefill.record().mailbox
    ended(both, 1)


def test_a_release_ends_the_room_without_a_word_of_output(both: Pair) -> None:
    """Token 0 was the last: prefill has sent it, and there is no KV to wait for."""
    both.ask(1, prompt_of(1, 30), 1)
    release = both.hold_back(Release)
    assert room_of(both).hold is DecodeHold.WAITING
    both.arrive(release)
    assert not both.decode.rooms()
    assert held(both.decode) == {}
    assert not sent_to_router(both, Tokens)
    assert len(sent_to_router(both, Timeline)) == 1
    both.run_dry()
    assert isinstance(release.message, Release)
    from_prefill(both, release.message)
    assert both.outputs[1].tokens == right(both, 1)
    both.settle()


# -- the client leaves ---------------------------------------------------------------------------------


def test_abort_of_a_room_that_waits_for_memory_lets_the_next_one_have_it() -> None:
    with pair(max_total_tokens=256) as both:
        target_of(both, 1, prompt_of(1, 150))
        both.ask(2, prompt_of(2, 120), 6)
        both.run_dry_without(both.prefill)
        assert [room.hold for room in both.decode.rooms()] == ["waiting", "bootstrap"]
        both.turn(both.decode)
        load = both.decode.record().load
        assert (load.headroom_tokens, load.waiting_requests) == (0, 1), "an older room waits for what is free"
        both.abort(2)
        both.run_dry_without(both.prefill)
        both.turn(both.decode)
        load = both.decode.record().load
        assert load.headroom_tokens > 0
        assert load.waiting_requests == 0
        both.abort(1)
        both.run_dry()
        ended(both, 1)


def test_abort_of_a_reserved_room_frees_its_pages(both: Pair) -> None:
    target_of(both, 1, prompt_of(1, 50))
    both.abort(1)
    both.run_dry_without(both.prefill)
    assert both.outputs[1].aborted
    ended(both, 1)


def test_abort_of_a_decoding_room_keeps_what_it_computed_in_the_cache(both: Pair) -> None:
    both.ask(1, prompt_of(1, 50), 100)
    done = both.hold_back(KVDone)
    both.arrive(done)
    for step in range(1000):
        if len(both.outputs[1].tokens) >= 3:
            break
        both.step(step)
    assert room_of(both).hold is DecodeHold.SCHEDULER
    both.abort(1)
    both.run_dry()
    assert not both.decode.rooms()
    assert held(both.decode) == {}
    target = target_of(both, 2, prompt_of(1, 50))
    assert target.groups["full"].first_page == 12, "the whole pages of the prompt are cached here"
    both.pass_time(1.0)
    both.run_dry()
    assert both.outputs[2].tokens == right(both, 2)
    both.settle()


def test_a_late_message_for_an_aborted_room_is_confirmed_and_nothing_else(both: Pair) -> None:
    both.ask(1, prompt_of(1, 30), 5)
    done = both.hold_back(KVDone).message
    assert isinstance(done, KVDone)
    both.abort(1)
    both.run_dry()
    for late in (done, KVFailed(1, 1, "too late"), Release(1, 1)):
        from_prefill(both, late)
        assert not both.network.letters
    ended(both, 1)


# -- without a hand-off --------------------------------------------------------------------------------


def test_without_prefill_the_room_is_computed_here(both: Pair) -> None:
    both.ask(1, prompt_of(1, 30), 5, split=False)
    while not both.decode.rooms():
        both.deliver(0)
    room = room_of(both)
    assert (room.prefill, room.hold) == (None, DecodeHold.SCHEDULER)
    both.run_dry()
    assert not {RequestStage.DECODE_BOOTSTRAP, RequestStage.DECODE_WAITING} & room.req.stages_seen
    assert both.outputs[1].tokens == right(both, 1)
    both.settle()


# -- the worker leaves -----------------------------------------------------------------------------------


def test_a_worker_that_leaves_refuses_new_rooms(both: Pair) -> None:
    threading.Timer(0.0, both.decode.drain, (5.0,)).start()
    while not both.decode.record().draining:
        pass
    both.ask(1, prompt_of(1, 20), 4, split=False)
    both.run_dry()
    refused = both.outputs[1].rejected
    assert refused is not None
    assert refused.why is RejectKind.DRAINING


def test_a_worker_that_leaves_hands_back_what_still_runs_at_its_bound(both: Pair) -> None:
    both.ask(1, prompt_of(1, 20), 100, split=False)
    for step in range(1000):
        if len(both.outputs[1].tokens) >= 3:
            break
        both.step(step)
    assert not both.decode.drain(0.0)
    both.pass_time(1.0)
    both.run_dry()
    handed_back = both.outputs[1].rejected
    assert handed_back is not None
    assert handed_back.why is RejectKind.DRAINING
    assert 3 <= len(both.outputs[1].tokens) < 100
    both.pass_time(1.0)
    assert both.decode.drain(0.0)
    both.settle()
