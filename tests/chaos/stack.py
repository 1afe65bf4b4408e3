"""ChaosStack: a directory, two routers, prefill and decode workers, each a process behind the network."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.chaos.network import Network
from tests.chaos.observed import wait_until
from tests.chaos.processes import Forked, Launch
from tests.harness.local_stack import in_use
from wire.mailbox import Mailbox
from wire.messages.caches import Inspect, Inspected

MODULES = {"P": "prefill_node", "D": "decode_node", "router": "router", "directory": "router.directory"}
SLOTS = ("directory/0", "router/0", "router/1", "P/0", "P/1", "D/0", "D/1")
_ANSWER_S = 5.0
_GONE_S, _PER_GONE = 20.0, 8
_CHANNELS = 8  # of a pair of workers: how many writes ran at once decides how many connections it keeps


@dataclass(frozen=True)
class StackOptions:
    """How a stack is built. `worker` and `router` are their options."""

    model: Path
    worker: dict[str, Any] = field(default_factory=dict)
    decode: dict[str, Any] = field(default_factory=dict)  # of decode workers alone
    router: dict[str, Any] = field(default_factory=dict)


class ChaosStack:
    """Running processes by slot. A slot keeps its name while processes in it come and go."""

    def __init__(self, options: StackOptions, network: Network, directory: Path) -> None:
        self.network = network
        self.options = options
        self._files = directory
        self._mailbox = Mailbox()
        self._token = 0
        self._started = 0
        self._most_open: dict[str, int] = {}  # by role
        self._ended_at: list[float] = []
        self.http = httpx.Client(timeout=_ANSWER_S)
        self.running: dict[str, Forked] = {}
        self.strays: list[Forked] = []  # replaced, and not ended yet
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._directory_port = free.getsockname()[1]  # also of those that take its place
        self.start("directory/0").wait_ready()
        for slot in SLOTS[1:]:
            self.start(slot)
        for forked in self.running.values():
            if not forked.ready:
                forked.wait_ready()

    # -- processes -----------------------------------------------------------------------------

    def start(self, slot: str, same_id: bool = True) -> Forked:
        """Start a process in a slot that has none. `same_id`: under the worker id of its predecessor."""
        role = slot.partition("/")[0]
        self._started += 1
        self._ended_at.append(time.monotonic())  # its predecessor's end
        name = f"{slot}-{self._started}"
        if role == "directory":
            options: dict[str, Any] = {"port": self._directory_port, "lease_s": 3.0}
        elif role == "router":
            options = {
                "model": str(self.options.model),
                "served_model_name": "m",
                "port": 0,
                "admin_ports": "0",
            }
            options.update(self.options.router)
        else:
            options = {"model": str(self.options.model), "served_model_name": "m", **self.options.worker}
            options.update(self.options.decode if role == "D" else {})
            options["worker_id"] = slot if same_id else name
        if role != "directory":
            options["directory"] = self.running["directory/0"].ready["mailbox"]
        forked = Forked(Launch(name, MODULES[role], options), self.network.address, self._files)
        self.running[slot] = forked
        return forked

    def of_role(self, role: str) -> list[Forked]:
        """The running processes of a role."""
        return [one for slot, one in self.running.items() if slot.startswith(f"{role}/")]

    def slot_of(self, forked: Forked) -> str:
        """The slot of a process."""
        return next(slot for slot, one in self.running.items() if one is forked)

    def routers(self) -> list[str]:
        """URLs of the routers."""
        return [one.ready["http"] for one in self.of_role("router") if one.ready]

    @property
    def workers(self) -> list[Forked]:
        return [*self.of_role("P"), *self.of_role("D")]

    # -- what they say of themselves -----------------------------------------------------------

    def inspect(self, worker: Forked, what: str) -> Any:
        """A worker's report. Raises TimeoutError when it does not answer."""
        self._token += 1
        self._mailbox.send(worker.ready["mailbox"], Inspect(what, self._token))
        deadline = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline:
            for mail in self._mailbox.wait(0.5):
                if isinstance(mail.message, Inspected) and mail.message.token == self._token:
                    return json.loads(mail.message.body)
        raise TimeoutError(f"{worker.name} does not answer Inspect {what}")

    def admins(self) -> list[str]:
        """URLs of the routers' admin listeners."""
        return [one.ready["admin"] for one in self.of_role("router") if one.ready]

    def debug(self, page: str, router: int = 0) -> Any:
        """A router's debug page, parsed; None when it does not answer."""
        try:
            return self.http.get(f"{self.admins()[router]}/debug/{page}").raise_for_status().json()
        except (httpx.HTTPError, IndexError):
            return None

    def held(self) -> dict[str, Any]:
        """What workers hold of rooms and pages, by name; {} when all are idle and every pool balances."""
        found: dict[str, Any] = {}
        for worker in self.workers:
            try:
                held = self.inspect(worker, "rooms") or in_use(self.inspect(worker, "memory"))
            except (TimeoutError, KeyError) as error:
                held = str(error)
            if held:
                found[worker.name] = held
        return found

    def prefilled(self) -> int:
        """Prompt tokens that the running workers have computed so far."""
        return sum(
            self.inspect(one, "metrics")["prefill_tokens"]
            for one in self.workers
            if not one.observed.draining
        )

    def whole(self) -> bool:
        """Whether every router sees exactly the workers that run, none of them draining."""
        wanted = {(worker.ready["id"], worker.ready["mailbox"]) for worker in self.workers}
        for router in range(len(self.of_role("router"))):
            page = self.debug("workers", router)
            if page is None:
                return False
            seen = {(one["id"], one["mailbox"]) for one in page["workers"] if not one.get("draining")}
            if seen != wanted:
                return False
        return True

    def take_baseline(self) -> None:
        """What processes of each role have open now is what they may have open when they are idle."""
        for slot, forked in self.running.items():
            role = slot.partition("/")[0]
            self._most_open[role] = max(self._most_open.get(role, 0), forked.descriptors())

    def leaked_descriptors(self) -> dict[str, int]:
        """By process: how many files, sockets and so on are open beyond the baseline.

        A process keeps the way to another that has ended for some seconds (wire/sockets.py).
        """
        gone = sum(at > time.monotonic() - _GONE_S for at in self._ended_at)
        found = {}
        for slot, forked in self.running.items():
            pairs = len(self.workers) - 1 if forked in self.workers else 1
            most = self._most_open[slot.partition("/")[0]] + pairs * _CHANNELS + gone * _PER_GONE
            if (extra := forked.descriptors() - most) > 0:
                found[forked.name] = extra
        return found

    def close(self) -> None:
        """End every process."""
        self.network.faults.heal()
        for forked in (*self.strays, *self.running.values()):
            forked.end(signal.SIGKILL)
        self._mailbox.close()
        self.http.close()


@contextmanager
def chaos_stack(options: StackOptions, network: Network, directory: Path) -> Iterator[ChaosStack]:
    """A stack that is whole, ended whatever happens."""
    stack = ChaosStack(options, network, directory)
    try:
        until(stack.whole, "the routers do not see all workers")
        yield stack
    finally:
        stack.close()


def until(happened: Callable[[], bool], otherwise: str, timeout_s: float = 30.0) -> None:
    """Wait for something. Raises TimeoutError."""
    if not wait_until(happened, timeout_s):
        raise TimeoutError(otherwise)
