"""Three workers that fetch from each other, with pools that are too small; a machine chooses what happens.

Messages of fetches are delivered in any order, lost and doubled; requests are aborted, workers stop and are
called down; writes happen late, while the holder evicts. With a host tier, pages move down and come back
meanwhile, or fail to, and are lent from there. Every answer is right as far as it goes, and at any moment
every page of every worker has exactly one owner. When everything has been delivered all requests have ended:
no fetch waits for another one.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.fleet import Fleet, fleet
from tests.support.hand_off import SMALL, prompt_of
from wire.messages.transfer import Fetch, Fetched, FetchRefused
from wire.peer_monitors import PeerState

WORKERS = st.integers(0, 2)
BETWEEN_WORKERS = (Fetch, Fetched, FetchRefused)


class Fetches(RuleBasedStateMachine):
    """Rooms on any worker, with any other one as their source."""

    groups: ClassVar[tuple[str, ...]] = ()
    host: ClassVar[dict[str, Any]] = {}  # options of the host tier
    seen: ClassVar[Counter[str]] = Counter()  # in all runs: what came of fetches, and cached tokens by source

    def __init__(self) -> None:
        super().__init__()
        small = {"max_mamba_cache_size": 16} if "state" in self.groups else {}
        assert set(self.groups) <= set(SMALL)
        self._context = fleet(
            3, self.groups, max_total_tokens=200, max_running_requests=3, **small, **self.host
        )
        self.fleet: Fleet = self._context.__enter__()
        self.rooms = 0

    @rule(
        worker=WORKERS,
        source=WORKERS,
        family=st.integers(0, 2),
        length=st.integers(5, 90),
        n=st.integers(1, 6),
    )
    def ask(self, worker: int, source: int, family: int, length: int, n: int) -> None:
        self.rooms += 1
        holder = source if source != worker else None
        self.fleet.ask(self.rooms, worker, prompt_of(family, 90)[:length], n, holder)

    @precondition(lambda self: self.fleet.network.letters)
    @rule(where=st.integers(0, 10_000), keep=st.booleans())
    def deliver(self, where: int, keep: bool) -> None:
        letters = self.fleet.network.letters
        index = where % len(letters)
        self.fleet.deliver(
            index, keep and isinstance(letters[index].message, BETWEEN_WORKERS) and len(letters) < 50
        )

    @precondition(lambda self: self.fleet.network.letters)
    @rule(where=st.integers(0, 10_000))
    def lose(self, where: int) -> None:
        letters = self.fleet.network.letters
        if isinstance(letters[where % len(letters)].message, BETWEEN_WORKERS):
            del letters[where % len(letters)]

    @rule(worker=WORKERS)
    def turn(self, worker: int) -> None:
        self.fleet.turn(worker)

    @rule(worker=WORKERS)
    def write(self, worker: int) -> None:
        self.fleet.write(worker)

    @precondition(lambda self: any(mover.waiting for mover in self.fleet.movers))
    @rule(worker=WORKERS, lane=st.sampled_from(["backups", "loads"]), fails=st.booleans())
    def move(self, worker: int, lane: str, fails: bool) -> None:
        self.fleet.move(worker, lane, fails)

    @rule(worker=WORKERS, pages=st.integers(1, 50))
    def evict(self, worker: int, pages: int) -> None:
        for group in ("full", *self.groups):
            self.fleet.workers[worker].parts.services.memory.cache.tree.evict(group, pages)

    @precondition(lambda self: self.host)
    @rule(worker=WORKERS, clear=st.sampled_from([False, False, False, True]))
    def demote(self, worker: int, clear: bool) -> None:
        """All that it can leaves the worker's device for its host, and then that, too, if `clear`."""
        while self.fleet.move(worker):
            self.fleet.turn(worker)
        self.evict(worker, 1000)
        tiers = self.fleet.workers[worker].parts.services.memory.tiers
        assert tiers is not None
        if clear:
            tiers.host.clear()

    @precondition(lambda self: self.host)
    @rule(worker=WORKERS, holder=WORKERS, family=st.integers(0, 2), length=st.integers(30, 90))
    def ask_below(self, worker: int, holder: int, family: int, length: int) -> None:
        """What one worker has computed, and has on its host, is asked of another."""
        self.ask(holder, holder, family, length, 1)
        self.fleet.run_dry()
        self.demote(holder, clear=False)
        self.ask(worker, holder, family, length, 1)

    @rule(seconds=st.sampled_from([0.3, 1.0, 6.0]))
    def pass_time(self, seconds: float) -> None:
        self.fleet.pass_time(seconds)

    @rule(worker=WORKERS)
    def stop_or_go_on(self, worker: int) -> None:
        self.fleet.stopped ^= {worker}

    @rule(worker=WORKERS, state=st.sampled_from(PeerState))
    def suspect(self, worker: int, state: PeerState) -> None:
        self.fleet.down(worker, state)

    @precondition(lambda self: self.rooms)
    @rule(which=st.integers(1, 10_000))
    def abort(self, which: int) -> None:
        self.fleet.abort(which % self.rooms + 1)

    @rule()
    def run_dry(self) -> None:
        self.fleet.run_dry()

    @invariant()
    def memory_balances(self) -> None:
        for worker in self.fleet.workers:
            worker.check_memory()

    @invariant()
    def answers_are_right_as_far_as_they_go(self) -> None:
        for room, answer in self.fleet.answers.items():
            right = self.fleet.right(room)
            assert answer.tokens == right[: len(answer.tokens)]
            assert answer.last in (None, len(right))
            assert answer.rejected is None

    def teardown(self) -> None:
        try:
            self.fleet.stopped.clear()
            self.fleet.run_dry()
            self.fleet.pass_time(6.0)  # for a fetch whose messages were lost
            self.fleet.run_dry()
            assert not [room for room, answer in self.fleet.answers.items() if answer.open]
            self.fleet.settle()
            for worker in range(3):
                self.seen.update(self.fleet.metrics(worker).fetches)
                self.seen.update(self.fleet.metrics(worker).cached_from)
                tiers = self.fleet.workers[worker].parts.services.memory.tiers
                if tiers is not None:
                    assert tiers.is_idle
                    self.seen["lent from host"] += tiers.reads.counts.host_pages
        finally:
            self._context.__exit__(None, None, None)


class FetchesWindow(Fetches):
    """A model with windowed layers."""

    groups = ("window",)


class FetchesState(Fetches):
    """A model with linear attention."""

    groups = ("state",)


class FetchesAll(Fetches):
    """A model with both."""

    groups = ("window", "state")


class FetchesHost(Fetches):
    """Workers with a host tier: what is fetched is backed up, and what was evicted comes back."""

    host: ClassVar[dict[str, Any]] = {"hicache_ratio": 2.0}

    @initialize(holder=WORKERS, next_one=st.integers(1, 2), length=st.integers(30, 90))
    def begin_below(self, holder: int, next_one: int, length: int) -> None:
        """Every run lends from a host at least once, whatever the rules are that it draws."""
        self.ask_below((holder + next_one) % 3, holder, 0, length)
        self.fleet.run_dry()


class FetchesHostAll(FetchesHost):
    """The same with windows and states, and nodes that go to the host when they are evicted."""

    groups = ("window", "state")
    host: ClassVar[dict[str, Any]] = {"hicache_ratio": 1.0, "hicache_write_policy": "write_back"}


_SETTINGS = settings(stateful_step_count=50, suppress_health_check=list(HealthCheck), print_blob=True)


class TestFetches(Fetches.TestCase):  # type: ignore[misc]
    settings = settings(_SETTINGS, max_examples=8)


class TestFetchesWindow(FetchesWindow.TestCase):  # type: ignore[misc]
    settings = settings(_SETTINGS, max_examples=6)


class TestFetchesState(FetchesState.TestCase):  # type: ignore[misc]
    settings = settings(_SETTINGS, max_examples=6)


class TestFetchesAll(FetchesAll.TestCase):  # type: ignore[misc]
    settings = settings(_SETTINGS, max_examples=6)


def run_with_host(machine: type[Fetches], times: settings) -> None:
    """Run it, and see that pages came from other workers, from the host and from other workers' hosts."""
    machine.seen = Counter()
    run_state_machine_as_test(machine, settings=times)  # type: ignore[no-untyped-call]
    assert machine.seen["done"] > 0
    assert machine.seen["host"] > 0
    assert machine.seen["lent from host"] > 0


WITH_HOST = pytest.mark.parametrize("machine", [FetchesHost, FetchesHostAll])


@WITH_HOST
def test_fetches_beside_a_host_tier(machine: type[Fetches]) -> None:
    run_with_host(machine, settings(_SETTINGS, max_examples=10, stateful_step_count=60))


_LONG = settings(_SETTINGS, max_examples=150, stateful_step_count=80)


@pytest.mark.invariants
class TestFetchesLong(Fetches.TestCase):  # type: ignore[misc]
    settings = _LONG


@pytest.mark.invariants
class TestFetchesAllLong(FetchesAll.TestCase):  # type: ignore[misc]
    settings = _LONG


@pytest.mark.invariants
@WITH_HOST
def test_fetches_beside_a_host_tier_long(machine: type[Fetches]) -> None:
    run_with_host(machine, settings(_LONG, max_examples=60))
