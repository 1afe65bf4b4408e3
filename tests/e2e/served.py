"""What tests ask of a served application: its workers, their memory, and that nothing is held when idle."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
from openai import OpenAI

from wire.mailbox import Mailbox
from wire.messages.caches import Inspect, Inspected

_ANSWER_S = 10.0
_SETTLE_S = 30.0
_POLL_S = 0.2


FREE = ("free", "evictable")
HELD = ("protected", "held", "quarantined", "pending")


def in_use(memory: dict[str, Any]) -> dict[str, int]:
    """What a memory report says is neither free nor an unlocked part of the cache, in any group. The books
    must balance."""
    groups = {"": {name: memory[f"{name}_pages"] for name in ("total", *FREE, *HELD)}, **memory["groups"]}
    held = {"rows": memory["held_rows"]}
    for group, books in groups.items():
        assert sum(books[name] for name in FREE + HELD) == books["total"], memory
        held.update({f"{group} {name}": books[name] for name in HELD})
    assert memory["free_rows"] + memory["held_rows"] == memory["total_rows"], memory
    return {name: count for name, count in held.items() if count}


class AdminListeners:
    """The admin listeners of an application's routers, which have ports of this range."""

    def __init__(self, ports: range) -> None:
        self._ports = ports
        self._http = httpx.Client(timeout=10.0)

    @property
    def option(self) -> str:
        """The range as an option of the routers."""
        return f"{self._ports[0]}-{self._ports[-1]}"

    def get(self, path: str) -> httpx.Response:
        """The page of the first that answers. Raises httpx.HTTPError when none does."""
        return self._ask("GET", path)

    def post(self, path: str) -> httpx.Response:
        """As `get`, a change."""
        return self._ask("POST", path)

    def each(self, path: str) -> list[httpx.Response]:
        """The page of every router."""
        pages = []
        for port in self._ports:
            with suppress(httpx.ConnectError):
                pages.append(self._http.get(f"http://127.0.0.1:{port}{path}"))
        return pages

    def _ask(self, method: str, path: str) -> httpx.Response:
        failed: httpx.HTTPError | None = None
        for port in self._ports:
            try:
                return self._http.request(method, f"http://127.0.0.1:{port}{path}")
            except httpx.HTTPError as error:
                failed = error
        assert failed is not None
        raise failed

    def close(self) -> None:
        """Close the connections."""
        self._http.close()


@dataclass
class Served:
    """An application at `url`."""

    url: str
    admin: AdminListeners
    http: httpx.Client
    openai: OpenAI
    mailbox: Mailbox
    token: int = 0

    def workers(self) -> list[dict[str, Any]]:
        """Records of the live workers, as the router sees them."""
        return list(self.admin.get("/debug/workers").raise_for_status().json()["workers"])

    def wait_for_workers(self, count: int, timeout_s: float = 60.0) -> None:
        """Until the router answers and sees exactly `count` workers."""
        deadline = time.monotonic() + timeout_s
        while (found := self._workers_seen()) != count:
            assert time.monotonic() < deadline, f"wanted {count} workers, the router sees {found}"
            time.sleep(_POLL_S)

    def inspect(self, worker: dict[str, Any], what: str) -> Any:
        """A worker's report, asked over its own mailbox."""
        self.token += 1
        self.mailbox.send(worker["mailbox"], Inspect(what, self.token))
        deadline = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline:
            for mail in self.mailbox.wait(1.0):
                if isinstance(mail.message, Inspected) and mail.message.token == self.token:
                    return json.loads(mail.message.body)
        raise AssertionError(f"{worker['id']} does not answer")

    def settle(self) -> None:
        """Every pool of every worker balances (the worker checks that itself) and nothing is held."""
        for worker in self.workers():
            deadline = time.monotonic() + _SETTLE_S
            while held := in_use(self.inspect(worker, "memory")) or self.inspect(worker, "rooms"):
                assert time.monotonic() < deadline, f"{worker['id']} still holds {held}"
                time.sleep(_POLL_S)

    def _workers_seen(self) -> int | None:
        try:
            return len(self.workers())
        except httpx.HTTPError:
            return None


@contextmanager
def served(url: str, admin_port: int) -> Iterator[Served]:
    """Clients of the application at `url`, closed afterwards. Its routers have admin ports from there on."""
    with (
        closing(AdminListeners(range(admin_port, admin_port + 8))) as admin,
        httpx.Client(base_url=url, timeout=60.0) as http,
        OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120.0, max_retries=0) as openai,
        Mailbox() as mailbox,
    ):
        yield Served(url, admin, http, openai, mailbox)
