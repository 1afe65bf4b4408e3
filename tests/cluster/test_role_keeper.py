"""RoleKeeper: first roles, and changes as the load or an operator wants them, of 4 and of 64 fake workers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec
import pytest

from cluster.role_keeper import RoleKeeper, RolePlan
from wire.records import Role, WorkerLoad, WorkerRecord

PLAN = RolePlan(ttft_s=2.0, itl_s=0.05, period_s=5.0, drain_s=30.0)
PREFILL_RATE = 10_000.0  # prompt tokens that a worker computes in a second
STEP_S, ROW_S, ROWS = 0.01, 0.0005, 64  # of a decode worker
PROMPT, ANSWER = 2000.0, 100.0


@dataclass
class FakeWorker:
    """A worker whose queue and rows are real numbers. It changes its role `drain_s` after it was asked."""

    name: str
    role: Role
    incarnation: int = 1
    queue: float = 0.0  # prompt tokens
    rows: float = 0.0
    totals: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("prompts", "prefilled_tokens", "decoded_tokens"), 0.0)
    )
    becomes: Role | None = None
    done_at: float = 0.0

    def record(self) -> WorkerRecord:
        load = WorkerLoad(
            queued_prefill_tokens=int(self.queue), running_requests=int(self.rows), headroom_tokens=100_000,
            prefill_tokens_per_s=PREFILL_RATE, decode_step_s=self._step_s() if self.rows >= 1 else 0.0,
            **{name: int(total) for name, total in self.totals.items()},
        )  # fmt: skip
        return WorkerRecord(
            id=self.name, incarnation=self.incarnation, role=self.role, mailbox=f"tcp://{self.name}",
            events="", replay="", model="m", fingerprint="", groups=(), max_context_tokens=100_000,
            total_tokens=100_000, max_running_requests=ROWS, pid=0, host="", transfer_backends=(),
            load=load, draining=self.becomes is not None,
        )  # fmt: skip

    def ask(self, role: Role, now: float, drain_s: float) -> None:
        if self.becomes is None and role is not self.role:
            self.becomes, self.done_at = role, now + drain_s

    def advance(self, now: float, seconds: float) -> float:
        """Work for a while; returns the prompts that were computed."""
        if self.becomes is not None and now >= self.done_at:
            self.role, self.becomes = self.becomes, None
            self.incarnation += 1
            self.queue = self.rows = 0.0
            self.totals = dict.fromkeys(self.totals, 0.0)
        if self.role is Role.DECODE:
            made = self.rows * seconds / self._step_s()
            self.rows = max(0.0, self.rows - made / ANSWER)
            self.totals["decoded_tokens"] += made
            return 0.0
        computed = min(self.queue, PREFILL_RATE * seconds)
        self.queue -= computed
        self.totals["prefilled_tokens"] += computed
        self.totals["prompts"] += computed / PROMPT
        return computed / PROMPT

    def _step_s(self) -> float:
        return STEP_S + ROW_S * self.rows


class FakeFleet:
    """Workers under a load, and the keeper that assigns their roles."""

    def __init__(self, workers: int = 4, drain_s: float = 3.0) -> None:
        self.keeper = RoleKeeper("worker", PLAN)
        self.now = 0.0
        self.changes: list[tuple[float, str, Role]] = []  # new incarnations
        self._drain_s = drain_s
        self._random = random.Random(5)
        self.workers = [
            FakeWorker(f"worker-{i:02}", self.keeper.first_role(f"worker-{i:02}", 0.0))
            for i in range(workers)
        ]

    def count(self, role: Role) -> int:
        return sum(one.role is role for one in self.workers)

    def run(self, seconds: float, prompts_per_s: float = 0.0, rows_per_s: float = 0.0) -> None:
        """`rows_per_s`: requests that come to decode besides those that are prefilled."""
        until, step = self.now + seconds, 0.5
        while self.now < until:
            self.now += step
            prompts = prompts_per_s * step * self._random.uniform(0.7, 1.3)
            self._spread(Role.PREFILL, "queue", prompts * PROMPT)
            computed = 0.0
            for one in self.workers:
                role = one.role
                computed += one.advance(self.now, step)
                if one.role is not role:
                    self.changes.append((self.now, one.name, one.role))
            self._spread(Role.DECODE, "rows", computed + rows_per_s * step)
            for record, role in self.keeper.tick([one.record() for one in self.workers], self.now):
                next(one for one in self.workers if one.name == record.id).ask(role, self.now, self._drain_s)
            assert self.count(Role.PREFILL), "each role keeps a worker"
            assert self.count(Role.DECODE), "each role keeps a worker"

    def _spread(self, role: Role, what: str, amount: float) -> None:
        ready = [one for one in self.workers if one.role is role and one.becomes is None]
        for one in ready:
            setattr(one, what, getattr(one, what) + amount / len(ready))


def roles_of(fleet: FakeFleet) -> list[Role]:
    return [one.role for one in fleet.workers]


def test_workers_that_start_get_both_roles_decode_first() -> None:
    keeper = RoleKeeper("worker", PLAN)
    roles = [keeper.first_role(f"worker-{i}", 0.0) for i in range(4)]
    assert roles == [Role.DECODE, Role.PREFILL, Role.PREFILL, Role.DECODE]
    assert keeper.first_role("worker-1", 1.0) is Role.PREFILL, "asked again, the same"


def test_a_worker_that_is_replaced_leaves_its_role_to_the_next_one() -> None:
    fleet = FakeFleet()
    fleet.run(1.0)
    assert fleet.keeper.set_counts(1, 3, fleet.now) == ""
    fleet.run(10.0)
    assert (fleet.count(Role.PREFILL), fleet.count(Role.DECODE)) == (1, 3)
    for role in Role:
        gone = next(one for one in fleet.workers if one.role is role)
        records = [one.record() for one in fleet.workers if one is not gone]
        fleet.keeper.tick(records, fleet.now)
        assert fleet.keeper.first_role(f"new-{role}", fleet.now) is role
        fleet.run(1.0)
        fleet.keeper.first_role(f"new-{role}", fleet.now)


def test_the_last_decode_worker_that_dies_is_replaced_by_a_prefill_worker_at_once() -> None:
    fleet = FakeFleet()
    fleet.run(1.0)
    assert fleet.keeper.set_counts(3, 1, fleet.now) == ""
    fleet.run(20.0)
    busy, *rest = records = [one.record() for one in fleet.workers if one.role is Role.PREFILL]
    busy = msgspec.structs.replace(busy, load=WorkerLoad(waiting_requests=3))
    ((asked, role),) = fleet.keeper.tick([busy, *rest], fleet.now)
    assert asked in rest
    assert role is Role.DECODE
    assert fleet.keeper.tick(records, fleet.now) == [], "one is enough"
    assert fleet.keeper.first_role("worker-new", fleet.now) is Role.PREFILL


def test_a_fleet_that_lost_its_last_prefill_worker_to_a_smaller_total_gets_one() -> None:
    fleet = FakeFleet()
    fleet.run(1.0)
    assert fleet.keeper.set_counts(1, 3, fleet.now) == ""
    fleet.run(20.0)
    records = [one.record() for one in fleet.workers if one.role is Role.DECODE]
    for seconds in (1.0, 59.0):
        assert fleet.keeper.tick(records, fleet.now + seconds) == [], "it may be replaced"
    ((asked, role),) = fleet.keeper.tick(records, fleet.now + 62.0)
    assert (asked.id, role) == (records[0].id, Role.PREFILL)
    alone = RoleKeeper("worker", PLAN)
    assert not any(alone.tick(records[:1], at) for at in (1.0, 100.0, 200.0)), "one alone decodes"


def test_prefill_workers_that_are_ready_first_wait_for_the_decode_worker_that_starts() -> None:
    keeper = RoleKeeper("worker", PLAN)
    names = [f"worker-{number}" for number in range(3)]
    workers = [FakeWorker(name, keeper.first_role(name, 0.0)) for name in names]
    prefill = [one.record() for one in workers if one.role is Role.PREFILL]
    assert len(prefill) == 2
    assert keeper.tick(prefill, 1.0) == []


def test_64_workers_follow_a_load_that_shifts_and_do_not_flap() -> None:
    fleet = FakeFleet(64)
    fleet.run(300.0, prompts_per_s=230.0)  # 46 workers' worth of prompts
    assert fleet.count(Role.PREFILL) >= 46
    first = len(fleet.changes)
    fleet.run(600.0, prompts_per_s=230.0)
    assert len(fleet.changes) == first, "a steady load changes nothing"
    fleet.run(300.0, prompts_per_s=30.0, rows_per_s=400.0)
    assert fleet.count(Role.DECODE) >= 28
    second = len(fleet.changes)
    fleet.run(600.0, prompts_per_s=30.0, rows_per_s=400.0)
    assert len(fleet.changes) == second
    assert max(one.queue for one in fleet.workers) < PREFILL_RATE, "prompts wait for less than a second"
    gone = next(one for one in fleet.workers if one.role is Role.DECODE)
    fleet.keeper.tick([one.record() for one in fleet.workers if one is not gone], fleet.now)
    assert fleet.keeper.first_role("worker-new", fleet.now) is Role.DECODE, "of 64, 12 prefill"


def test_an_idle_fleet_changes_nothing() -> None:
    fleet = FakeFleet()
    fleet.run(120.0)
    assert fleet.changes == []


def test_what_an_operator_sets_holds_until_it_is_automatic_again() -> None:
    fleet = FakeFleet()
    fleet.run(1.0)
    one, two = [worker.name for worker in fleet.workers if worker.role is Role.DECODE]
    assert fleet.keeper.set_roles({one: Role.PREFILL}, fleet.now) == ""
    assert fleet.keeper.wanted() == {one: Role.PREFILL}
    fleet.run(300.0, rows_per_s=20.0)
    assert (fleet.count(Role.PREFILL), fleet.count(Role.DECODE)) == (3, 1)
    assert fleet.keeper.wanted() == {}
    assert "no decode worker" in fleet.keeper.set_roles({two: Role.PREFILL}, fleet.now)
    fleet.keeper.automatic = True
    fleet.run(120.0, rows_per_s=20.0)
    assert fleet.count(Role.DECODE) > 1


@pytest.mark.parametrize("counts", [(0, 4), (4, 0), (2, 3), (5, -1)])
def test_counts_that_cannot_be_are_refused(counts: tuple[int, int]) -> None:
    fleet = FakeFleet()
    fleet.run(1.0)
    assert "4 workers" in fleet.keeper.set_counts(*counts, fleet.now)
    assert fleet.keeper.automatic


def test_a_ratio_that_an_operator_set_earlier_is_kept() -> None:
    fleet = FakeFleet()
    fleet.run(1.0)
    assert fleet.keeper.set_by_operator() == (0, 0)
    for prefill, decode in ((3, 1), (3, 1)):  # said again it changes nobody, and holds
        assert fleet.keeper.set_counts(prefill, decode, fleet.now) == ""
        assert fleet.keeper.set_by_operator() == (3, 1)
        fleet.run(20.0)
        fleet.keeper.follow(0, 0)
    again = RoleKeeper("worker", PLAN)
    assert "no worker" in again.set_automatic()
    again.follow(3, 1)
    again.tick([one.record() for one in fleet.workers if one.role is Role.DECODE], fleet.now)
    assert [again.first_role(f"new-{number}", fleet.now) for number in range(3)] == [Role.PREFILL] * 3
    assert again.set_by_operator() == (3, 1)
    third = RoleKeeper("worker", PLAN)
    third.tick([one.record() for one in fleet.workers], fleet.now)
    assert third.set_counts(3, 1, fleet.now) == "", "nobody changes"
    assert third.set_by_operator() == (3, 1)


def test_counts_change_the_least_loaded() -> None:
    fleet = FakeFleet()
    busy, idle = (one for one in fleet.workers if one.role is Role.DECODE)
    busy.rows = 10
    fleet.run(0.5)
    assert fleet.keeper.set_counts(3, 1, fleet.now) == ""
    assert fleet.keeper.wanted() == {idle.name: Role.PREFILL}
    assert fleet.keeper.set_counts(2, 2, fleet.now) == "", "it may go back before it has gone"
    assert fleet.keeper.wanted() == {idle.name: Role.DECODE}


def test_workers_that_others_have_started_keep_their_roles() -> None:
    fleet = FakeFleet()
    fleet.workers.append(FakeWorker("decode-by-hand", Role.DECODE))
    fleet.run(1.0)
    assert "no worker decode-by-hand" in fleet.keeper.set_roles({"decode-by-hand": Role.PREFILL}, fleet.now)
    assert fleet.keeper.set_counts(3, 1, fleet.now) == ""


def test_unknown_and_leaving_workers_are_refused() -> None:
    fleet = FakeFleet()
    fleet.workers[0].becomes, fleet.workers[0].done_at = fleet.workers[0].role, 1e9  # drains, and not for us
    fleet.run(0.5)
    assert "no worker nobody" in fleet.keeper.set_roles({"nobody": Role.PREFILL}, fleet.now)
    assert "leaving" in fleet.keeper.set_roles({fleet.workers[0].name: Role.PREFILL}, fleet.now)


def test_a_worker_is_asked_until_it_drains_and_given_up_in_the_end() -> None:
    fleet = FakeFleet()
    fleet.run(0.5)
    records = [one.record() for one in fleet.workers]
    name = fleet.workers[0].name
    assert fleet.keeper.set_roles({name: Role.PREFILL}, fleet.now) == ""
    asked = [fleet.keeper.tick(records, fleet.now + 0.1 * i) for i in range(100)]
    assert 9 <= sum(bool(one) for one in asked) <= 11, "once a second"
    assert fleet.keeper.wanted()
    assert fleet.keeper.tick(records, fleet.now + PLAN.drain_s + 61.0) == []
    assert not fleet.keeper.wanted()


def test_a_worker_that_drains_already_goes_and_comes_back() -> None:
    fleet = FakeFleet()
    fleet.run(1.0)
    one = next(worker for worker in fleet.workers if worker.role is Role.DECODE)
    assert fleet.keeper.set_roles({one.name: Role.PREFILL}, fleet.now) == ""
    fleet.run(1.0)
    assert one.record().draining
    assert fleet.keeper.set_roles({one.name: Role.DECODE}, fleet.now) == ""
    fleet.run(20.0)
    assert [role for _, name, role in fleet.changes if name == one.name] == [Role.PREFILL, Role.DECODE]
    assert fleet.keeper.wanted() == {}
