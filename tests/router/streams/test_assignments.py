"""Assignments: a request with output keeps its version; one without goes where it is served."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from common.errors import Unavailable
from router.index.global_index import as_hashes
from router.placement.policy import PlacementRequest
from router.streams.assignments import Assignment, version_key
from router.streams.generation import Submission
from tests.router.directory.test_directory import group_layout
from tests.router.streams.test_dispatcher import OPTIONS, ROOMY, D, Desk, E, Sink, record
from wire.messages.rooms import Decode, Rejected, RejectKind
from wire.records import Role, WorkerRecord
from wire.request import SamplingParams
from wire.sockets import Mail

NEW = record("n", role=Role.DECODE, load=ROOMY, max_running_requests=64, fingerprint="new")


def run(test: Callable[[], None]) -> None:
    async def go() -> None:
        test()

    asyncio.run(go())


def leaves(desk: Desk, worker: WorkerRecord, *others: WorkerRecord) -> None:
    """A worker's lease ends; these are left."""
    now = time.monotonic()
    desk.models.update(list(others), now)
    desk.dispatcher.gone(worker, "was lost", now)
    desk.dispatcher.admit(now)


def test_a_stream_goes_on_where_its_version_is_and_nowhere_else() -> None:
    def test() -> None:
        desk = Desk(D, E)
        sinks = {number: desk.open(number) for number in range(6)}
        for number in sinks:
            desk.tokens(D if number in desk.on(D, Decode, 0) else E, number, 7)
        on_d = desk.on(D, Decode, 0)
        desk.models.update([D, E, NEW], time.monotonic())
        leaves(desk, D, E, NEW)
        assert desk.on(E, Decode, 1) == on_d, "E has the same version"
        assert desk.on(NEW, Decode, 1) == set()
        leaves(desk, E, NEW)
        assert desk.on(NEW, Decode, 2) | desk.on(NEW, Decode, 1) == set()
        assert all(sink.error is None for sink in sinks.values())

    run(test)


def test_a_stream_whose_version_is_gone_ends_in_an_error_that_says_so() -> None:
    def test() -> None:
        desk = Desk(D)
        sink, now = desk.open(1), time.monotonic()
        desk.tokens(D, 1, 7)
        leaves(desk, D)
        desk.dispatcher.tick(now + OPTIONS.version_wait_s + 1)
        assert sink.error is None, "no other version serves: a worker of it may come back"
        desk.models.update([NEW], now)
        desk.dispatcher.tick(now + 50)
        desk.dispatcher.tick(now + 50 + OPTIONS.version_wait_s - 1)
        assert sink.error is None
        desk.dispatcher.tick(now + 50 + OPTIONS.version_wait_s)
        assert isinstance(sink.error, Unavailable)
        assert "version of 'm' on which this stream began" in str(sink.error)
        assert sink.tokens == [7]
        assert desk.versions.all[0].rooms == 0

    run(test)


def test_the_wait_begins_anew_when_a_worker_of_the_version_was_back() -> None:
    def test() -> None:
        desk = Desk(D, NEW)
        sink, now = Sink(), time.monotonic()
        desk.open(1, sink)
        old = D if desk.on(D, Decode, 0) else NEW
        desk.tokens(old, 1, 7)
        other = NEW if old is D else D
        leaves(desk, old, other)
        desk.dispatcher.tick(now)
        again = replace(old, incarnation=2)
        desk.models.update([again, other], now)
        desk.dispatcher.tick(now + 25)
        assert desk.on(again, Decode, 1) == {1}
        leaves(desk, again, other)
        desk.dispatcher.tick(now + 40)
        desk.dispatcher.tick(now + 40 + OPTIONS.version_wait_s - 1)
        assert sink.error is None

    run(test)


def test_a_request_without_output_goes_to_the_version_that_serves() -> None:
    def test() -> None:
        desk = Desk(D)
        sink = desk.open(1)
        assert desk.on(D, Decode, 0) == {1}
        leaves(desk, D, NEW)
        assert desk.on(NEW, Decode, 1) == {1}
        desk.tokens(NEW, 1, 9, epoch=1)
        assert (sink.tokens, sink.error) == ([9], None)
        old_and_new = {one.fingerprint: one for one in desk.versions.all}
        assert old_and_new["new"].rooms == 1
        assert old_and_new["new"].streams == 1
        leaves(desk, NEW, D)
        assert desk.on(D, Decode, 2) == set(), "now it is the new version's"

    run(test)


def test_the_rooms_of_a_request_are_never_on_two_versions() -> None:
    def test() -> None:
        desk = Desk(D)
        sink = Sink()
        assignment = Assignment(desk.versions, desk.versions.all[0])
        desk.open(1, sink, assignment)
        desk.open(2, sink, assignment)
        now = time.monotonic()
        desk.models.update([NEW], now)
        (first, _) = rooms = [desk.dispatcher.rooms[number] for number in (1, 2)]
        first.on_worker_gone(D, "was lost", now)
        assert desk.on(NEW, Decode, 1) == set(), "the other may still get tokens of D"
        rooms[1].on_worker_gone(D, "was lost", now)
        desk.dispatcher.tick(now + 5)
        assert desk.on(NEW, Decode, 1) == {1, 2}
        assert (desk.versions.all[0].rooms, desk.versions.all[-1].rooms) == (0, 2)

    run(test)


def test_another_versions_pages_have_other_hashes() -> None:
    small = replace(NEW, groups=(group_layout(page_size=8),))

    def test() -> None:
        desk = Desk(D)
        desk.models.update([D, small], time.monotonic())
        assignment = Assignment(desk.versions, desk.versions.all[0])
        request = PlacementRequest(64, as_hashes([1, 2, 3, 4]), 4.0)
        assert assignment.adapted(request) is request
        desk.models.update([small], time.monotonic())
        assignment.rooms.clear()
        assignment.renew({})
        assert assignment.version.fingerprint == "new"
        assert assignment.adapted(request).hashes.tolist() == []

    run(test)


def test_the_requests_of_one_conversation_have_one_key() -> None:
    def key(**changes: object) -> bytes:
        base = {"request_id": "r", "prompts": [[1, 2, 3]], "sampling": SamplingParams()}
        return version_key(Submission(**{**base, **changes}))  # type: ignore[arg-type]

    assert key(opening="hello") == key(opening="hello", prompts=[[1, 2, 3, 4, 5]], request_id="s")
    assert key(session="s") == key(session="s", opening="other")
    long = [7] * 1000
    assert key(prompts=[long]) == key(prompts=[[*long, 8]])
    different = [key(), key(tenant="t"), key(opening="hello"), key(session="s"), key(prompts=[[1, 2]])]
    assert len(set(different)) == len(different)


def test_a_version_that_fails_its_streams_is_held_back_until_it_is_weighed_again() -> None:
    def test() -> None:
        desk = Desk(D)
        now = time.monotonic()
        sinks = {number: desk.open(number) for number in range(12)}
        desk.models.update([D, NEW], now)
        old, new = desk.versions.all
        for number in range(7):
            desk.dispatcher.take(Mail(D.mailbox, Rejected(number, 0, RejectKind.FAILED, "no")), now)
        assert not old.held_back, "seven may be chance"
        desk.dispatcher.take(Mail(D.mailbox, Rejected(7, 0, RejectKind.FAILED, "no")), now)
        assert old.held_back
        assert {desk.versions.choose(b"%d" % key) for key in range(50)} == {new}
        assert 7 in desk.on(NEW, Decode, 1), "the room that failed last has no output yet"
        desk.models.update([D], now)
        assert desk.versions.choose(b"k") is old, "better than none"
        desk.models.update([D, NEW], now)
        desk.versions.weigh({})
        assert {one.fingerprint for one in map(desk.versions.choose, (b"%d" % key for key in range(50)))} == {
            "f", "new"
        }  # fmt: skip
        assert all(sink.error is None for sink in sinks.values())

    run(test)


def test_a_version_whose_streams_go_well_or_whose_worker_is_lost_is_not_held_back() -> None:
    def test() -> None:
        desk = Desk(D)
        now = time.monotonic()
        for number in range(40):
            desk.open(number)
        desk.models.update([D, E, NEW], now)
        for number in range(10):
            desk.tokens(D, number, 7)
        for number in range(10, 19):
            desk.dispatcher.take(Mail(D.mailbox, Rejected(number, 0, RejectKind.FAILED, "no")), now)
        assert not desk.versions.all[0].held_back, "ten of nineteen went well"
        leaves(desk, D, E, NEW)
        assert not desk.versions.all[0].held_back, "a host that dies says nothing about the weights"

    run(test)


def test_a_later_part_of_a_request_stays_on_the_version_of_the_first() -> None:
    def test() -> None:
        desk = Desk(D)
        first = Assignment(desk.versions, desk.versions.all[0])
        desk.open(1, assignment=first)
        desk.tokens(D, 1, 7)
        desk.dispatcher.stop([1], "it is over")
        desk.models.update([D, NEW], time.monotonic())
        sink = desk.open(2, assignment=first.next_part())
        assert desk.on(D, Decode, 0) == {1, 2}
        leaves(desk, D, NEW)
        assert desk.on(NEW, Decode, 1) == set()
        assert sink.error is None
        desk.dispatcher.stop([2], "it is over")
        desk.models.update([NEW], time.monotonic())
        with pytest.raises(Unavailable, match="not served any more"):
            first.next_part()

    run(test)
