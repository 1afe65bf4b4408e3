"""`baton tree`: what the prefix caches of live workers hold, now.

A worker answers `Inspect` at its mailbox, between two steps. The router passes the question on (GET
/debug/inspect of its admin listener), so one URL is enough for a whole application. The directory of an
application on Ray knows the URL. A worker without a router is asked at its mailbox address.
"""

from __future__ import annotations

import time
import urllib.parse
from dataclasses import dataclass

from cluster.admin_page import admin_json, admin_page
from common.errors import ConfigError, WorkerLost
from common.host import LOOPBACK
from common.secrets import ClusterSecret
from wire.mailbox import Mailbox
from wire.messages.caches import Inspect, Inspected
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
        listed = admin_json(self.url, "/debug/workers", self.admin_key)["workers"]
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
        return admin_page(self.url, path, self.admin_key)
