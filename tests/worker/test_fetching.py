"""Fetches between workers: what is copied is not computed, and whatever goes wrong, the answer is right.

The fake engine's answers betray a page or a state that went astray.
"""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
from msgspec import structs

from kvcache.tiers.tiers import Tiers
from kvtransfer.select import PoolSender
from tests.support.fleet import Fleet, fleet
from tests.support.granted_writer import GrantedWriter
from tests.support.hand_off import GROUPS, TRANSFER_S, Letter, held, prompt_of
from wire.checksums import NO_CHECKSUMS
from wire.mailbox import Mail
from wire.messages.transfer import Fetch, Fetched, FetchRefused, RefusalCause
from wire.peer_monitors import PeerState

every_model = pytest.mark.parametrize("groups", GROUPS, ids=lambda groups: "+".join(("full", *groups)))


def computed(workers: Fleet, worker: int) -> int:
    """Prompt tokens that a worker has computed so far."""
    return int(workers.metrics(worker).prefill_tokens)


@every_model
def test_what_another_worker_computed_is_fetched_and_only_the_rest_computed(groups: tuple[str, ...]) -> None:
    prompt = prompt_of(1, 90)
    with fleet(2, groups) as workers:
        workers.ask(1, 0, prompt)
        workers.run_dry()
        workers.ask(2, 1, prompt, holder=0)
        workers.run_dry()
        assert computed(workers, 1) == 2, "all but the last page border's state, window and KV"
        assert workers.metrics(1).fetched_tokens == 88
        assert workers.metrics(1).cached_from == {"peer": 88}
        timeline = workers.answers[2].timeline
        assert timeline is not None
        assert timeline.cached_from == {"peer": 88}
        for room in (1, 2):
            assert workers.answers[room].tokens == workers.right(room)
        workers.settle()


def computed_once(workers: Fleet, prompt: list[int]) -> None:
    """Room 1: worker 0 computes the prompt."""
    workers.ask(1, 0, prompt)
    workers.run_dry()


def until(workers: Fleet, kind: type[Any]) -> Letter:
    """Run until a message of this kind is on its way. It is taken from the network."""
    deadline = time.monotonic() + TRANSFER_S
    while True:
        for letter in workers.network.letters:
            if isinstance(letter.message, kind):
                workers.network.letters.remove(letter)
                return letter
        assert time.monotonic() < deadline, f"no {kind.__name__} was sent"
        if workers.network.letters:
            workers.deliver()
            continue
        for worker in range(len(workers.workers)):
            workers.turn(worker)
            workers.write(worker)


@every_model
def test_a_prefix_is_fetched_behind_what_is_here(groups: tuple[str, ...]) -> None:
    """Worker 1 has the first pages itself; they do not travel."""
    prompt = prompt_of(1, 90)
    with fleet(2, groups) as workers:
        computed_once(workers, prompt)
        workers.ask(2, 1, prompt[:41])
        workers.run_dry()
        before = computed(workers, 1)
        workers.ask(3, 1, prompt, holder=0)
        fetch = until(workers, Fetch)
        asked = fetch.message.groups["full"]
        assert (asked.first_page, len(asked.page_ids)) == (10, 12)
        workers.network.letters.append(fetch)
        workers.run_dry()
        assert computed(workers, 1) - before == 2
        assert workers.answers[3].tokens == workers.right(3)
        workers.settle()


@every_model
def test_a_shorter_prefix_is_granted(groups: tuple[str, ...]) -> None:
    prompt = prompt_of(1, 60)
    with fleet(2, groups) as workers:
        computed_once(workers, prompt)
        workers.ask(2, 1, [*prompt, *prompt_of(2, 30)], holder=0)
        workers.run_dry()
        assert workers.metrics(1).fetched_tokens >= 56, "as far as it was computed, or to its last state"
        assert computed(workers, 1) == 90 - workers.metrics(1).fetched_tokens
        assert workers.answers[2].tokens == workers.right(2)
        workers.settle()


def tiers_of(workers: Fleet, worker: int) -> Tiers:
    tiers = workers.workers[worker].parts.services.memory.tiers
    assert tiers is not None
    return tiers


def evict(workers: Fleet, worker: int, pages: int) -> None:
    """So many pages of each group leave the worker's device."""
    tree = workers.workers[worker].parts.services.memory.cache.tree
    for group in ("full", *workers.groups):
        tree.evict(group, pages)


def locked_on_host(workers: Fleet, worker: int) -> int:
    """Pages of the worker's host whose copies are locked."""
    nodes = workers.workers[worker].parts.services.memory.cache.tree.nodes()
    return sum(node.num_pages for node in nodes if node.host is not None and node.host.locks)


@every_model
@pytest.mark.parametrize("evicted", [5, 23], ids=["its end", "all of it"])
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_what_is_on_the_host_is_lent_from_there(groups: tuple[str, ...], policy: str, evicted: int) -> None:
    """Worker 0 loads nothing, and worker 1 gets the prefix that both tiers hold."""
    prompt = prompt_of(1, 90)
    with fleet(2, groups, hicache_ratio=2.0, hicache_write_policy=policy) as workers:
        computed_once(workers, prompt)
        evict(workers, 0, evicted)
        workers.ask(2, 1, prompt, holder=0)
        workers.run_dry()
        reads, loads = tiers_of(workers, 0).reads, tiers_of(workers, 0).moves.counts.loads
        assert reads.counts.host_pages >= evicted - 1, "but for the last page, which is not asked for"
        assert (reads.counts.failed, loads) == (0, 0)
        assert workers.metrics(0).lent_pages == 22
        assert workers.metrics(1).cached_from == {"peer": 88}
        assert computed(workers, 1) == 2
        assert workers.answers[2].tokens == workers.right(2)
        workers.settle()


@every_model
def test_pages_lent_from_the_host_stay_there_until_they_are_written(groups: tuple[str, ...]) -> None:
    """The holder gives up all that it can on both tiers while they are lent, and computes something else."""
    prompt = prompt_of(1, 90)
    with fleet(2, groups, hicache_ratio=1.0) as workers:
        computed_once(workers, prompt)
        evict(workers, 0, 1000)
        workers.ask(2, 1, prompt, holder=0)
        fetch, holder = until(workers, Fetch), workers.workers[0]
        holder.turn([Mail(fetch.sender, fetch.message)])
        assert locked_on_host(workers, 0) == 22
        evict(workers, 0, 1000)
        tiers_of(workers, 0).host.clear()
        workers.stopped.add(1)
        workers.ask(3, 0, prompt_of(3, 90))
        for _ in range(40):
            workers.turn(0)
            while workers.network.letters and workers.network.letters[0].to == workers.address(0):
                workers.deliver()
        holder.check_memory()
        assert locked_on_host(workers, 0) == 22
        workers.stopped.clear()
        workers.run_dry()
        assert locked_on_host(workers, 0) == 0
        assert workers.metrics(1).fetched_tokens == 88
        for room in (2, 3):
            assert workers.answers[room].tokens == workers.right(room)
        workers.settle()


@every_model
@pytest.mark.parametrize("how", ["aborted", "down"])
def test_a_loan_from_the_host_whose_requester_is_gone_ends_with_its_write(
    groups: tuple[str, ...], how: str
) -> None:
    prompt = prompt_of(1, 90)
    with fleet(2, groups, hicache_ratio=1.0) as workers:
        computed_once(workers, prompt)
        evict(workers, 0, 1000)
        workers.ask(2, 1, prompt, holder=0)
        fetch = until(workers, Fetch)
        workers.workers[0].turn([Mail(fetch.sender, fetch.message)])
        if how == "aborted":
            workers.abort(2)
            while workers.network.letters:
                workers.deliver()
        else:
            workers.stopped.add(1)
            workers.down(1)
            workers.turn(0)
        assert locked_on_host(workers, 0) == 22, "the write has not ended"
        workers.run_dry()
        assert locked_on_host(workers, 0) == 0
        assert tiers_of(workers, 0).is_idle
        assert (tiers_of(workers, 0).reads.counts.failed, workers.metrics(0).lent_pages) == (1, 0)
        workers.stopped.clear()
        workers.down(1, PeerState.UP)
        workers.ask(3, 1, prompt, holder=0)
        workers.run_dry()
        assert workers.answers[3].tokens == workers.right(3)
        workers.settle()


@pytest.mark.parametrize(
    ("share", "evicted", "outcome"), [(0.25, 1000, "all"), (0.2, 1000, "nothing"), (0.125, 11, "a part")]
)
def test_no_more_is_lent_from_the_host_than_a_share_of_it(share: float, evicted: int, outcome: str) -> None:
    """Of 128 pages on the device, and of 64 on the host. When that is too few, the device's part is lent."""
    prompt = prompt_of(1, 60)  # of its 15 pages 14 are asked for
    with fleet(2, hicache_ratio=0.5, peer_lend_share=share) as workers:
        computed_once(workers, prompt)
        evict(workers, 0, evicted)
        workers.ask(2, 1, prompt, holder=0)
        workers.run_dry()
        fetched, from_host = workers.metrics(1).fetched_tokens, tiers_of(workers, 0).reads.counts.host_pages
        if outcome == "nothing":
            assert (workers.metrics(1).fetches, fetched) == ({"refused_busy": 1}, 0)
        elif outcome == "all":
            assert (fetched, from_host) == (56, 14)
        else:
            assert 0 < fetched <= 4 * 4
            assert from_host == 0
        assert workers.answers[2].tokens == workers.right(2)
        workers.settle()


def test_where_the_transport_cannot_read_the_host_only_the_device_s_part_is_lent() -> None:
    prompt = prompt_of(1, 90)
    with (
        fleet(2, hicache_ratio=2.0) as workers,
        mock.patch.object(PoolSender, "reads_host", return_value=False),
    ):
        computed_once(workers, prompt)
        evict(workers, 0, 5)
        workers.ask(2, 1, prompt, holder=0)
        workers.run_dry()
        assert tiers_of(workers, 0).reads.counts.host_pages == 0
        on_device = workers.metrics(1).fetched_tokens
        assert 0 < on_device <= 18 * 4
        assert computed(workers, 1) == 90 - on_device
        assert workers.answers[2].tokens == workers.right(2)
        workers.settle()


def test_a_worker_says_whether_it_fetches_and_how_much_its_host_holds() -> None:
    with fleet(2, hicache_ratio=2.0, differs={1: {"peer_lend_share": 0.0}}) as workers:
        records = [worker.record() for worker in workers.workers]
        assert [record.peer_fetch for record in records] == [True, False]
        assert [record.host_tokens for record in records] == [1024, 1024]


def test_what_is_absent_is_refused_at_once_and_computed() -> None:
    with fleet(2) as workers:
        workers.ask(1, 1, prompt_of(1, 60), holder=0)
        workers.run_dry()
        assert workers.metrics(1).fetches == {"refused_absent": 1}
        assert workers.answers[1].tokens == workers.right(1)
        workers.settle()


def test_another_tenant_gets_nothing() -> None:
    prompt = prompt_of(1, 60)
    with fleet(2) as workers:
        workers.ask(1, 0, prompt, tenant="a")
        workers.run_dry()
        for room, tenant in ((2, ""), (3, "b")):
            workers.ask(room, 1, prompt, holder=0, tenant=tenant)
            workers.run_dry()
        assert workers.metrics(1).fetches == {"refused_absent": 2}
        workers.ask(4, 1, prompt_of(1, 60), holder=0, tenant="a")
        workers.run_dry()
        assert workers.metrics(1).fetched_tokens == 56
        workers.settle()


def test_workers_that_lay_pages_out_differently_refuse() -> None:
    prompt = prompt_of(1, 60)
    with fleet(2, differs={1: {"page_size": 8}}) as workers:
        computed_once(workers, prompt)
        workers.ask(2, 1, prompt, holder=0)
        workers.run_dry()
        assert workers.metrics(1).fetches == {"refused_different": 1}
        assert workers.answers[2].tokens == workers.right(2)
        workers.settle()


def test_no_more_is_lent_than_a_share_of_the_pool() -> None:
    prompt = prompt_of(1, 60)
    with fleet(2, peer_lend_share=0.1) as workers:
        computed_once(workers, prompt)
        workers.ask(2, 1, prompt, holder=0)
        workers.run_dry()
        assert workers.metrics(1).fetches == {"refused_busy": 1}
        workers.settle()


@every_model
def test_a_holder_that_stops_is_not_waited_for(groups: tuple[str, ...]) -> None:
    """At the deadline the request is computed in other pages; the holder's write ends in quarantine."""
    prompt = prompt_of(1, 90)
    with fleet(2, groups) as workers:
        computed_once(workers, prompt)
        workers.ask(2, 1, prompt, holder=0)
        fetch = until(workers, Fetch)
        workers.stopped.add(0)
        workers.run_dry()
        report = held(workers.workers[1])
        assert report["held_pages"] == len(fetch.message.groups["full"].page_ids)
        assert not workers.answers[2].tokens
        workers.pass_time(6.0)
        workers.run_dry()
        assert workers.metrics(1).fetches == {"late": 1}
        assert workers.answers[2].tokens == workers.right(2)
        workers.stopped.clear()
        workers.network.letters.append(fetch)
        workers.run_dry()
        workers.settle()


def test_pages_that_are_being_written_are_quarantined_until_the_fence() -> None:
    prompt = prompt_of(1, 90)
    with fleet(2) as workers:
        computed_once(workers, prompt)
        workers.ask(2, 1, prompt, holder=0)
        fetch = until(workers, Fetch).message
        writer = GrantedWriter(fetch)
        workers.abort(2)
        workers.run_dry()
        report = workers.workers[1].check_memory()
        assert (report.held_pages, report.quarantined_pages) == (0, len(fetch.groups["full"].page_ids))
        workers.ask(3, 1, prompt)
        workers.run_dry()
        assert workers.answers[3].tokens == workers.right(3)
        writer.end()
        workers.run_dry()
        assert workers.workers[1].check_memory().quarantined_pages == 0
        workers.settle()


def test_a_holder_that_is_down_is_not_asked() -> None:
    prompt = prompt_of(1, 60)
    with fleet(2) as workers:
        computed_once(workers, prompt)
        workers.ask(2, 1, prompt, holder=0)
        until(workers, Fetch)
        workers.down(0)
        workers.run_dry()
        workers.ask(3, 1, prompt_of(3, 60), holder=0)
        workers.run_dry()
        assert workers.metrics(1).fetches["failed"] == 1
        assert workers.metrics(1).fetches["skipped_down"] == 1
        for room in (2, 3):
            assert workers.answers[room].tokens == workers.right(room)
        workers.settle()


def test_a_stranger_s_answer_changes_nothing() -> None:
    prompt = prompt_of(1, 60)
    with fleet(3) as workers:
        computed_once(workers, prompt)
        workers.ask(2, 1, prompt, holder=0)
        fetch = until(workers, Fetch)
        for lie in (
            FetchRefused(fetch.message.transfer, RefusalCause.ABSENT, ""),
            Fetched(fetch.message.transfer, 14, bytes(32), 0, NO_CHECKSUMS),
        ):
            workers.network.letters.append(Letter(workers.address(2), workers.address(1), lie))
            workers.run_dry()
            assert workers.workers[1].parts.role.fetching.busy
        workers.network.letters.append(fetch)
        workers.run_dry()
        assert workers.metrics(1).fetched_tokens == 56
        assert workers.answers[2].tokens == workers.right(2)
        workers.settle()


@pytest.mark.parametrize(
    "lie",
    [{"pages": 3}, {"pages": 10_000}, {"digest": bytes(32)}, {"kv_bytes": 5}, {"checksums": NO_CHECKSUMS}],
)
def test_what_does_not_agree_with_what_landed_is_computed(lie: dict[str, Any]) -> None:
    prompt = prompt_of(1, 60)
    with fleet(2) as workers:
        computed_once(workers, prompt)
        workers.ask(2, 1, prompt, holder=0)
        told = until(workers, Fetched)
        workers.network.letters.append(told._replace(message=structs.replace(told.message, **lie)))
        workers.run_dry()
        assert workers.metrics(1).fetches["failed"] == 1
        assert workers.metrics(1).fetched_tokens == 0
        assert workers.answers[2].tokens == workers.right(2)
        workers.settle()


def test_lost_and_repeated_messages_change_nothing() -> None:
    prompt = prompt_of(1, 60)
    with fleet(2) as workers:
        computed_once(workers, prompt)
        workers.ask(2, 1, prompt, holder=0)
        until(workers, Fetch)
        workers.pass_time(0.3)
        again = until(workers, Fetch)
        workers.network.letters += [again, again]
        until(workers, Fetched)
        workers.pass_time(1.0)
        workers.run_dry()
        assert workers.metrics(0).lent_pages == 14
        assert workers.metrics(1).fetched_tokens == 56
        workers.settle()


@every_model
def test_lent_pages_are_locked_while_they_are_written(groups: tuple[str, ...]) -> None:
    """The holder evicts all that it can while the pages are lent."""
    prompt = prompt_of(1, 90)
    with fleet(2, groups) as workers:
        computed_once(workers, prompt)
        workers.ask(2, 1, prompt, holder=0)
        fetch = until(workers, Fetch)
        holder = workers.workers[0]
        holder.turn([Mail(fetch.sender, fetch.message)])
        tree = holder.parts.services.memory.cache.tree
        for group in ("full", *groups):
            tree.evict(group, 1000)
        workers.run_dry()
        assert workers.metrics(1).fetched_tokens == 88
        assert held(holder) == {}
        assert workers.answers[2].tokens == workers.right(2)
        workers.settle()


def test_copies_are_evicted_before_what_was_computed_here() -> None:
    own, other = prompt_of(1, 61), prompt_of(2, 61)
    with fleet(2) as workers:
        computed_once(workers, other)
        workers.ask(2, 1, own, n=1)
        workers.run_dry()
        workers.ask(3, 1, other, n=1, holder=0)
        workers.run_dry()
        memory = workers.workers[1].parts.services.memory
        memory.cache.tree.evict("full", 10)
        workers.ask(4, 1, own, n=1)
        workers.run_dry()
        assert workers.metrics(1).cached_tokens == 60 + 60, "the copy went, though it was used last"
        workers.settle()


def test_what_a_decode_worker_lent_is_evicted_after_what_it_did_not() -> None:
    lent, newer = prompt_of(1, 61), prompt_of(2, 61)
    with fleet(2) as workers:
        computed_once(workers, lent)
        workers.ask(2, 1, lent, n=1, holder=0)
        workers.ask(3, 0, newer, n=1)
        workers.run_dry()
        assert workers.metrics(0).lent_pages == 15
        workers.ask(4, 0, prompt_of(3, 5), n=1)
        workers.run_dry()
        evict(workers, 0, 15)
        for room, prompt in ((5, lent), (6, newer)):
            workers.ask(room, 0, prompt, n=1)
            workers.run_dry()
        assert [sum(workers.answers[room].timeline.cached_from.values()) for room in (5, 6)] == [60, 0]  # type: ignore[union-attr]
        workers.settle()


def test_fetches_of_two_requests_do_not_hold_up_a_third() -> None:
    prompt = prompt_of(1, 60)
    with fleet(2) as workers:
        computed_once(workers, prompt)
        workers.ask(2, 1, prompt, holder=0)
        until(workers, Fetch)
        workers.ask(3, 1, prompt_of(3, 30))
        workers.run_dry()
        assert workers.answers[3].tokens == workers.right(3)
        assert workers.workers[1].parts.role.scheduler.load().waiting_requests == 1
        workers.pass_time(6.0)
        workers.run_dry()
        assert workers.answers[2].tokens == workers.right(2)
        workers.settle()
