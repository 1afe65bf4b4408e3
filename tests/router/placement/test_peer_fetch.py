"""Who is named as a source, and that a fetch is priced against computing and queueing."""

from __future__ import annotations

import random
from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from router.index.global_index import GlobalIndex, as_hashes
from router.placement.placer import Placer
from router.placement.policies import POLICIES, make_policy
from router.placement.policy import Choice, PlacementRequest
from router.placement_options import PolicyWeights
from tests.router.directory.test_directory import record
from wire.messages.rooms import FetchSource
from wire.records import Role, WorkerLoad, WorkerRecord

PAGE = 16
DEFAULTS = PolicyWeights.model_validate({})
NEXT_TOKEN = 8  # tokens of a prompt after its last whole page


class Named(Placer):
    """A placer whose index a test can write to."""

    def __init__(
        self, name: str = "kv", weights: PolicyWeights = DEFAULTS, peer_fetch: bool | None = True
    ) -> None:
        self.index = GlobalIndex()
        super().__init__(self.index, make_policy(name, weights, 0, random.Random(1), peer_fetch), 10.0)

    def hold(self, worker: str, pages: int, medium: str = "GPU", first: int = 0) -> None:
        self.index.store(worker, list(range(first, first + pages)), medium)

    def see(self, *records: WorkerRecord) -> None:
        self.update(list(records), 0.0)
        self.page_tokens = PAGE

    def ask(self, pages: int) -> Choice:
        tokens = pages * PAGE + NEXT_TOKEN
        choice = self.choose(PlacementRequest(tokens, as_hashes(range(pages)), 16.0), 0.0)
        assert choice is not None
        return choice

    def source(self, pages: int) -> FetchSource | None:
        return self.place(self.ask(pages), 0.0).source


def worker(name: str, queued: int = 0, host: str = "") -> WorkerRecord:
    """p0 prefills, d0 decodes."""
    load = WorkerLoad(
        queued_prefill_tokens=queued, free_tokens=1 << 20, headroom_tokens=1 << 20, headroom_rows=64
    )
    role = Role.DECODE if name.startswith("d") else Role.PREFILL
    return record(name, role=role, load=load, host=host or name, total_tokens=1 << 20, peer_fetch=True)


def placed_on(choice: Choice) -> str:
    chosen = choice.prefill_worker or choice.decode_worker
    return chosen.record.id


def test_an_idle_worker_is_told_who_holds_the_prefix() -> None:
    made = Named()
    made.see(worker("p0", queued=50_000), worker("p1"), worker("d0"))
    made.hold("p0", 600)
    choice = made.ask(600)
    assert placed_on(choice) == "p1"
    placement = made.place(choice, 0.0)
    assert placement.source == FetchSource("p0", worker("p0").mailbox, 600)
    assert placement.prefill_tokens == NEXT_TOKEN


def test_the_holder_itself_fetches_nothing() -> None:
    made = Named()
    made.see(worker("p0"), worker("p1"), worker("d0"))
    made.hold("p0", 600)
    choice = made.ask(600)
    assert (placed_on(choice), choice.fetch) == ("p0", None)


def test_the_one_with_the_longest_prefix_is_named_and_only_whole_pages_count() -> None:
    made = Named("round-robin")
    made.see(worker("p0"), worker("p1"), worker("p2"), worker("d0"))
    made.hold("p1", 200)
    made.hold("p2", 400)
    made.hold("p2", 100, first=401)  # page 400 is missing: what is behind it is of no use
    choice = made.ask(600)
    assert placed_on(choice) == "p0"
    assert choice.fetch is not None
    assert (choice.fetch.holder.record.id, choice.fetch.pages, choice.fetch.tokens) == ("p2", 400, 400 * PAGE)


def test_a_decode_worker_is_a_source_and_so_is_host_memory() -> None:
    made = Named("round-robin")
    made.see(worker("p0"), worker("d0"))
    made.hold("d0", 300, "CPU")
    source = made.source(600)
    assert source is not None
    assert (source.worker, source.pages) == ("d0", 300)


def test_of_a_prefill_and_a_decode_worker_with_the_same_pages_the_decode_worker_is_named() -> None:
    made = Named()
    made.see(worker("p0", queued=50_000), worker("p1"), worker("d0"), worker("d1"))
    made.hold("p0", 600)
    made.hold("d0", 600)
    source = made.source(600)
    assert source is not None
    assert source.worker == "d0"


def test_pages_that_are_expected_or_in_storage_are_no_source() -> None:
    made = Named("round-robin")
    made.see(worker("p0"), worker("p1"), worker("d0"))
    made.index.expect(made.index.join("p1"), as_hashes(range(600)))
    made.hold("d0", 600, "STORAGE")
    assert made.source(600) is None


@pytest.mark.parametrize("how", ["draining", "suspected", "avoided", "gone"])
def test_who_takes_no_new_work_is_no_source(how: str) -> None:
    made = Named()
    workers = [worker("p0", queued=50_000), worker("p1"), worker("d0")]
    made.see(*workers)
    made.hold("p0", 600)
    avoid = frozenset[str]()
    if how == "draining":
        made.see(replace(workers[0], draining=True), *workers[1:])
    elif how == "suspected":
        made.suspect(frozenset({"p0"}))
    elif how == "avoided":
        avoid = frozenset({"p0"})
    else:
        made.see(*workers[1:])
        made.index.drop("p0")
    choice = made.choose(PlacementRequest(600 * PAGE, as_hashes(range(600)), 16.0), 0.0, avoid)
    assert choice is not None
    assert (placed_on(choice), choice.fetch) == ("p1", None)


def test_what_costs_more_than_computing_is_not_fetched() -> None:
    made = Named(weights=PolicyWeights.model_validate({"transfer": 5.0}))
    made.see(worker("p0", queued=50_000), worker("p1"), worker("d0"))
    made.hold("p0", 600)
    assert made.ask(600).fetch is None
    made = Named("round-robin", PolicyWeights.model_validate({"fetch_start": 64.0}))
    made.see(worker("p0"), worker("p1"), worker("d0"))
    made.hold("p1", 1)
    assert made.source(1) is None  # 16 tokens at 4 each are worth no fetch that costs 64


def test_slow_fetches_that_were_measured_end_fetching() -> None:
    made = Named()
    made.see(worker("p0", queued=50_000), worker("p1"), worker("d0"))
    made.hold("p0", 600)
    assert made.ask(600).fetch is not None
    rates = made.policy.transfers
    rates.prefill_tokens_per_s, rates.bytes_per_token = 20_000.0, 100_000.0
    made.tick(0.0)
    for _ in range(100):  # 10 MB in a second: a token takes as long as 200 computed ones
        rates.observe(worker("p0"), worker("p1"), "", 10_000_000, 1.0)
    made.tick(2.0)
    assert made.ask(600).fetch is None


def test_a_near_holder_is_preferred() -> None:
    made = Named("round-robin")
    made.see(worker("p0", host="one"), worker("p1"), worker("p2", host="one"), worker("d0"))
    made.hold("p1", 600)
    made.hold("p2", 600)
    source = made.source(600)
    assert source is not None
    assert source.worker == "p2"


@pytest.mark.parametrize(
    ("name", "peer_fetch"), [("prefix-affinity", True), ("kv", False), ("round-robin", None)]
)
def test_these_policies_name_nobody(name: str, peer_fetch: bool | None) -> None:
    made = Named(name, peer_fetch=peer_fetch)
    made.see(worker("p0", queued=50_000), worker("p1"), worker("d0"))
    made.hold("p0", 600)
    assert all(made.source(600) is None for _ in range(3))


@pytest.mark.parametrize("unable", ["p0", "p1"])
def test_who_cannot_fetch_neither_fetches_nor_lends(unable: str) -> None:
    workers = [worker("p0", queued=50_000), worker("p1"), worker("d0")]
    named = []
    for some in (workers, [replace(one, peer_fetch=one.id != unable) for one in workers]):
        made = Named(peer_fetch=None)
        made.see(*some)
        made.hold("p0", 600)
        named.append(made.source(600))
    assert named[0] is not None
    assert named[1] is None


def test_holders_share_the_fetches_and_are_free_again_after_the_first_token() -> None:
    made = Named(weights=PolicyWeights.model_validate({"fetch_share": 1.0}))
    made.see(
        worker("p0", queued=90_000), worker("p1", queued=90_000), worker("p2"), worker("p3"), worker("d0")
    )
    made.hold("p0", 600)
    made.hold("p1", 600)
    placements = [made.place(made.ask(600), 0.0) for _ in range(2)]
    assert {one.source.worker for one in placements if one.source} == {"p0", "p1"}
    peers = made.policy.peers
    assert peers is not None
    for one in placements:
        made.prefilled(one, 0.0)
        made.close(one, 0.0)
    assert not peers._running


def test_a_hot_prefix_spreads_by_copy() -> None:
    """Many requests at once with one prefix: all workers get it, and one of them computed it."""
    made = Named()
    made.see(*(worker(f"p{number}") for number in range(8)), worker("d0"))
    made.hold("p0", 600)
    pages = list(range(600))
    seen, computed = set(), 0
    for number in range(64):
        request = PlacementRequest(
            700 * PAGE, as_hashes([*pages, *(1000 * number + page for page in range(1000, 1100))]), 16.0
        )
        choice = made.choose(request, 0.0)
        assert choice is not None
        placement = made.place(choice, 0.0)
        computed += placement.prefill_tokens
        seen.add(placed_on(choice))
    assert seen == {f"p{number}" for number in range(8)}
    assert computed == 64 * 100 * PAGE


class Peer(NamedTuple):
    """One worker: its queue, its host, and the pages that it holds on the device, then on its way."""

    queued: int
    host: int
    held: int
    expected: int


peers = st.builds(Peer, st.integers(0, 40_000), st.integers(0, 2), st.integers(0, 300), st.integers(0, 40))
weights = st.builds(
    lambda **said: PolicyWeights.model_validate(
        {"session": 0.0, "decode_load": 0.0, "decode_relief": 1e9, **said}
    ),
    prefill_left=st.sampled_from([0.5, 1.0, 4.0]),
    transfer=st.sampled_from([0.0, 0.1, 1.0, 3.0]),
    same_host=st.sampled_from([0.0, 0.2, 1.0]),
    fetch_start=st.sampled_from([0.0, 64.0, 5000.0]),
    expected_credit=st.sampled_from([0.5, 1.0]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(peers, min_size=1, max_size=6), st.integers(0, 300), weights)
def test_the_choice_is_the_cheapest_of_queue_fetch_and_compute(
    fleet: list[Peer], pages: int, weighed: PolicyWeights
) -> None:
    made = Named(weights=weighed)
    made.see(*(worker(f"p{n}", one.queued, f"h{one.host}") for n, one in enumerate(fleet)), worker("d0"))
    for number, one in enumerate(fleet):
        made.hold(f"p{number}", one.held)
        made.index.expect(made.index.join(f"p{number}"), as_hashes(range(one.held + one.expected)))
    choice = made.ask(pages)
    prompt, shortest = pages * PAGE + NEXT_TOKEN, min(one.queued for one in fleet)

    def cost(at: int, source: int | None) -> float:
        one = fleet[at]
        queue = one.queued + (one.queued - shortest) ** 2 / weighed.queue_objective
        device = min(pages, one.held)
        both = min(pages, one.held + one.expected)
        left = max(1.0, prompt - PAGE * (device + (both - device) * weighed.expected_credit))
        total = queue + weighed.prefill_left * left
        if source is not None:
            gain = PAGE * (min(pages, fleet[source].held) - both)
            if gain <= 0:
                return np.inf
            # A nearer pair is never dearer than a farther one.
            near = min(weighed.same_host, weighed.same_machine, weighed.same_rack)
            price = weighed.transfer * (near if one.host == fleet[source].host else 1.0)
            total += weighed.fetch_start + (price - weighed.prefill_left) * gain
        return total

    rows = range(len(fleet))
    least = min(cost(at, source) for at in rows for source in (None, *rows) if source != at)
    row, fetch = choice.prefill_row, choice.fetch
    assert row is not None
    source = None if fetch is None else int(fetch.holder.record.id[1:])
    assert cost(row, source) == pytest.approx(least, rel=1e-9, abs=1e-6)
    if fetch is not None:
        assert fetch.pages <= fleet[int(fetch.holder.record.id[1:])].held


@pytest.mark.parametrize("name", POLICIES)
def test_fetching_changes_nothing_where_nobody_holds_anything(name: str) -> None:
    made = Named(name)
    made.see(worker("p0"), worker("p1"), worker("d0"))
    assert made.source(600) is None
