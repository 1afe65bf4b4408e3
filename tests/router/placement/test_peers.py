"""Routers that tell each other what they have given: over a wire that loses, doubles and reorders."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace

from router.index.global_index import GlobalIndex, as_hashes
from router.placement.load_estimate import AssignedLoad
from router.placement.peers import SILENT_S, WHOLE_EVERY_S, RouterPeers
from router.placement.placement import Placement
from router.placement.placer import Placer
from router.placement.policies import make_policy
from router.placement.policy import PlacementRequest
from tests.router.placement.test_policy import PAGE, WEIGHTS, decode, names, prefill
from wire.messages.routers import AssignedLoads
from wire.records import WorkerLoad, WorkerRecord


@dataclass
class Node:
    """One router: a placer, its end of the talk, and what it has sent."""

    name: str
    policy: str = "least-loaded"
    sent: list[tuple[str, AssignedLoads]] = field(default_factory=list)
    wakes: int = 0
    placements: list[Placement] = field(default_factory=list)

    def __post_init__(self) -> None:
        policy = make_policy(self.policy, WEIGHTS, 0, random.Random(self.name))
        self.placer = Placer(GlobalIndex(), policy, 10.0, lambda estimate: self.peers.assigned(estimate))
        self.placer.page_tokens = PAGE
        self.peers = RouterPeers(self.placer.fleet, self.name, 1, self.send, self.wake)

    def send(self, to: str, message: AssignedLoads) -> None:
        self.sent.append((to, message))

    def wake(self) -> None:
        self.wakes += 1

    def update(self, records: list[WorkerRecord], routers: list[str], now: float = 0.0) -> None:
        self.placer.update(records, now)
        self.placer.page_tokens = PAGE
        self.peers.meet(routers)

    def place(self, pages: int = 10, now: float = 0.0) -> Placement:
        ask = PlacementRequest(pages * PAGE, as_hashes([]), 16)
        choice = self.placer.choose(ask, now)
        assert choice is not None
        placement = self.placer.place(choice, now)
        self.placements.append(placement)
        return placement

    def end(self, index: int, now: float = 0.0) -> None:
        self.placer.close(self.placements.pop(index), now)

    def own(self) -> dict[str, AssignedLoad]:
        return {one.record.id: one.own for one in self.placer.fleet.estimates()}

    def of_peers(self) -> dict[str, AssignedLoad]:
        return {one.record.id: one.peers for one in self.placer.fleet.estimates()}


WORKERS = [prefill("p"), prefill("q"), decode("d"), decode("e")]


def pair() -> tuple[Node, Node]:
    a, b = Node("a"), Node("b")
    for node in (a, b):
        node.update(WORKERS, ["a", "b"])
    exchange(a, b)
    return a, b


def exchange(*nodes: Node) -> None:
    """Everything that was sent arrives."""
    by_name = {node.name: node for node in nodes}
    for node in nodes:
        for to, message in node.sent:
            by_name[to].peers.take(node.name, message, 0.0)
        node.sent.clear()


def test_a_router_counts_what_others_have_given() -> None:
    a, b = pair()
    placement = a.place()
    a.peers.flush()
    exchange(a, b)
    assert b.of_peers() == a.own()
    assert a.of_peers() == b.own() == dict.fromkeys(a.own(), AssignedLoad())
    other = b.place()
    assert names(other) != names(placement)
    a.end(0)
    a.peers.flush()
    exchange(a, b)
    assert b.of_peers() == a.own()
    assert {given.requests for given in a.own().values()} == {0}


def test_an_older_message_that_comes_late_changes_nothing() -> None:
    a, b = pair()
    a.place()
    a.peers.flush()
    _, older = a.sent.pop()
    a.end(0)
    a.peers.flush()
    exchange(a, b)
    b.peers.take("a", older, 0.0)
    assert {one.requests for one in b.of_peers().values()} == {0}, "a newer one had the same workers"
    fresh = Node("c")
    fresh.update(WORKERS, ["a", "c"])
    a.peers.tick(WHOLE_EVERY_S)
    _, whole = a.sent.pop()
    assert whole.whole
    fresh.peers.take("a", whole, 0.0)
    fresh.peers.take("a", older, 0.0)
    assert {one.requests for one in fresh.of_peers().values()} == {0}, "a newer one was whole, without them"


def test_a_burst_over_two_routers_is_spread_as_over_one() -> None:
    a, b = pair()
    for _ in range(16):
        for node in (a, b):
            node.place()
            node.peers.flush()
            exchange(a, b)
    for worker in WORKERS:
        estimate = a.placer.fleet.estimate(worker.id)
        assert estimate is not None
        assert estimate.own.prefills + estimate.peers.prefills in (0, 16)
        assert estimate.own.requests + estimate.peers.requests in (0, 16)


def test_promises_of_others_count_against_the_headroom() -> None:
    roomy = decode("d")  # 10,000 tokens, 8 rows
    a, b = Node("a"), Node("b")
    for node in (a, b):
        node.update([prefill("p"), roomy], ["a", "b"])
    for _ in range(8):
        assert not a.place().hold_prefill
    assert not b.place().hold_prefill
    a.peers.flush()
    exchange(a, b)
    assert b.place().hold_prefill


def test_changes_are_said_together_and_once() -> None:
    a, _ = pair()
    for _ in range(5):
        a.place()
    assert a.wakes == 1
    a.peers.flush()
    ((_, message),) = a.sent
    assert {row.worker for row in message.rows} <= {"p", "q", "d", "e"}
    assert sum(row.requests for row in message.rows) == 5
    a.peers.flush()
    a.place()
    assert a.wakes == 2


def test_nothing_is_said_where_nobody_listens() -> None:
    alone = Node("a")
    alone.update(WORKERS, ["a"])
    alone.place()
    alone.peers.flush()
    alone.peers.tick(0.0)
    assert (alone.wakes, alone.sent) == (0, [])


def test_a_new_router_is_told_everything_even_before_it_knows_the_workers() -> None:
    a, _ = pair()
    a.place()
    a.sent.clear()
    a.update(WORKERS, ["a", "b", "c"])
    ((to, message),) = a.sent
    assert (to, message.whole) == ("c", True)
    new = Node("c")
    new.peers.take("a", message, 0.0)
    new.update(WORKERS, ["a", "b", "c"])
    assert new.of_peers() == a.own()


def test_the_load_of_a_silent_router_or_of_an_earlier_worker_is_dropped() -> None:
    a, b = pair()
    a.place()
    a.peers.flush()
    exchange(a, b)
    restarted = [replace(one, incarnation=99) for one in WORKERS]
    b.update(restarted, ["a", "b"])
    assert set(map(str, b.of_peers().values())) == {str(AssignedLoad())}
    b.update(WORKERS, ["a", "b"])
    assert b.of_peers() == a.own()
    b.peers.tick(SILENT_S)
    assert len(b.peers) == 0
    assert set(map(str, b.of_peers().values())) == {str(AssignedLoad())}


def test_a_restarted_router_at_the_same_address_starts_afresh() -> None:
    a, b = pair()
    a.place()
    a.peers.flush()
    (_, old) = a.sent[-1]
    exchange(a, b)
    b.peers.take("a", AssignedLoads(2, 0, True, []), 0.0)
    assert set(map(str, b.of_peers().values())) == {str(AssignedLoad())}
    b.peers.take("a", AssignedLoads(1, old.number + 5, False, old.rows), 0.0)
    assert set(map(str, b.of_peers().values())) == {str(AssignedLoad())}


def test_what_was_given_to_an_earlier_incarnation_is_not_taken_off_its_successor() -> None:
    a, _ = pair()
    placement = a.place()
    records = [one for one in WORKERS if one.id != names(placement)[1]]
    a.update(records, ["a", "b"])
    a.update(WORKERS, ["a", "b"])
    a.end(0)
    assert {given.requests for given in a.own().values()} == {0}


class BadWire(RuleBasedStateMachine):
    """Two routers, and messages that come late, twice, in any order, or never. After the next
    whole one, what a router believes is the truth."""

    @initialize()
    def start(self) -> None:
        self.now = 0.0
        self.nodes = (Node("a"), Node("b"))
        for node in self.nodes:
            node.update(WORKERS, ["a", "b"])
        self.under_way: list[tuple[str, str, AssignedLoads]] = []

    def collect(self) -> None:
        for node in self.nodes:
            self.under_way += [(node.name, to, message) for to, message in node.sent]
            node.sent.clear()

    @rule(node=st.integers(0, 1), pages=st.integers(1, 50))
    def place(self, node: int, pages: int) -> None:
        self.nodes[node].place(pages, self.now)

    @rule(node=st.integers(0, 1), index=st.integers(0, 100))
    def end(self, node: int, index: int) -> None:
        placements = self.nodes[node].placements
        if placements:
            self.nodes[node].end(index % len(placements), self.now)

    @rule(node=st.integers(0, 1), index=st.integers(0, 100))
    def prefilled(self, node: int, index: int) -> None:
        placements = self.nodes[node].placements
        if placements:
            self.nodes[node].placer.prefilled(placements[index % len(placements)], self.now)

    @rule(node=st.integers(0, 1), worker=st.integers(0, 3), busy=st.integers(0, 1000))
    def report(self, node: int, worker: int, busy: int) -> None:
        records = list(WORKERS)
        records[worker] = replace(
            WORKERS[worker], load=WorkerLoad(queued_prefill_tokens=busy, running_requests=busy)
        )
        self.nodes[node].update(records, ["a", "b"], self.now)

    @rule(node=st.integers(0, 1))
    def flush(self, node: int) -> None:
        self.nodes[node].peers.flush()
        self.collect()

    @rule(seconds=st.floats(0.01, 0.5))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for node in self.nodes:
            node.peers.tick(self.now)
        self.collect()

    @rule(which=st.integers(0, 1000), fate=st.sampled_from(["deliver", "deliver twice", "lose"]))
    def wire(self, which: int, fate: str) -> None:
        if not self.under_way:
            return
        sender, to, message = self.under_way.pop(which % len(self.under_way))
        for _ in range({"deliver": 1, "deliver twice": 2, "lose": 0}[fate]):
            next(node for node in self.nodes if node.name == to).peers.take(sender, message, self.now)

    @invariant()
    def nobody_owes_anything(self) -> None:
        for node in self.nodes:
            for given in (*node.own().values(), *node.of_peers().values()):
                assert min(given.requests, given.prefills, given.prefill_tokens, given.context_tokens) >= 0
                assert 0 <= given.since_tokens <= given.prefill_tokens
                assert 0 <= given.promised_rooms <= given.requests
                assert 0 <= given.promised_tokens <= given.context_tokens

    @invariant()
    def books_are_the_bookings(self) -> None:
        for node in self.nodes:
            assert sum(given.requests for given in node.own().values()) == len(node.placements)
            assert sum(given.context_tokens for given in node.own().values()) == sum(
                placement.context_tokens for placement in node.placements
            )

    def teardown(self) -> None:
        """The next whole one repairs everything, and late ones after it do no harm."""
        if not hasattr(self, "nodes"):
            return
        late = list(self.under_way)
        self.under_way.clear()
        self.now += WHOLE_EVERY_S
        for node in self.nodes:
            node.peers.tick(self.now)
        exchange(*self.nodes)
        for sender, to, message in late:
            next(node for node in self.nodes if node.name == to).peers.take(sender, message, self.now)
        a, b = self.nodes
        assert (a.of_peers(), b.of_peers()) == (b.own(), a.own())


TestBadWire = BadWire.TestCase
TestBadWire.settings = settings(max_examples=30, stateful_step_count=30)


def test_what_comes_late_undoes_nothing_that_is_newer() -> None:
    a, b = pair()
    a.place()
    a.peers.flush()
    (_, said) = a.sent[-1]
    b.peers.take("a", said, 0.0)
    known = b.of_peers()
    earlier = [replace(row, requests=row.requests + 5, prefill_tokens=1) for row in said.rows]
    b.peers.take("a", AssignedLoads(said.incarnation, said.number - 1, False, earlier), 0.0)
    assert b.of_peers() == known, "rows that were sent earlier"
    b.peers.take("a", AssignedLoads(said.incarnation, said.number + 2, True, said.rows), 0.0)
    b.peers.take("a", AssignedLoads(said.incarnation, said.number + 1, True, []), 0.0)
    assert b.of_peers() == known, "a whole message that was sent earlier"
