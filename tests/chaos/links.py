"""Link: the way from one process to an address of another, through which the network passes what it lets
through."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from tests.chaos.faults import Faults
from tests.chaos.zmtp import GREETING_BYTES, messages_in, read_unit

_POLL_S = 0.02
_PIECE = 64 << 10
_ENDED = (asyncio.IncompleteReadError, ConnectionError, OSError)


class Link:
    """A listening port that stands for `target` ("host:port"), for the connections of one process.

    `source` names that process, and `owner()` the one that listens at the target. ZeroMQ's connections are
    taken apart into messages; others are passed on as streams. A cut link keeps its connections and passes
    nothing on, so that heartbeats go unanswered, as when cables are pulled.
    """

    def __init__(
        self, source: str, target: str, is_zmq: bool, owner: Callable[[], str], faults: Faults
    ) -> None:
        self.source = source
        self.target = target
        self.owner = owner
        self._is_zmq = is_zmq
        self._faults = faults
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def open(self) -> str:
        """Listen. Returns the address that stands for the target."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    async def close(self) -> None:
        """Stop listening and break every connection."""
        if self._server is not None:
            self._server.close()
        connections = list(self._connections)
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        with contextlib.suppress(asyncio.CancelledError):
            await self._connect(reader, writer)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._until_whole()
            host, _, port = self.target.rpartition(":")
            try:
                far_reader, far_writer = await asyncio.open_connection(host, int(port))
            except OSError:
                return  # nobody listens there any more
            try:
                await self._pass(reader, writer, far_reader, far_writer)
            finally:
                far_writer.transport.abort()
        finally:
            writer.transport.abort()

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        far_reader: asyncio.StreamReader,
        far_writer: asyncio.StreamWriter,
    ) -> None:
        pump = self._pump_messages if self._is_zmq else self._pump_bytes
        pumps = [
            asyncio.ensure_future(pump(reader, far_writer, True)),
            asyncio.ensure_future(pump(far_reader, writer, False)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in pumps:
                one.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _until_whole(self) -> None:
        while self._faults.is_cut(self.source, self.owner()):
            await asyncio.sleep(_POLL_S)

    def _ends(self, outward: bool) -> tuple[str, str]:
        """(sender, receiver)."""
        return (self.source, self.owner()) if outward else (self.owner(), self.source)

    async def _pump_messages(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, outward: bool
    ) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(*_ENDED):
            left = GREETING_BYTES  # its parts are answered one by one: they pass as they come
            while left and (piece := await reader.read(left)):
                await self._until_whole()
                writer.write(piece)
                left -= len(piece)
            while True:
                unit = await read_unit(reader)
                sender, receiver = self._ends(outward)
                if unit.is_command:
                    await self._until_whole()
                    writer.write(unit.data)
                else:
                    count = messages_in(unit.payload)
                    if self._faults.is_cut(sender, receiver):
                        self._faults.count(sender, count)
                        await self._until_whole()
                    for delay_s in self._faults.delays(sender, receiver, count):
                        if delay_s:
                            loop.call_later(delay_s, self._deliver, writer, unit.data, sender, count)
                        else:
                            writer.write(unit.data)
                await writer.drain()

    def _deliver(self, writer: asyncio.StreamWriter, data: bytes, sender: str, messages: int) -> None:
        """A frame that was delayed: lost if the link is cut by now."""
        if self._faults.is_cut(self.source, self.owner()):
            self._faults.count(sender, messages)
        elif not writer.transport.is_closing():
            writer.write(data)

    async def _pump_bytes(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, outward: bool
    ) -> None:
        with contextlib.suppress(*_ENDED):
            while piece := await reader.read(_PIECE):
                sender, receiver = self._ends(outward)
                if self._faults.is_cut(sender, receiver):
                    self._faults.count(sender, 1)
                    await self._until_whole()
                await asyncio.sleep(self._faults.stream_delay(sender, receiver))
                writer.write(piece)
                await writer.drain()
