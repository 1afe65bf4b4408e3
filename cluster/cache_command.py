"""The command `baton cache`."""

from __future__ import annotations

import argparse
import json
import sys
import urllib.parse
from collections.abc import Mapping
from typing import get_args

import msgspec
from rich.console import Console

from cluster.admin_page import (
    add_admin_arguments,
    admin_change,
    admin_json,
    find_admin_listener,
    read_admin_key,
)
from cluster.cache_table import cache_table, row_objects, sharing_table, tier_rows
from cluster.tree import TreeSource
from common.errors import ConfigError, WorkerLost
from kvcache.tenancy.report import SharingReport
from wire.messages.caches import CacheTier
from wire.records import WorkerRecord

HELP = (
    "Print for each tier (device, host, storage) of each worker of a running Baton: pages and GB held, the "
    "share of the prompts' tokens that came from there, GB written and read, moves that failed or wait. "
    "Where tenants share, print for each worker what is public and what private, and how it is used. "
    "`baton cache clear` has workers forget what is cached and not in use."
)
_TIERS: tuple[CacheTier, ...] = get_args(CacheTier)
_COLUMNS = 140  # of a table that goes to a file


def add_arguments(cache: argparse.ArgumentParser) -> None:
    """Its arguments."""
    cache.add_argument("action", nargs="?", choices=("show", "clear"), default="show", help="default: show")
    cache.add_argument("--worker", metavar="ID", help="of this worker alone")
    cache.add_argument("--tier", choices=(*_TIERS, "all"), default="all", help="default: %(default)s")
    add_admin_arguments(cache)
    cache.add_argument("--json", action="store_true", help="print JSON")
    cache.set_defaults(run=_cache)


def _cache(arguments: argparse.Namespace) -> int:
    key = read_admin_key(arguments.admin_key_file)
    url = arguments.url or find_admin_listener()
    try:
        return (_clear if arguments.action == "clear" else _show)(arguments, url, key)
    except WorkerLost as lost:
        sys.stderr.write(f"baton: {lost}\n")
        return 1


def _show(arguments: argparse.Namespace, url: str, key: str | None) -> int:
    listed = admin_json(url, "/debug/workers", key)["workers"]
    workers = msgspec.convert(listed, list[WorkerRecord])
    there = [worker.id for worker in workers]
    if arguments.worker is not None and arguments.worker not in there:
        raise ConfigError(
            "--worker", f"no worker is called {arguments.worker!r}", f"there are: {', '.join(there)}"
        )
    rows = [
        row
        for row in tier_rows(workers)
        if arguments.worker in (None, row.worker) and arguments.tier in ("all", row.tier)
    ]
    if arguments.json:
        print(json.dumps(row_objects(rows)))
        return 0
    console = Console(width=None if sys.stdout.isatty() else _COLUMNS, highlight=False)
    console.print(cache_table(rows))
    sharing = [
        worker.id for worker in workers if worker.shares_pages and arguments.worker in (None, worker.id)
    ]
    if sharing and arguments.tier in ("all", "device"):
        reports = TreeSource(url, key).report(sharing, "sharing")
        console.print()
        console.print(
            sharing_table(
                {one: msgspec.json.decode(said, type=SharingReport) for one, said in reports.items()}
            )
        )
    return 0


def _clear(arguments: argparse.Namespace, url: str, key: str | None) -> int:
    query = {"tier": arguments.tier}
    if arguments.worker is not None:
        query["worker"] = arguments.worker
    said = admin_change(url, f"/admin/cache/clear?{urllib.parse.urlencode(query)}", key)
    answer = json.loads(said)
    if arguments.json:
        print(said)
    else:
        for worker, freed in answer["freed"].items():
            print(f"{worker}: {_told(freed)}")
    for worker, problem in answer["problems"].items():
        sys.stderr.write(f"baton: {worker}: {problem}\n")
    for worker in answer["silent"]:
        sys.stderr.write(f"baton: {worker} did not answer in time\n")
    return 1 if answer["problems"] or answer["silent"] else 0


def _told(freed: Mapping[str, int]) -> str:
    units = {"device": "pages", "host": "pages", "storage": "blobs"}
    return (
        ", ".join(f"{tier} {count:,} {units[tier]}" for tier, count in freed.items()) or "it has no such tier"
    )
