"""Roles with four real workers of a fake engine; the command's arguments and table."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cluster.role_keeper import RolePlan
from cluster.roles import AutomaticRoles, RoleCounts, RoleRow, Roles, RoleTable, WorkerRoles
from cluster.roles_command import add_roles, format_table, parse_wish
from common.errors import ConfigError
from common.secrets import open_secret
from decode_node.role import DecodeRole
from prefill_node.role import PrefillRole
from router.directory.server import DirectoryHost
from tests.router.conftest import wait_until
from wire.records import Role
from worker.options import WorkerOptions
from worker.switch import SwitchingWorker

PLAN = RolePlan(ttft_s=2.0, itl_s=0.05, period_s=0.2, drain_s=10.0)
NAMES = [f"worker-{i}" for i in range(4)]


@pytest.fixture
def roles(tmp_path: Path) -> Iterator[Roles]:
    """Of four workers that have joined, in a cluster with a secret."""
    found = Roles(PLAN)
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef\n")
    secret.chmod(0o600)
    with ExitStack() as cleanup:
        directory = cleanup.enter_context(
            DirectoryHost(secret=open_secret(secret), assign_roles=found.assign)
        )
        for name in NAMES:
            options = WorkerOptions(
                model="fake", engine="fake", max_total_tokens=256, worker_id=name,
                directory=directory.address, cluster_secret_file=secret,
            )  # fmt: skip
            kinds = {Role.PREFILL: PrefillRole, Role.DECODE: DecodeRole}
            first = found.first(name)
            assert first is not None
            worker = SwitchingWorker(options, kinds, first, PLAN.drain_s)
            cleanup.callback(worker.close)
            worker.start()
        wait_until(lambda: len(found.table().rows) == 4, 10.0)
        yield found


def by_role(roles: Roles) -> dict[Role, list[str]]:
    rows = roles.table().rows
    return {role: [row.worker for row in rows if row.role is role] for role in Role}


def test_four_workers_take_the_roles_that_an_operator_sets(roles: Roles) -> None:
    assert roles.table().decided == "automatic"
    before = by_role(roles)
    assert {role: len(names) for role, names in before.items()} == {Role.PREFILL: 2, Role.DECODE: 2}
    assert roles.set(RoleCounts(1, 3)) == ""
    wait_until(lambda: len(by_role(roles)[Role.DECODE]) == 3, 20.0)
    assert roles.table().decided == "set"
    (last,) = by_role(roles)[Role.PREFILL]
    assert "no prefill worker" in roles.set(WorkerRoles({last: Role.DECODE}))
    other = before[Role.DECODE][0]
    assert roles.set(WorkerRoles({last: Role.DECODE, other: Role.PREFILL})) == ""
    wait_until(lambda: by_role(roles)[Role.PREFILL] == [other], 20.0)
    wait_until(lambda: len(roles.table().rows) == 4, 20.0)
    assert not any(row.wanted or row.draining for row in roles.table().rows)
    assert roles.set(AutomaticRoles()) == ""
    assert roles.table().decided == "automatic"


def test_fixed_roles_are_shown_and_not_set() -> None:
    roles = Roles(None)
    assert roles.assign([], 0.0) == []
    assert roles.table() == RoleTable("fixed", [])
    assert "fixed" in roles.set(RoleCounts(1, 1))


def test_the_plan_of_a_later_deployment_is_followed() -> None:
    roles = Roles(None)
    assert roles.first("worker-0") is None, "it started before a router has told the plan"
    roles.follow(PLAN)
    assert roles.first("worker-0") is Role.DECODE
    roles.follow(PLAN)
    assert roles.first("worker-1") is Role.PREFILL, "the first worker is not forgotten"
    assert roles.table().decided == "automatic"
    roles.follow(None)
    assert roles.first("worker-2") is None
    assert roles.table().decided == "fixed"


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_roles(parser)
    return parser.parse_args(arguments)


def test_the_command_says_what_is_wanted() -> None:
    assert parse_wish(parsed()) is None
    assert parse_wish(parsed("a=prefill", "b=decode")) == WorkerRoles({"a": Role.PREFILL, "b": Role.DECODE})
    assert parse_wish(parsed("--prefill", "2", "--decode", "3")) == RoleCounts(2, 3)
    assert parse_wish(parsed("--auto")) == AutomaticRoles()


@pytest.mark.parametrize(
    "arguments",
    [
        ("a",),
        ("a=both",),
        ("=decode",),
        ("--prefill", "2"),
        ("--auto", "a=decode"),
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
    lines = [line.split() for line in format_table(RoleTable("set", rows)).splitlines()]
    assert lines[1] == ["worker-b", "prefill", "1", "2", "345", "3s"]
    assert lines[2] == ["worker-a", "decode", "prefill", "7", "0", "0", "1h01m"]
    assert lines[3] == ["worker-c", "decode", "leaves", "0", "0", "0", "1m02s"]
    assert " ".join(lines[4]) == "1 prefill, 2 decode; roles: set"
