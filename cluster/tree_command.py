"""The command `baton tree`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from cluster.admin_page import add_admin_arguments, find_admin_listener, read_admin_key
from cluster.tree import ADDRESS, TreeSource
from common.errors import WorkerLost
from common.host import LOOPBACK
from common.secrets import SECRET_VARIABLE, open_secret

HELP = (
    "Print the prefix tree of each WORKER of a running Baton, or of all: per node its tokens, what each kind "
    "of KV keeps there, locks and hits. WORKER is an id (/debug/workers of the admin listener lists them) or "
    "a mailbox address, tcp://HOST:PORT."
)


def add_arguments(tree: argparse.ArgumentParser) -> None:
    """Its arguments."""
    tree.add_argument("workers", metavar="WORKER", nargs="*", help="default: every worker of the router")
    add_admin_arguments(tree)
    tree.add_argument("--json", action="store_true", help="print the nodes as JSON, with all their tokens")
    tree.add_argument(
        "--cluster-secret-file",
        metavar="FILE",
        type=Path,
        help=f"needed to ask a worker by its address; default: the environment's {SECRET_VARIABLE}",
    )
    tree.add_argument(
        "--interface", default=LOOPBACK, help="local address that the worker answers to (default %(default)s)"
    )
    tree.set_defaults(run=_tree)


def _tree(arguments: argparse.Namespace) -> int:
    named = bool(arguments.workers) and all(one.startswith(ADDRESS) for one in arguments.workers)
    url = arguments.url or ("" if named else find_admin_listener())
    key = read_admin_key(arguments.admin_key_file)
    secret = open_secret(arguments.cluster_secret_file)
    source = TreeSource(url, key, secret, arguments.interface)
    try:
        reports = source.report(arguments.workers, "nodes" if arguments.json else "tree")
    except WorkerLost as lost:
        print(f"baton: {lost}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps({worker: json.loads(report) for worker, report in reports.items()}))
    else:
        print("\n\n".join(f"{worker}\n{report}" for worker, report in reports.items()))
    return 0
