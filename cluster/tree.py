"""`baton tree`: what the prefix caches of live workers hold, now.

A worker answers `Inspect` at its mailbox, between two steps. The router passes the question on (GET
/debug/inspect of its admin listener), so one URL is enough for a whole application. The directory of an
application on Ray knows the URL. A worker without a router is asked at its mailbox address.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError, WorkerLost
from common.host import LOOPBACK
from common.secrets import ClusterSecret
from router.keys import ADMIN_KEY_ENV
from wire.mailbox import Mailbox
from wire.messages import Inspect, Inspected
from wire.security import curve_for

ANSWER_S = 10.0
ADDRESS = "tcp://"


@dataclass(frozen=True)
class TreeSource:
    """Where to ask: the admin listener at `url` with its key, or workers by their addresses with this secret
    and local interface."""

    url: str
    admin_key: str | None = None
    secret: ClusterSecret | None = None
    interface: str = LOOPBACK

    def report(self, workers: list[str], what: str) -> dict[str, str]:
        """Worker -> its report `what`; of all workers of the router when none is named.

        `workers` are ids, or mailbox addresses ("tcp://host:port"). Raises ConfigError for a router or
        worker that is not there, WorkerLost for one that does not answer.
        """
        return {worker: self._ask(worker, what) for worker in workers or self._workers()}

    def _workers(self) -> list[str]:
        listed = json.loads(self._get("/debug/workers"))["workers"]
        if not listed:
            raise ConfigError("--url", f"the router at {self.url} has no workers yet", "try again later")
        return [str(worker["id"]) for worker in listed]

    def _ask(self, worker: str, what: str) -> str:
        if worker.startswith(ADDRESS):
            return self._ask_directly(worker, what)
        query = urllib.parse.urlencode({"worker": worker, "what": what})
        return self._get(f"/debug/inspect?{query}")

    def _ask_directly(self, address: str, what: str) -> str:
        with Mailbox(self.interface, curve_for(self.secret)) as mailbox:
            mailbox.send(address, Inspect(what, 1))
            deadline = time.monotonic() + ANSWER_S
            while (left := deadline - time.monotonic()) > 0:
                for mail in mailbox.wait(left):
                    if isinstance(mail.message, Inspected):
                        return mail.message.body
        raise WorkerLost(f"no worker answers at {address}")

    def _get(self, path: str) -> str:
        try:
            request = urllib.request.Request(self.url.rstrip("/") + path)  # noqa: S310 (the user's own --url)
            if self.admin_key is not None:
                request.add_header("Authorization", f"Bearer {self.admin_key}")
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:  # noqa: S310 (as above)
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            message = _message(error.read())
            if error.code == 401:
                raise ConfigError(
                    "--admin-key-file", message, f"give the key of {self.url}, or set {ADMIN_KEY_ENV}"
                ) from None
            if error.code >= 500:
                raise WorkerLost(message or f"the router answers {error.code}") from None
            raise ConfigError(
                "worker" if message else "--url",
                message or f"{self.url} answers {error.code}: it is not a Baton router",
                "`baton tree` without a name shows all"
                if message
                else "give the address of its admin listener",
            ) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ConfigError(
                "--url", f"nothing answers at {self.url}: {reason}", "give the address of a running Baton"
            ) from None


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
