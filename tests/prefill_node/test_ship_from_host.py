"""Pages on the prefill worker's host go to decode from there: before they are loaded, or without a load."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest

from kvcache.radix_tree import evict_all
from kvcache.tiers.copier import HostCopier
from kvcache.tiers.tiers import Tiers
from kvtransfer.select import PoolSender
from kvtransfer.shm import ShmSender
from prefill_node.room import PrefillHold, PrefillRoom
from scheduler.pages import Pages
from tests.support.hand_off import GROUPS, TRANSFER_S, Pair, held, pair, prompt_of, right
from wire.checksums import ChecksumMode
from wire.messages.rooms import Prefill
from wire.messages.transfer import KVDone, KVReady, KVTarget
from wire.peer_monitors import PeerState
from wire.records import MovedPages
from worker.figures import worker_figures
from worker.loop import Worker

PROMPT = prompt_of(1, 80)  # twenty pages
MORE = prompt_of(2, 30)
ON_HOST = {"hicache_ratio": 8.0, "hicache_write_policy": "write_back"}


@contextmanager
def serving(groups: tuple[str, ...] = (), **options: Any) -> Iterator[Pair]:
    """Only prefill has a host tier, so that decode lacks what it has given up."""
    with pair(groups, prefill_differs=ON_HOST, max_total_tokens=256, **options) as both:
        yield both


def tiers_of(worker: Worker) -> Tiers:
    tiers = worker.parts.services.memory.tiers
    assert tiers is not None
    return tiers


def demote(both: Pair) -> None:
    """What prefill has cached is on its host alone; decode has nothing."""
    both.run_dry()
    for worker in (both.prefill, both.decode):
        evict_all(worker.parts.services.memory.cache.tree)
    assert not np.any([node.is_resident for node in both.prefill.parts.services.memory.cache.tree.nodes()])


def run_until(both: Pair, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TRANSFER_S
    while not condition():
        assert time.monotonic() < deadline, "it never comes"
        both.turn(both.prefill)
        both.turn(both.decode)
        if both.network.letters:
            both.deliver(0)


def computed(both: Pair) -> int:
    return both.prefill._scheduler.metrics.prefill_tokens


def room_of(both: Pair, number: int) -> PrefillRoom:
    room = both.prefill.parts.services.rooms.get(number)
    assert isinstance(room, PrefillRoom)
    return room


def locked(both: Pair) -> int:
    """Host copies that are locked on prefill."""
    nodes = both.prefill.parts.services.memory.cache.tree.nodes()
    return sum(node.host is not None and node.host.locks > 0 for node in nodes)


def is_read_and_loaded(both: Pair) -> bool:
    """Whether prefill has begun to send from the host, and to load."""
    tiers = tiers_of(both.prefill)
    return tiers.reads.under_way == 1 and tiers.moves.counts.loads == 1


def over(both: Pair) -> None:
    """Nothing is held or locked on any tier."""
    both.settle()
    assert tiers_of(both.prefill).is_idle
    assert locked(both) == 0
    both.prefill.check_memory()


class Stopped:
    """Calls of a method wait until `go` is set. `begun`: there is one."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()


@contextmanager
def stopped(kind: type, name: str) -> Iterator[Stopped]:
    """Until the block ends, at the latest."""
    calls, real = Stopped(), getattr(kind, name)

    def late(*args: Any, **kwargs: Any) -> Any:
        calls.begun.set()
        assert calls.go.wait(TRANSFER_S)
        return real(*args, **kwargs)

    with mock.patch.object(kind, name, late):
        try:
            yield calls
        finally:
            calls.go.set()


def ask_first(both: Pair, groups: tuple[str, ...] = (), prompt: list[int] = PROMPT) -> None:
    both.ask(1, prompt, 1)
    both.run_dry()
    assert both.outputs[1].tokens == right(both, 1, groups)
    demote(both)


def park(both: Pair, number: int, prompt: list[int]) -> Any:
    """Prefill has computed a room, and its pages are on the host. Returns the target, which has not come."""
    both.ask(number, prompt, 6)
    target = both.hold_back(KVTarget)
    run_until(both, lambda: room_of(both, number).hold is PrefillHold.PARKED)
    both.network.letters = [one for one in both.network.letters if not isinstance(one.message, KVReady)]
    while not tiers_of(both.prefill).is_idle:
        both.turn(both.prefill)
    evict_all(both.prefill.parts.services.memory.cache.tree)
    return target


# -- before the load -----------------------------------------------------------------------------------


@pytest.mark.parametrize("checksums", [ChecksumMode.NONE, ChecksumMode.ALL])
@pytest.mark.parametrize("groups", GROUPS, ids="+".join)
def test_what_is_on_the_host_leaves_while_it_is_loaded(
    groups: tuple[str, ...], checksums: ChecksumMode
) -> None:
    with serving(groups, kv_checksums=checksums) as both:
        ask_first(both, groups)
        reads, moves = tiers_of(both.prefill).reads.counts, tiers_of(both.prefill).moves.counts
        with stopped(HostCopier, "to_device"):
            both.ask(2, PROMPT + MORE, 6)
            run_until(both, lambda: reads.host_pages > 0)
            assert reads.host_pages == 20
            assert moves.loads == 1
            assert moves.to_device_pages == 0, "it was sent after the load"
            assert room_of(both, 2).sender.start_send_idx == 80
        both.run_dry()
        assert both.outputs[2].tokens == right(both, 2, groups)
        assert reads.host_bytes == 20 * tiers_of(both.prefill).host.pool.arenas["full"].page_bytes
        services, metrics = both.prefill.parts.services, both.prefill._scheduler.metrics
        told = worker_figures(services.memory, metrics).moves["to_peer"]
        assert told == MovedPages(reads.host_pages, reads.host_bytes, 0, 0)
        assert reads.failed == 0
        over(both)


def test_what_decode_has_is_not_sent() -> None:
    with serving() as both:
        ask_first(both, prompt=PROMPT)
        both.ask(2, PROMPT[:40] + MORE, 1, split=False)
        both.run_dry()
        both.ask(3, PROMPT, 6)
        both.run_dry()
        assert both.outputs[3].tokens == right(both, 3)
        assert tiers_of(both.prefill).reads.counts.host_pages == 10
        over(both)


def test_the_part_on_the_device_leaves_with_the_rest() -> None:
    with serving() as both:
        ask_first(both)
        both.ask(2, PROMPT[:40], 1)
        both.run_dry()
        evict_all(both.decode.parts.services.memory.cache.tree)
        with stopped(HostCopier, "to_device"):
            both.ask(3, PROMPT + MORE, 6)
            before = tiers_of(both.prefill).reads.counts.host_pages
            run_until(both, lambda: tiers_of(both.prefill).reads.counts.host_pages > before)
            assert tiers_of(both.prefill).reads.counts.host_pages == before + 10
            assert room_of(both, 3).sender.start_send_idx == 80
        both.run_dry()
        assert both.outputs[3].tokens == right(both, 3)
        over(both)


@pytest.mark.parametrize("end", ["aborted", "down"])
def test_a_room_that_ends_keeps_its_locks_until_nothing_is_read(end: str) -> None:
    with serving() as both:
        ask_first(both)
        with stopped(HostCopier, "to_device") as load, stopped(ShmSender, "_move") as move:
            both.ask(2, PROMPT + MORE, 6)
            run_until(both, lambda: is_read_and_loaded(both))
            sender = room_of(both, 2).sender
            assert move.begun.wait(TRANSFER_S)
            load.go.set()
            run_until(both, lambda: tiers_of(both.prefill).moves.is_idle)
            assert locked(both) > 0, "the load has unlocked what the sender reads"
            if end == "aborted":
                both.abort(2)
                run_until(both, lambda: not both.prefill.rooms())
            else:
                mailbox: Any = both.prefill.parts.services.mailbox
                mailbox.peers[both.decode.record().mailbox] = PeerState.DOWN
                both.outputs[2].aborted = True
                both.turn(both.prefill)
            both.prefill.check_memory()
            assert locked(both) > 0
            assert tiers_of(both.prefill).host.clear() == 0, "a copy has gone that is being read"
        run_until(both, lambda: tiers_of(both.prefill).is_idle and not both.prefill.rooms())
        assert sender is not None
        sender.send({"full": np.ones(28, np.int64)}, 112, last=True)
        both.turn(both.prefill)
        assert not any(isinstance(letter.message, KVDone) for letter in both.network.letters)
        assert tiers_of(both.prefill).reads.counts.failed == 1
        both.abort(2)
        over(both)


def test_a_worker_that_changes_its_role_leaves_no_locks() -> None:
    with serving() as both:
        ask_first(both)
        with stopped(HostCopier, "to_device"), stopped(ShmSender, "_move") as move:
            both.ask(2, PROMPT + MORE, 6)
            run_until(both, lambda: is_read_and_loaded(both))
            both.abort(2)
            run_until(both, lambda: not both.prefill.rooms())
            move.go.set()
            both.prefill.parts.role.close()
            assert not tiers_of(both.prefill).reads.under_way


# -- without a load ------------------------------------------------------------------------------------


@pytest.mark.parametrize("checksums", [ChecksumMode.NONE, ChecksumMode.ALL])
@pytest.mark.parametrize("groups", GROUPS, ids="+".join)
def test_a_parked_room_is_sent_from_the_host(groups: tuple[str, ...], checksums: ChecksumMode) -> None:
    with serving(groups, kv_checksums=checksums) as both:
        target = park(both, 1, PROMPT)
        before, tiers = computed(both), tiers_of(both.prefill)
        both.arrive(target)
        both.run_dry()
        assert both.outputs[1].tokens == right(both, 1, groups)
        assert computed(both) == before
        assert tiers.moves.counts.loads == 0
        assert tiers.reads.counts.host_pages == 20
        pages = {
            "full": 20,
            "window": len(target.message.groups["window"].page_ids) if "window" in groups else 0,
        }
        pages["state"] = 1 if "state" in groups else 0
        arenas = tiers.host.pool.arenas
        assert tiers.reads.counts.host_bytes == sum(pages[name] * arenas[name].page_bytes for name in arenas)
        over(both)


@pytest.mark.parametrize("groups", GROUPS, ids="+".join)
def test_a_last_page_that_is_not_whole_is_computed_again(groups: tuple[str, ...]) -> None:
    with serving(groups) as both:
        target = park(both, 1, [*PROMPT, 7])
        before, tiers = computed(both), tiers_of(both.prefill)
        both.arrive(target)
        both.run_dry()
        assert both.outputs[1].tokens == right(both, 1, groups)
        assert 0 < computed(both) - before <= 5
        assert tiers.moves.counts.loads == 1
        assert tiers.reads.counts.host_pages == 20
        over(both)


def test_of_a_window_the_last_pages_are_enough() -> None:
    with serving(("window",)) as both:
        target, tiers = park(both, 1, PROMPT), tiers_of(both.prefill)
        first = next(both.prefill.parts.services.memory.cache.tree.nodes())
        assert first.host is not None
        assert first.num_pages < 20
        tiers.host.pool.free({"window": first.host.ids.pop("window")})
        key = Pages.key(room_of(both, 1).req, len(PROMPT))
        read = tiers.reads.begin_whole(key, {"full": 0, "window": 0})
        assert read is not None
        tiers.reads.end(read, is_whole=False)
        both.arrive(target)
        both.run_dry()
        assert both.outputs[1].tokens == right(both, 1, ("window",))
        assert tiers.reads.counts.host_pages == 20
        over(both)


def test_a_prompt_waits_for_window_pages_that_parked_rooms_are_sent_from() -> None:
    """They are promised to it. If it were retracted, what was sent of it would be worthless."""
    small = {**ON_HOST, "max_total_tokens": 256, "swa_full_tokens_ratio": 0.3}
    options = {"max_total_tokens": 2048, "swa_full_tokens_ratio": 1.0}
    with pair(("window",), small, **options) as both, stopped(PoolSender, "write") as writes:
        targets = []
        for number in range(1, 4):
            both.ask(number, prompt_of(number, 40), 6)
            targets.append(both.hold_back(KVTarget))
            run_until(both, lambda number=number: room_of(both, number).hold is PrefillHold.PARKED)
        both.network.letters = [one for one in both.network.letters if not isinstance(one.message, KVReady)]
        both.ask(4, prompt_of(4, 120), 6)
        for letter in [both.hold_back(Prefill), both.hold_back(KVTarget)]:
            both.arrive(letter)
        req = room_of(both, 4).req
        run_until(both, lambda: req.kv_committed_len >= 12)
        for target in targets:
            both.arrive(target)
        for _ in range(40):
            both.turn(both.prefill)
        assert req.kv_committed_len < 120
        writes.go.set()
        both.run_dry()
        assert req.retractions == 0
        for number, output in both.outputs.items():
            assert output.rejections == []
            assert output.tokens == right(both, number, ("window",))
        over(both)


def test_what_is_on_no_tier_is_computed_again() -> None:
    with serving() as both:
        target = park(both, 1, PROMPT)
        before, tiers = computed(both), tiers_of(both.prefill)
        tiers.host.clear()
        both.arrive(target)
        both.run_dry()
        assert both.outputs[1].tokens == right(both, 1)
        assert computed(both) - before == 80
        assert tiers.reads.counts.host_pages == 0
        over(both)


def test_an_aborted_room_that_was_parked_gives_its_locks_back() -> None:
    with serving() as both:
        target = park(both, 1, PROMPT)
        with stopped(ShmSender, "_move") as move:
            both.arrive(target)
            assert move.begun.wait(TRANSFER_S)
            assert locked(both) > 0
            both.abort(1)
            run_until(both, lambda: not both.prefill.rooms())
            assert locked(both) > 0
        run_until(both, lambda: tiers_of(both.prefill).is_idle)
        over(both)


def test_a_transport_that_cannot_read_the_host_sends_what_was_loaded() -> None:
    with mock.patch.object(PoolSender, "reads_host", return_value=False), serving() as both:
        ask_first(both)
        both.ask(2, PROMPT + MORE, 6)
        both.run_dry()
        assert both.outputs[2].tokens == right(both, 2)
        target = park(both, 3, PROMPT[:40])
        both.arrive(target)
        both.run_dry()
        assert both.outputs[3].tokens == right(both, 3)
        assert tiers_of(both.prefill).reads.counts.host_pages == 0
        assert tiers_of(both.prefill).moves.counts.loads == 2
        assert held(both.prefill) == {}
        over(both)
