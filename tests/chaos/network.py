"""Network: stands between the processes of a Baton, and does to their messages what `faults` says.

A process that was started by tests/chaos/launcher.py tells the network which ports it has bound, and asks it
for the way to every address that it connects to: requests and KV control, KV events, and the connections of
the tcp transport and those on which Mooncake's writes are granted. Faults are thus below ZeroMQ and its
heartbeats, and no process knows of them. Not behind the network: Mooncake's own data connections, and shared
memory.

The network is a process of its own (`python -m tests.chaos.network ADDRESS SEED`): a busy test must not be
taken for a slow network.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
from collections import Counter
from typing import Any

import uvloop

from tests.chaos.faults import STRANGER, Faults
from tests.chaos.links import Link

log = logging.getLogger(__name__)

_BOUND_S = 10.0
_LINE_BYTES = 1 << 16
_TICK_S = 0.05
_PRIORITY = -15  # a network does not compete with programs for processors; needs root


def ask_network(address: str, question: dict[str, Any]) -> dict[str, Any]:
    """Ask the network that listens at `address`, and wait for its answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(_BOUND_S)
        sock.connect("\0" + address.removeprefix("@"))
        sock.sendall(json.dumps(question).encode() + b"\n")
        with sock.makefile("rb") as answer:
            return dict(json.loads(answer.readline()))


class NetworkFaults:
    """The faults of a Network, from outside (see Faults)."""

    def __init__(self, address: str) -> None:
        self._address = address

    def cut(self, one: str, other: str) -> None:
        """Nothing passes between two processes."""
        self._tell("cut", one, other)

    def lose(self, name: str) -> None:
        """Drop, double and delay what the process sends and what it is sent."""
        self._tell("lose", name)

    def lose_all(self) -> None:
        """As `lose`, for every process."""
        self._tell("lose_all")

    def slow(self, name: str, delay_s: float) -> None:
        """Everything from and to the process arrives so much later."""
        self._tell("slow", name, delay_s)

    def heal(self) -> None:
        """No faults from now on."""
        self._tell("heal")

    @property
    def disturbed(self) -> Counter[str]:
        """How many messages were disturbed, by the role of their sender."""
        return Counter(ask_network(self._address, {"disturbed": True}))

    def longest_lag_s(self) -> float:
        """The longest time for which the network's process did not run, since the last call of this."""
        return float(ask_network(self._address, {"lag": True})["lag"])

    def _tell(self, fault: str, *arguments: object) -> None:
        ask_network(self._address, {"fault": fault, "arguments": arguments})


class Network:
    """Starts the network's process and ends it. `address` is what the launcher is told."""

    def __init__(self, seed: int = 0) -> None:
        self.address = f"@baton-chaos-{secrets.token_hex(8)}"
        self.faults = NetworkFaults(self.address)
        command = [sys.executable, "-m", "tests.chaos.network", self.address, str(seed)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n", "the network does not start"

    def close(self) -> None:
        """End the process. Every connection breaks."""
        self._process.communicate(timeout=_BOUND_S)  # closes its stdin: it ends

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class NetworkServer:
    """What runs in the network's process: the links, and answers to questions about them."""

    def __init__(self, address: str, seed: int) -> None:
        self._faults = Faults(seed)
        self._address = address
        self._owners: dict[str, str] = {}  # "host:port" -> the process that has bound it
        self._links: dict[tuple[str, str], tuple[Link, str]] = {}  # (source, target) -> it and its address
        self._lag_s = 0.0

    async def serve(self) -> None:
        """Serve until stdin is closed."""
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind("\0" + self._address.removeprefix("@"))
        server = await asyncio.start_unix_server(self._answer, sock=sock, limit=_LINE_BYTES)
        loop.add_reader(sys.stdin, over.set)  # the test ends, or has ended
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        lag = asyncio.create_task(self._watch_lag())
        await over.wait()
        lag.cancel()
        server.close()
        await asyncio.gather(*(link.close() for link, _ in self._links.values()))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One question: a line of JSON, answered with another."""
        try:
            question: dict[str, Any] = json.loads(await reader.readline())
            answer: dict[str, Any] = {}
            if "bound" in question:
                self._owners[question["bound"]] = question["name"]
            elif "fault" in question:
                getattr(self._faults, question["fault"])(*question["arguments"])
            elif "lag" in question:
                answer, self._lag_s = {"lag": self._lag_s}, 0.0
            elif "disturbed" in question:
                answer = dict(self._faults.disturbed)
            else:
                answer = {"address": await self._way(**question)}
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        except (OSError, ValueError) as error:  # the process has ended in between
            log.info("a question to the network was cut short: %s", error)
        finally:
            writer.close()

    async def _watch_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(_TICK_S)
            self._lag_s = max(self._lag_s, loop.time() - before - _TICK_S)

    async def _way(self, name: str, connect: str, zmq: bool) -> str:
        """The address that stands for `connect` when process `name` connects to it."""
        known = self._links.get((name, connect))
        if known is None:
            link = Link(name, connect, zmq, lambda: self._owners.get(connect, STRANGER), self._faults)
            known = self._links[name, connect] = link, await link.open()
        return known[1]


if __name__ == "__main__":
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
    uvloop.run(NetworkServer(sys.argv[1], int(sys.argv[2])).serve())
