"""LoopMailbox: a mailbox whose sockets belong to an asyncio event loop. For the router, whose work is there.

A mailbox with a thread (wire/mailbox.py) hands its mail over to the loop and wakes it; the two take turns at
the interpreter's lock, and that cost the router a fifth of its time. Here the loop watches ZeroMQ's own
descriptor and reads when it says so; nothing changes hands.

ZeroMQ's descriptor tells of a change, once: whoever is woken must read until nothing is left, or come back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

from wire.messages import AnyMessage
from wire.security import Curve
from wire.sockets import Inbound, Mail, PeerSockets

_AT_ONCE = 256  # messages read before the loop's other callbacks have a turn: a few milliseconds


class LoopMailbox:
    """An address for typed messages. Everything here is called on the loop that made it."""

    def __init__(
        self,
        interface: str,
        curve: Curve | None,
        on_mail: Callable[[list[Mail]], None],
    ) -> None:
        """Bind a fresh port on `interface`. `on_mail` gets what has arrived, in order, on the loop."""
        self._loop = asyncio.get_running_loop()
        self._on_mail = on_mail
        self._context = zmq.Context()
        self._inbound = Inbound(self._context, interface, curve)
        self.address = self._inbound.address
        self._peers = PeerSockets(self._context, self.address, curve)
        self._descriptor = int(self._inbound.socket.getsockopt(zmq.FD))
        self._closed = False
        self._flush_due = False
        self._loop.add_reader(self._descriptor, self._read)
        self._loop.call_soon(self._read)  # what came before the loop watched is told by no change

    @property
    def dropped(self) -> int:
        """Messages that could not be queued for their peer."""
        return self._peers.dropped

    @property
    def rejected_messages(self) -> int:
        """Messages that were not ours."""
        return self._inbound.rejected_messages

    def send(self, to: str, message: AnyMessage) -> None:
        """Queue a message for the mailbox at `to`. Never blocks; delivery is not promised.

        It goes when the loop has run what is due now, with all else that was said to `to` meanwhile.
        """
        self._peers.send(to, message)
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def forget(self, peer: str) -> None:
        """Drop the connection to a peer that is gone, with whatever is queued for it."""
        self._peers.forget(peer)

    def close(self) -> None:
        """Stop listening and free the port. What is queued gets half a second to leave."""
        if not self._closed:
            self._peers.flush()
            self._closed = True
            self._loop.remove_reader(self._descriptor)
            self._context.destroy(linger=500)

    def _flush(self) -> None:
        self._flush_due = False
        if not self._closed:
            self._peers.flush()

    def _read(self) -> None:
        if self._closed:
            return
        mail, empty = self._inbound.receive(_AT_ONCE)
        if not empty:
            self._loop.call_soon(self._read)
        if mail:
            self._on_mail(mail)
