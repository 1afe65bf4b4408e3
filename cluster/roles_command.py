"""`baton roles`: who prefills and who decodes, and the operator's word on it.

It asks the directory's actor, which assigns the roles. Access to the Ray cluster is the permission.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

import ray

from cluster.directory_actor import DirectoryFinder
from cluster.roles import AutomaticRoles, RoleCounts, RoleRow, RoleTable, RoleWish, WorkerRoles
from cluster.running import APP_NAME, connect_ray, running_ray
from cluster.worker_ids import parse_worker_id
from common.errors import ConfigError, Unavailable
from wire.records import Role

HELP = (
    "Show the workers of a running Baton with their roles and loads. With `roles: dynamic`, also assign "
    "roles: to workers by name, or so many to each role. A worker drains, and begins again in its new role "
    "with the same weights and cache. What is set holds until --auto."
)
_COLUMNS = ("worker", "role", "becomes", "running", "waiting", "queued tokens", "since")


def add_arguments(roles: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    roles.add_argument("workers", metavar="WORKER=ROLE", nargs="*", help="prefill or decode for this worker")
    roles.add_argument("--prefill", type=int, metavar="N", help="so many prefill workers (with --decode)")
    roles.add_argument("--decode", type=int, metavar="N", help="so many decode workers (with --prefill)")
    roles.add_argument("--deployment", metavar="NAME", help="where counts or --auto hold, of several")
    roles.add_argument("--auto", action="store_true", help="roles follow the load again")
    roles.add_argument("--json", action="store_true", help="print the table as JSON")
    roles.set_defaults(run=_roles)


def parse_wish(arguments: argparse.Namespace) -> RoleWish | None:
    """What the arguments ask for; None: only to be shown. Raises ConfigError for more than one wish."""
    counts = (arguments.prefill, arguments.decode)
    given = [bool(arguments.workers), counts != (None, None), arguments.auto]
    if sum(given) > 1:
        raise ConfigError("baton roles", "workers, counts and --auto exclude each other", "give one of them")
    if arguments.deployment and (arguments.workers or not any(given)):
        raise ConfigError("--deployment", "it is for counts and --auto", "give them, or remove it")
    if arguments.workers:
        return WorkerRoles(dict(_assignment(text) for text in arguments.workers))
    if counts != (None, None):
        if None in counts:
            raise ConfigError("baton roles", "only one of --prefill and --decode is given", "give both")
        return RoleCounts(*counts, arguments.deployment)
    return AutomaticRoles(arguments.deployment) if arguments.auto else None


def _assignment(text: str) -> tuple[str, Role]:
    worker, _, role = text.partition("=")
    if not worker or role not in set(Role):
        raise ConfigError("WORKER=ROLE", f"{text!r} is none", "for example worker-abc123=prefill")
    return worker, Role(role)


def format_table(table: RoleTable) -> str:
    """A line per worker, and one with the counts for each deployment whose roles change, or one for all."""
    lines = [_COLUMNS] + [
        (
            row.worker,
            str(row.role),
            str(row.wanted) if row.wanted else "leaves" if row.draining else "",
            str(row.running), str(row.waiting), str(row.queued_tokens), _duration(row.since_s),
        )
        for row in table.rows
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    totals = []
    for name, who in table.decided.items():
        here = [row for row in table.rows if parse_worker_id(row.worker)[0] == name]
        totals.append(f"{name}: {_counts(here)}; roles: {who}")
    if not totals:
        totals.append(f"{_counts(table.rows)}; roles: fixed")
    return "\n".join([*(line.rstrip() for line in shown), *totals])


def _counts(rows: Sequence[RoleRow]) -> str:
    return ", ".join(f"{sum(row.role is role for row in rows)} {role}" for role in Role)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def _roles(arguments: argparse.Namespace) -> int:
    wish = parse_wish(arguments)
    address = running_ray()
    if address is None:
        raise ConfigError("RAY_ADDRESS", "no Ray runs on this machine", "name the one that serves")
    connect_ray(address)
    try:
        finder = DirectoryFinder(APP_NAME)
        problem = "" if wish is None else finder.set_roles(wish)
        if problem:
            raise ConfigError("baton roles", problem, "`baton roles` shows who is there")
        table = finder.roles()
    except Unavailable as error:
        sys.stderr.write(f"baton: {error}\n")
        return 1
    finally:
        ray.shutdown()
    sys.stdout.write((json.dumps(asdict(table)) if arguments.json else format_table(table)) + "\n")
    return 0
