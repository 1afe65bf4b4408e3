"""The hand-off step by step, for models of one and of several KV groups: pages sent, pages held.

Both workers run in this thread; the fake engine's answers betray a page or a state that went astray.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import numpy as np
import pytest

from kvcache.radix_key import Namespace, RadixKey
from kvtransfer.pages import PageWrite
from kvtransfer.select import PoolSender
from prefill_node.room import PrefillHold, PrefillRoom
from tests.support.granted_writer import GrantedWriter
from tests.support.hand_off import GROUPS, TRANSFER_S, Pair, held, pair, prompt_of, right
from tests.support.left_over import left_over
from wire.messages.rooms import Decode
from wire.messages.transfer import KVTarget, TransferEndpoint
from wire.peer_monitors import PeerState
from worker.lent_prefixes import NotLent

PAGE_SIZE = 4
every_model = pytest.mark.parametrize("groups", GROUPS, ids=lambda groups: "+".join(("full", *groups)))


def target_of(both: Pair) -> KVTarget:
    """The newest KVTarget on its way."""
    return [letter.message for letter in both.network.letters if isinstance(letter.message, KVTarget)][-1]


def ask_and_see_target(both: Pair, room: int, prompt: list[int], n: int) -> KVTarget:
    """Ask, and stop when decode has sent its KVTarget."""
    both.ask(room, prompt, n)
    while not any(isinstance(letter.message, KVTarget) for letter in both.network.letters):
        index = next(i for i, letter in enumerate(both.network.letters) if isinstance(letter.message, Decode))
        both.deliver(index)
    return target_of(both)


@every_model
@pytest.mark.parametrize("length", [1, 4, 39, 40, 41, 90])
def test_decode_asks_each_group_for_what_it_lacks(groups: tuple[str, ...], length: int) -> None:
    """Every page of the full group, the window that the next query sees, one slot of the state group."""
    with pair(groups) as both:
        target = ask_and_see_target(both, 1, prompt_of(length, length), 9)
        pages = -(-length // PAGE_SIZE)
        assert set(target.groups) == {"full", *groups}
        assert (target.groups["full"].first_page, len(target.groups["full"].page_ids)) == (0, pages)
        if "window" in groups:
            first = max(0, length - 40 + 1) // PAGE_SIZE
            asked = target.groups["window"]
            assert (asked.first_page, len(asked.page_ids)) == (first, pages - first)
        if "state" in groups:
            assert (target.groups["state"].first_page, len(target.groups["state"].page_ids)) == (0, 1)
        both.run_dry()
        assert both.outputs[1].tokens == right(both, 1, groups)
        both.settle()


@every_model
def test_full_pages_that_decode_holds_do_not_travel_although_their_window_is_gone(
    groups: tuple[str, ...],
) -> None:
    """Another room that decodes from the prefix locks it, but its window is past the prefix."""
    prompt = prompt_of(2, 140)
    with pair(groups) as both:
        both.ask(1, prompt, 60)
        for step in itertools.count():
            both.step(step)
            if len(both.outputs[1].tokens) >= 5:
                break
        if "window" in groups:
            assert both.decode.parts.services.memory.cache.tree.evict("window", 1000) > 0
        target = ask_and_see_target(both, 2, prompt[:81], 20)
        asked = target.groups["full"]
        assert (asked.first_page, len(asked.page_ids)) == (20, 1), "the last page alone: it is not whole"
        if "window" in groups:
            asked = target.groups["window"]
            assert (asked.first_page, len(asked.page_ids)) == (42 // PAGE_SIZE, 21 - 42 // PAGE_SIZE)
        both.run_dry()
        assert both.outputs[2].tokens == right(both, 2, groups)
        both.settle()


@every_model
def test_a_room_without_target_holds_nothing_and_comes_back(groups: tuple[str, ...]) -> None:
    """Parked with its cache intact, and with its cache evicted by others meanwhile."""
    with pair(groups) as both:
        for room, crowd in ((1, 0), (2, 12)):
            both.ask(room, prompt_of(room, 70), 9)
            late = [letter for letter in both.network.letters if isinstance(letter.message, Decode)]
            both.network.letters = [letter for letter in both.network.letters if letter not in late]
            both.run_dry()
            (parked,) = both.prefill.rooms()
            assert parked.hold == "parked"
            assert held(both.prefill) == {}
            for other in range(crowd):
                both.ask(100 + other, prompt_of(100 + other, 90), 2)
                both.run_dry()
            both.network.letters += late
            both.run_dry()
            assert both.outputs[room].tokens == right(both, room, groups)
        both.settle()


@every_model
def test_abort_at_every_stage_leaves_nothing(groups: tuple[str, ...]) -> None:
    """The client leaves one step later each time, until the room is over before the abort."""
    for steps in itertools.count(0, 2):
        with pair(groups) as both:
            both.ask(1, prompt_of(1, 60), 5)
            for step in range(steps):
                both.step(step)
            over = not both.outputs[1].open
            both.abort(1)
            both.run_dry()
            both.settle()
        if over:
            assert steps > 20, "a hand-off has more steps than that"
            return


def test_an_abort_of_an_epoch_that_never_came_ends_the_older_one() -> None:
    with pair() as both:
        both.ask(1, prompt_of(1, 20), 100, split=False)
        while not both.outputs[1].tokens:
            both.turn(both.decode)
            while both.network.letters:
                both.deliver(0, keep=False)
        both.restart(1, split=False)
        both.network.letters.clear()  # its Decode is lost
        both.abort(1)
        both.run_dry()
        assert both.decode.rooms() == []
        both.settle()


@every_model
def test_what_a_writer_may_still_touch_is_quarantined_in_every_group(groups: tuple[str, ...]) -> None:
    with pair(groups) as both:
        target = ask_and_see_target(both, 1, prompt_of(1, 50), 9)
        writer = GrantedWriter(target)
        both.abort(1)
        to_decode = [letter.to == both.decode.record().mailbox for letter in both.network.letters]
        both.deliver(to_decode.index(True))
        report = both.decode.check_memory()
        assert report.quarantined_pages == len(target.groups["full"].page_ids)
        for group in groups:
            assert report.groups[group].quarantined == len(target.groups[group].page_ids) > 0
            assert report.groups[group].held == 0
        writer.end()
        both.run_dry()
        both.settle()


@every_model
def test_requests_and_evicted_nodes_are_freed_by_their_counts(groups: tuple[str, ...]) -> None:
    """freeze_gc relies on it. The pool holds a few rooms, so later ones evict what earlier ones left."""

    def serve(both: Pair, rooms: range) -> None:
        for room in rooms:
            both.ask(room, prompt_of(room // 2, 90), 9, split=room % 3 > 0)
            if room % 4 == 3:
                both.step(room)
                both.abort(room)
            both.run_dry()

    with pair(groups) as both:
        serve(both, range(6))  # what is made once
        with left_over("scheduler", "kvcache", "prefill_node", "decode_node", "kvtransfer", "wire") as found:
            serve(both, range(6, 30))
        assert found == []
        both.settle()


@pytest.mark.parametrize(
    "differs", [{"page_size": 8}, {"fake_groups": ()}], ids=lambda option: next(iter(option))
)
def test_workers_whose_pages_differ_refuse_each_other(differs: dict[str, Any]) -> None:
    with pair(("state",), prefill_differs=differs) as both:
        both.ask(1, prompt_of(1, 30), 5)
        both.run_dry()
        rejected = both.outputs[1].rejected
        assert rejected is not None
        assert "lays its pages out differently" in rejected.message
        both.settle()


@pytest.mark.parametrize("late", [False, True])
def test_a_retracted_room_goes_on_only_if_all_that_it_gave_to_its_sender_has_landed(
    monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """What has not been read when its pages are given back would be what others write there."""
    begun, gate, write = threading.Event(), threading.Event(), PoolSender.write

    def write_late(self: PoolSender, endpoint: TransferEndpoint, pages: PageWrite) -> int:
        begun.set()
        assert gate.wait(TRANSFER_S)
        return write(self, endpoint, pages)

    if late:
        monkeypatch.setattr(PoolSender, "write", write_late)
    with pair(("window",), {"max_total_tokens": 256}) as both:
        memory = both.prefill.parts.services.memory
        ask_and_see_target(both, 1, prompt_of(1, 120), 12)
        while both.network.letters:
            both.deliver(0)
        (room,) = both.prefill.rooms()
        assert isinstance(room, PrefillRoom)
        assert room.sender is not None
        while room.sender.start_send_idx < 24:
            both.turn(both.prefill)
        if late:  # a transfer that has not begun would be given up at once
            assert begun.wait(TRANSFER_S)
        while not (late or room.sender.idle):
            time.sleep(0.001)
        assert memory.swa is not None
        window = memory.swa.allocator
        taken = window.alloc_pages(window.available_pages())  # it waits for window pages
        assert taken is not None
        while not room.req.retractions:
            both.turn(both.prefill)
        memory.cache.tree.evict("full", memory.num_pages)
        window.free_page_ids(taken)
        while room.hold is not PrefillHold.HAND_OFF:
            both.turn(both.prefill)
        gate.set()
        both.run_dry()
        assert [one.blamed for one in both.outputs[1].rejections] == (["", ""] if late else [])
        if late:
            both.restart(1, split=True)
            both.run_dry()
        assert both.outputs[1].tokens == right(both, 1, ("window",))
        both.settle()


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_target_tells_that_a_decode_worker_is_up_again(backend: str) -> None:
    """Decode is connected to prefill again, and prefill not yet to decode. When prefill begins to watch it
    for the room, it is reported down once more."""
    with pair(kv_transfer_backend=backend) as both:
        both.ask(1, prompt_of(1, 40), 4)
        both.run_dry()  # prefill knows where decode's pools are
        mailbox: Any = both.prefill.parts.services.mailbox
        mailbox.peers = {both.decode.record().mailbox: PeerState.DOWN}
        both.turn(both.prefill)
        both.ask(2, prompt_of(2, 40), 4)
        both.arrive(both.hold_back(KVTarget))
        mailbox.peers = {both.decode.record().mailbox: PeerState.DOWN}
        both.run_dry()
        assert both.outputs[2].rejected is None
        assert both.outputs[2].tokens == right(both, 2)
        both.settle()


def test_a_loan_leaves_the_window_pages_that_a_room_was_promised() -> None:
    """Else the room would be retracted in the middle of its prompt."""
    lent = prompt_of(1, 40)
    with pair(("window",), {"max_total_tokens": 256}) as both:
        for room, prompt in ((1, prompt_of(9, 40)), (2, lent)):
            both.ask(room, prompt, 1)
            both.run_dry()
        prefixes = both.prefill.parts.role.lending._prefixes
        key = RadixKey(np.array(lent, np.int32), Namespace(both.prefill.options.model_name, "", ""), "")
        both.ask(3, prompt_of(2, 120), 12)
        both.deliver(0)
        (room_3,) = both.prefill.rooms()
        while room_3.req.kv_committed_len < 12:
            both.turn(both.prefill)
        with pytest.raises(NotLent, match="promised"):
            prefixes.lock(key, 0, {}, from_host=False)
        both.run_dry()
        assert room_3.req.retractions == 0
        assert both.outputs[3].tokens == right(both, 3, ("window",))
        both.settle()
