"""A page of a router's admin listener, for the commands that read or change one (docs/doors.md)."""

from __future__ import annotations

import argparse
import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from common.errors import ConfigError, WorkerLost
from common.host import LOOPBACK
from router.keys import ADMIN_KEY_ENV
from router.options import AdminOptions

ANSWER_S = 10.0


def add_admin_arguments(command: argparse.ArgumentParser) -> None:
    """--url and --admin-key-file."""
    command.add_argument(
        "--url", help="a router's admin listener (default: what the application on this machine's Ray "
        f"announces, or http://{LOOPBACK}:{AdminOptions().admin_port_range[0]})",
    )  # fmt: skip
    command.add_argument(
        "--admin-key-file",
        type=Path,
        metavar="FILE",
        help=f"its key, if it has one (default: {ADMIN_KEY_ENV})",
    )


def find_admin_listener() -> str:
    """URL of an admin listener: of the application on this machine's Ray, or at the first default port."""
    # Only here: Ray takes seconds to import, which a command with --url does not need.
    from cluster.running import announced_listeners

    found = announced_listeners()
    return found[0] if found else f"http://{LOOPBACK}:{AdminOptions().admin_port_range[0]}"


def admin_page(url: str, path: str, admin_key: str | None) -> str:
    """The page at a path of the listener at `url`.

    Raises ConfigError for a listener that is not there, or that wants another key, WorkerLost for one that
    does not answer.
    """
    return _answer(url, path, admin_key, "GET")


def admin_json(url: str, path: str, admin_key: str | None) -> Any:
    """A page that is JSON. Raises as `admin_page` does, and ConfigError for anything else."""
    try:
        return json.loads(admin_page(url, path, admin_key))
    except ValueError:
        raise _no_listener(url, "answers with a page of something else") from None


def admin_change(url: str, path: str, admin_key: str | None) -> str:
    """The answer to a POST. Raises as `admin_page` does."""
    return _answer(url, path, admin_key, "POST")


def _answer(url: str, path: str, admin_key: str | None, method: str) -> str:
    try:
        address = url.rstrip("/") + path
        request = urllib.request.Request(address, method=method)  # noqa: S310 (the user's own --url)
        if admin_key is not None:
            request.add_header("Authorization", f"Bearer {admin_key}")
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:  # noqa: S310 (as above)
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        message = _message(error.read())
        if error.code == 401:
            raise ConfigError(
                "--admin-key-file", message, f"give the key of {url}, or set {ADMIN_KEY_ENV}"
            ) from None
        if error.code >= 500:
            raise WorkerLost(message or f"the router answers {error.code}") from None
        if not message:
            raise _no_listener(url, f"answers {error.code}") from None
        if message == f"{path.partition('?')[0]} does not exist":  # a router's API says so
            raise _no_listener(url, f"has no {path.partition('?')[0]}") from None
        raise ConfigError("worker", message, "`baton tree` without a name shows all") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(
            "--url", f"nothing answers at {url}: {reason}", "give the address of a running Baton"
        ) from None


def _no_listener(url: str, found: str) -> ConfigError:
    problem = f"{url} {found}: it is not the admin listener of a Baton router"
    return ConfigError("--url", problem, "give the address of its admin listener")


def read_admin_key(path: Path | None) -> str | None:
    """The first key of a file, or of the environment. Raises ConfigError for a file that cannot be read."""
    if path is None:
        return os.environ.get(ADMIN_KEY_ENV) or None
    try:
        lines = path.read_text().split()
    except OSError as error:
        raise ConfigError(
            "--admin-key-file", f"cannot read {path}: {error.strerror}", "give a readable file"
        ) from None
    return lines[0] if lines else None


def _message(body: bytes) -> str:
    """The message of a router's error answer; "" for an answer of anything else."""
    try:
        decoded: Any = json.loads(body)
        return str(decoded["error"]["message"])
    except (ValueError, TypeError, KeyError):
        return ""
