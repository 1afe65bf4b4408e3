"""Network: stands between the processes of a Baton, and does to their messages what `faults` says.

A process that was started by tests/chaos/launcher.py tells the network which ports it has bound, and asks it
for the way to every address that it connects to: requests and KV control, KV events, and the connections of
the tcp transport and those on which Mooncake's writes are granted. Faults are thus below ZeroMQ and its
heartbeats, and no process knows of them. Not behind the network: Mooncake's own data connections, and shared
memory.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import threading
from typing import Any

from tests.chaos.faults import STRANGER, Faults
from tests.chaos.links import Link

log = logging.getLogger(__name__)

_BOUND_S = 10.0


class Network:
    """A thread with the links between processes. `address` is what the launcher is told."""

    def __init__(self, seed: int = 0) -> None:
        self.faults = Faults(seed)
        name = f"baton-chaos-{secrets.token_hex(8)}"
        self.address = f"@{name}"
        self._owners: dict[str, str] = {}  # "host:port" -> the process that has bound it
        self._links: dict[tuple[str, str], tuple[Link, str]] = {}  # (source, target) -> it and its address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{name}")
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._over: asyncio.Event = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="network", daemon=True)
        self._thread.start()
        assert self._ready.wait(_BOUND_S)

    def links_to(self, owner: str) -> list[str]:
        """The names of the processes that have connected to `owner`, once for each of its addresses."""
        return [source for (source, target) in list(self._links) if self._owners.get(target) == owner]

    def close(self) -> None:
        """Break every connection and end the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join(_BOUND_S)

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_unix_server(self._answer, sock=self._socket)
        self._ready.set()
        await self._over.wait()
        server.close()
        await asyncio.gather(*(link.close() for link, _ in self._links.values()))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One question of a process: a line of JSON, answered with another."""
        try:
            question: dict[str, Any] = json.loads(await reader.readline())
            if "bound" in question:
                self._owners[question["bound"]] = question["name"]
                answer = {}
            else:
                answer = {"address": await self._way(**question)}
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        except (OSError, ValueError) as error:  # the process has ended in between
            log.info("a question to the network was cut short: %s", error)
        finally:
            writer.close()

    async def _way(self, name: str, connect: str, zmq: bool) -> str:
        """The address that stands for `connect` when process `name` connects to it."""
        known = self._links.get((name, connect))
        if known is None:
            link = Link(name, connect, zmq, lambda: self._owners.get(connect, STRANGER), self.faults)
            known = self._links[name, connect] = link, await link.open()
        return known[1]
