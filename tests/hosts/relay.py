"""A relay for all TCP connections that pass a switch: `python -m tests.hosts.relay PORT SECONDS`.

iptables redirects each connection to it. It asks the kernel where the connection was going, connects there,
and hands on what comes, in both directions and in order, SECONDS later. Prints a line when it listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys

_SO_ORIGINAL_DST = 80
_AT_ONCE = 1 << 18


async def _hand_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Until one side ends or breaks. A reader and a writer task, so that delays do not add up."""
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=64)

    async def read() -> None:
        piece = b"-"
        while piece:
            with contextlib.suppress(OSError):
                piece = await reader.read(_AT_ONCE)
            await pieces.put((loop.time() + delay_s, piece))

    reading = asyncio.create_task(read())
    try:
        while True:
            due, piece = await pieces.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not piece:
                return
            writer.write(piece)
            await writer.drain()
    finally:
        reading.cancel()


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """One connection. When either direction ends, both do: no protocol of ours half-closes."""
    sock: socket.socket = writer.get_extra_info("socket")
    port, address = struct.unpack("!2xH4s8x", sock.getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, 16))
    with contextlib.suppress(OSError):
        onward_reader, onward = await asyncio.open_connection(socket.inet_ntoa(address), port)
        both = {
            asyncio.create_task(_hand_on(reader, onward, delay_s)),
            asyncio.create_task(_hand_on(onward_reader, writer, delay_s)),
        }
        _, other = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        for task in other:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)
        onward.close()
    writer.close()


async def _main(port: int, delay_s: float) -> None:
    server = await asyncio.start_server(lambda r, w: _serve(r, w, delay_s), "0.0.0.0", port)
    sys.stdout.write("listening\n")
    sys.stdout.flush()
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), float(sys.argv[2])))
