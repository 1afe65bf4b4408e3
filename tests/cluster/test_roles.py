"""Roles with four real workers of a fake engine; the command's arguments and table."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from cluster.role_keeper import RolePlan
from cluster.roles import AutomaticRoles, RoleCounts, RoleRow, Roles, RoleTable, WorkerRoles
from cluster.roles_command import add_arguments, format_table, parse_wish
from common.errors import ConfigError
from common.secrets import open_secret
from decode_node.role import DecodeRole
from prefill_node.role import PrefillRole
from router.directory.server import DirectoryHost, RoleOrders
from tests.cluster.test_role_keeper import FakeWorker
from tests.router.conftest import wait_until
from wire.records import Role, WorkerRecord
from wire.settings import NO_SETTINGS
from worker.options import WorkerOptions
from worker.switch import SwitchingWorker

PLAN = RolePlan(ttft_s=2.0, itl_s=0.05, period_s=0.2, drain_s=10.0)
PLANS = {"worker": PLAN}
NAMES = [f"worker-{i}" for i in range(4)]


class MovingDirectory:
    """The directory's process, which may be started again at another address."""

    def __init__(self, secret: Path) -> None:
        self.roles = Roles(PLANS)
        self.secret = secret
        self._host = self._start(is_new=True)

    def find(self) -> str:
        return self._host.address

    def start_again(self) -> Roles:
        """The roles of the new process, which knows the plan only."""
        self.close()
        self.roles = Roles(PLANS)
        self._host = self._start(is_new=False)
        return self.roles

    def close(self) -> None:
        self._host.close()

    def _start(self, is_new: bool) -> DirectoryHost:
        return DirectoryHost(secret=open_secret(self.secret), is_new=is_new, assign_roles=self.roles.assign)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[MovingDirectory]:
    """Of a cluster with a secret."""
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef\n")
    secret.chmod(0o600)
    with closing(MovingDirectory(secret)) as directory:
        yield directory


@pytest.fixture
def roles(directory: MovingDirectory) -> Iterator[Roles]:
    """Of four workers that have joined."""
    found = directory.roles
    with ExitStack() as cleanup:
        for name in NAMES:
            options = WorkerOptions(
                model="fake", engine="fake", max_total_tokens=256, worker_id=name,
                directory=directory.find(), cluster_secret_file=directory.secret,
            )  # fmt: skip
            kinds = {Role.PREFILL: PrefillRole, Role.DECODE: DecodeRole}
            first = found.first(name)
            assert first is not None
            worker = SwitchingWorker(options, kinds, first, PLAN.drain_s, directory.find)
            cleanup.callback(worker.close)
            worker.start()
        wait_until(lambda: len(found.table().rows) == 4, 10.0)
        yield found
        directory.close()  # else it asks the last workers to change their roles while they end


def by_role(roles: Roles) -> dict[Role, list[str]]:
    rows = roles.table().rows
    return {role: [row.worker for row in rows if row.role is role] for role in Role}


def test_four_workers_take_the_roles_that_an_operator_sets(roles: Roles) -> None:
    assert roles.table().decided == {"worker": "automatic"}
    before = by_role(roles)
    assert {role: len(names) for role, names in before.items()} == {Role.PREFILL: 2, Role.DECODE: 2}
    assert roles.set(RoleCounts(1, 3)) == ""
    wait_until(lambda: len(by_role(roles)[Role.DECODE]) == 3, 20.0)
    assert roles.table().decided == {"worker": "set"}
    (last,) = by_role(roles)[Role.PREFILL]
    assert "no prefill worker" in roles.set(WorkerRoles({last: Role.DECODE}))
    other = before[Role.DECODE][0]
    assert roles.set(WorkerRoles({last: Role.DECODE, other: Role.PREFILL})) == ""
    wait_until(lambda: by_role(roles)[Role.PREFILL] == [other], 20.0)
    wait_until(lambda: len(roles.table().rows) == 4, 20.0)
    assert not any(row.wanted or row.draining for row in roles.table().rows)
    assert roles.set(AutomaticRoles()) == ""
    assert roles.table().decided == {"worker": "automatic"}


def test_what_an_operator_sets_outlives_the_directory(roles: Roles, directory: MovingDirectory) -> None:
    assert roles.set(RoleCounts(1, 3)) == ""
    wait_until(lambda: len(by_role(roles)[Role.DECODE]) == 3, 20.0)
    again = directory.start_again()
    assert "no worker" in again.set(AutomaticRoles()), "it does not know yet what was said"
    wait_until(lambda: len(again.table().rows) == 4, 20.0)
    assert again.table().decided == {"worker": "set"}
    assert {role: len(names) for role, names in by_role(again).items()} == {Role.PREFILL: 1, Role.DECODE: 3}
    again.follow({"worker": RolePlan(ttft_s=1.0, itl_s=0.05, period_s=0.2, drain_s=10.0)})
    assert again.table().decided == {"worker": "set"}, "another plan changes the objectives only"
    wait_until(lambda: again.set(AutomaticRoles()) == "", 5.0)
    third = directory.start_again()
    wait_until(lambda: len(third.table().rows) == 4, 20.0)
    assert third.table().decided == {"worker": "automatic"}


def test_fixed_roles_are_shown_and_not_set() -> None:
    roles = Roles({})
    assert roles.assign([], NO_SETTINGS, 0.0) == RoleOrders([], NO_SETTINGS)
    assert roles.table() == RoleTable({}, [])
    assert "fixed" in roles.set(RoleCounts(1, 1))


def test_the_plan_of_a_later_deployment_is_followed() -> None:
    roles = Roles({})
    assert roles.first("worker-0") is None, "it started before a router has told the plan"
    roles.follow(PLANS)
    assert roles.first("worker-0") is Role.DECODE
    roles.follow(PLANS)
    assert roles.first("worker-1") is Role.PREFILL, "the first worker is not forgotten"
    assert roles.table().decided == {"worker": "automatic"}
    roles.follow({})
    assert roles.first("worker-2") is None
    assert roles.table().decided == {}


def fake(worker: str, role: Role) -> WorkerRecord:
    return FakeWorker(worker, role).record()


def test_each_deployment_has_roles_of_its_own() -> None:
    roles = Roles({"worker-a": PLAN, "worker-a-v2": PLAN})
    ids = ["worker-a-x1", "worker-a-x2", "worker-a-v2-y1", "worker-a-v2-y2"]
    firsts = {one: roles.first(one) for one in ids}
    assert list(firsts.values()) == [Role.DECODE, Role.PREFILL] * 2, "each has both"
    assert roles.first("worker-b-z1") is None
    records = [fake(one, role or Role.DECODE) for one, role in firsts.items()]
    records += [fake("worker-a-x3", Role.DECODE), fake("decode-b-z1", Role.DECODE)]
    roles.assign(records, NO_SETTINGS, time.monotonic())
    assert "name one deployment" in roles.set(RoleCounts(2, 1))
    assert "name one deployment" in roles.set(WorkerRoles(dict.fromkeys(ids, Role.DECODE)))
    assert "decode-b are fixed" in roles.set(WorkerRoles({"decode-b-z1": Role.PREFILL}))
    assert "worker-b are fixed" in roles.set(AutomaticRoles("worker-b"))
    assert "2 workers" in roles.set(RoleCounts(2, 1, "worker-a-v2"))
    assert roles.set(RoleCounts(2, 1, "worker-a")) == ""
    orders = roles.assign(records, NO_SETTINGS, time.monotonic())
    assert [(one.id, role) for one, role in orders.asked] == [("worker-a-x1", Role.PREFILL)]
    assert roles.table().decided == {"worker-a": "set", "worker-a-v2": "automatic"}
    again = Roles({"worker-a": PLAN, "worker-a-v2": PLAN})
    again.assign(records, orders.said, time.monotonic())
    assert again.table().decided == roles.table().decided
    again.follow({"worker-a": PLAN, "worker-c": PLAN})
    assert again.table().decided == {"worker-a": "set", "worker-c": "automatic"}
    assert again.set(AutomaticRoles("worker-a")) == ""
    assert again.table().decided["worker-a"] == "automatic"


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


def test_the_command_says_what_is_wanted() -> None:
    assert parse_wish(parsed()) is None
    assert parse_wish(parsed("a=prefill", "b=decode")) == WorkerRoles({"a": Role.PREFILL, "b": Role.DECODE})
    assert parse_wish(parsed("--prefill", "2", "--decode", "3")) == RoleCounts(2, 3)
    assert parse_wish(parsed("--auto")) == AutomaticRoles()
    assert parse_wish(parsed("--auto", "--deployment", "worker-a")) == AutomaticRoles("worker-a")
    of_one = parsed("--prefill", "2", "--decode", "3", "--deployment", "worker-a")
    assert parse_wish(of_one) == RoleCounts(2, 3, "worker-a")


@pytest.mark.parametrize(
    "arguments",
    [
        ("a",),
        ("a=both",),
        ("=decode",),
        ("--prefill", "2"),
        ("--auto", "a=decode"),
        ("--deployment", "a"),
        ("--deployment", "a", "a-b=decode"),
        ("--auto", "--decode", "1"),
    ],
)
def test_a_wish_that_is_none_is_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        parse_wish(parsed(*arguments))


def test_the_table_has_a_line_per_worker() -> None:
    rows = [
        RoleRow("worker-b", Role.PREFILL, None, False, 1, 2, 345, 3.0),
        RoleRow("worker-a", Role.DECODE, Role.PREFILL, True, 7, 0, 0, 3700.0),
        RoleRow("worker-c", Role.DECODE, None, True, 0, 0, 0, 62.0),
    ]
    lines = [line.split() for line in format_table(RoleTable({"worker": "set"}, rows)).splitlines()]
    assert lines[1] == ["worker-b", "prefill", "1", "2", "345", "3s"]
    assert lines[2] == ["worker-a", "decode", "prefill", "7", "0", "0", "1h01m"]
    assert lines[3] == ["worker-c", "decode", "leaves", "0", "0", "0", "1m02s"]
    assert " ".join(lines[4]) == "worker: 1 prefill, 2 decode; roles: set"
