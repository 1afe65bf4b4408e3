"""A whole Baton in plain processes on loopback, without Ray: directory, router, prefill and decode workers.

Tests and benches run it. The programs are those that cluster/ hosts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from common.secrets import open_secret
from router.directory.options import DirectoryOptions
from tests.harness.processes import Child, ChildFailed
from wire.mailbox import Mailbox
from wire.messages.caches import Inspect, Inspected
from wire.security import curve_for

SETTLE_S = 20.0
SWITCHING = "tests.support.switching_worker"


@dataclass
class Stack:
    """A running stack. `http` and `admin` are bounded; `mailbox` inspects the workers."""

    directory: Child
    router: Child
    prefill: list[Child]
    decode: list[Child]
    http: httpx.Client
    admin: httpx.Client
    mailbox: Mailbox
    _cleanup: ExitStack = field(default_factory=ExitStack)
    _token: int = field(default=0)

    @property
    def url(self) -> str:
        """Where the API answers."""
        return str(self.router.ready["http"])

    @property
    def workers(self) -> list[Child]:
        return [*self.prefill, *self.decode]

    def inspect(self, worker: Child, what: str) -> Any:
        """A worker's report."""
        self._token += 1
        self.mailbox.send(worker.ready["mailbox"], Inspect(what, self._token))
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline:
            for mail in self.mailbox.wait(1.0):
                if isinstance(mail.message, Inspected) and mail.message.token == self._token:
                    return mail.message.body if what == "tree" else json.loads(mail.message.body)
        raise ChildFailed(f"{worker.module} does not answer Inspect:\n{worker.log.read_text()[-3000:]}")

    def start_again(self, ended: Child, runner: tuple[str, ...] = ()) -> Child:
        """Start a worker that has ended again, under its name, and wait until the router sees it."""
        nodes = self.prefill if ended in self.prefill else self.decode
        options = {**ended.options, "worker_id": ended.ready["id"]}
        child = Child(ended.module, options, ended.log.parent, runner, ended.arguments)
        nodes[nodes.index(ended)] = self._cleanup.enter_context(child)
        address = child.wait_ready()["mailbox"]
        deadline = time.monotonic() + SETTLE_S
        while address not in {one["mailbox"] for one in self.admin.get("/debug/workers").json()["workers"]}:
            if time.monotonic() >= deadline:
                raise ChildFailed("the router does not see the worker that was started again")
        return child

    def settle(self) -> None:
        """Wait until no worker holds a room, then check that every pool balances and nothing is held."""
        deadline = time.monotonic() + SETTLE_S
        for worker in self.workers:
            while held := self.inspect(worker, "rooms") or in_use(self.inspect(worker, "memory")):
                if time.monotonic() >= deadline:
                    raise ChildFailed(f"{worker.ready} still holds {held}")

    def generate(self, prompt: list[int], max_new_tokens: int, **sampling: Any) -> dict[str, Any]:
        """One /generate of token ids, greedy and without an end token unless told otherwise."""
        params = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": max_new_tokens, **sampling}
        answer = self.http.post("/generate", json={"input_ids": prompt, "sampling_params": params})
        if answer.status_code != 200:
            raise RuntimeError(f"/generate answered {answer.status_code}: {answer.text}")
        return dict(answer.json())

    def generate_all(self, prompts: list[list[int]], max_new_tokens: int) -> list[dict[str, Any]]:
        """All at once."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, max_new_tokens), prompts))


def in_use(report: dict[str, Any]) -> dict[str, Any]:
    """What a memory report says is neither free nor an unlocked part of the cache, in any group."""
    found = {name: value for name, value in report.items() if name in HELD and value}
    for group, books in report["groups"].items():
        found.update({f"{group}.{name}": books[name] for name in HELD_IN_GROUP if books[name]})
    return found


HELD = ("protected_pages", "held_pages", "quarantined_pages", "pending_pages", "held_rows")
HELD_IN_GROUP = ("protected", "held", "quarantined", "pending")


@contextmanager
def stack(
    model: Path,
    directory: Path,
    prefill: int = 1,
    decode: int = 1,
    router: dict[str, Any] | None = None,
    runner: tuple[str, ...] = (),
    directory_port: int = 0,
    switching: bool = False,
    by_role: Mapping[str, dict[str, Any]] | None = None,
    **worker: Any,
) -> Iterator[Stack]:
    """Start a stack serving `model` as "m", with files in `directory`, and end it whatever happens. `runner`
    as in Child. `switching`: the workers can change their roles. `by_role`: options of "prefill" and "decode"
    workers beside those of all."""
    with ExitStack() as cleanup:
        given = router or {}
        shared = DirectoryOptions.model_fields.keys() - {"port"}
        leased = {**{key: given[key] for key in shared if key in given}, "port": directory_port}
        leases = cleanup.enter_context(Child("router.directory", leased, directory, runner))
        common = {
            "model": str(model),
            "served_model_name": "m",
            "directory": leases.wait_ready()["mailbox"],
        }
        front = cleanup.enter_context(
            Child("router", {**common, "port": 0, "admin_ports": "0", **given}, directory, runner)
        )
        front.wait_ready()
        own = by_role or {}
        nodes = {
            role: [
                cleanup.enter_context(
                    Child(SWITCHING, options, directory, runner, (role,))
                    if switching
                    else Child(f"{role}_node", options, directory, runner)
                )
                for _ in range(count)
            ]
            for role, count in (("prefill", prefill), ("decode", decode))
            for options in ({**common, **worker, **own.get(role, {})},)
        }
        for node in (*nodes["prefill"], *nodes["decode"]):
            node.wait_ready()
        http = cleanup.enter_context(httpx.Client(base_url=front.ready["http"], timeout=120.0))
        admin = cleanup.enter_context(httpx.Client(base_url=front.ready["admin"], timeout=120.0))
        secret = open_secret(Path(file) if (file := worker.get("cluster_secret_file")) else None)
        mailbox = cleanup.enter_context(Mailbox(curve=curve_for(secret)))
        running = Stack(leases, front, nodes["prefill"], nodes["decode"], http, admin, mailbox, cleanup)
        wait_for_workers(running, prefill + decode)
        try:
            yield running
        finally:
            for node in running.workers:
                node.ask_to_end()


def wait_for_workers(running: Stack, count: int, timeout_s: float = 30.0) -> None:
    """Until the router sees `count` workers."""
    deadline = time.monotonic() + timeout_s
    while len(seen := running.admin.get("/debug/workers").json()["workers"]) != count:
        if time.monotonic() >= deadline:
            raise ChildFailed(f"the router sees {len(seen)} workers, not {count}: {seen}")
