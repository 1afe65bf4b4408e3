"""The command `baton forget`."""

from __future__ import annotations

import argparse
import json
import sys
import urllib.parse
from collections.abc import Mapping
from typing import Any

from cluster.admin_page import add_admin_arguments, admin_change, find_admin_listener, read_admin_key
from common.errors import WorkerLost

HELP = (
    "Forget what a tenant has cached: no later request finds it, on any worker or in storage, and it is "
    "removed. Pages that are public stay."
)
_GB = 1e9


def add_arguments(forget: argparse.ArgumentParser) -> None:
    """Its arguments."""
    forget.add_argument("tenant", help="its name, as in the keys' file or as the gateway gives it")
    add_admin_arguments(forget)
    forget.add_argument("--json", action="store_true", help="print JSON")
    forget.set_defaults(run=_forget)


def _forget(arguments: argparse.Namespace) -> int:
    key = read_admin_key(arguments.admin_key_file)
    url = arguments.url or find_admin_listener()
    path = f"/admin/tenants/{urllib.parse.quote(arguments.tenant, safe='')}/forget"
    try:
        said = admin_change(url, path, key)
    except WorkerLost as lost:
        sys.stderr.write(f"baton: {lost}\n")
        return 1
    answer = json.loads(said)
    if arguments.json:
        print(said)
    else:
        for worker, report in answer["workers"].items():
            print(f"{worker}: {_told(report)}")
    for worker, report in answer["workers"].items():
        if report["problem"]:
            sys.stderr.write(f"baton: {worker}: {report['problem']}\n")
    for worker in answer["silent"]:
        sys.stderr.write(f"baton: {worker} did not answer in time: it forgets when it hears of it\n")
    if not answer["told"]:
        sys.stderr.write("baton: the directory did not answer in time: other routers are told when it does\n")
    is_done = answer["told"] and not answer["silent"]
    return 0 if is_done and not any(one["problem"] for one in answer["workers"].values()) else 1


def _told(report: Mapping[str, Any]) -> str:
    units = {"device": "pages", "host": "pages", "storage": "blobs"}
    parts = [
        f"{tier} {one['pages']:,} {units[tier]}, {one['bytes'] / _GB:.3g} GB"
        for tier, one in report["removed"].items()
    ]
    if report["locked_pages"]:
        parts.append(f"{report['locked_pages']:,} pages are in use and go when they are not")
    elif report["unfinished"]:
        parts.append(f"{' and '.join(report['unfinished'])} not finished yet")
    return "; ".join(parts) or "nothing of it was here"
