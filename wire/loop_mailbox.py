"""LoopMailbox: a mailbox whose sockets belong to an asyncio event loop, for the router.

A mailbox with a thread (wire/mailbox.py) would pass its mail to the loop and wake it; the two threads would
compete for the interpreter's lock, which cost the router a fifth of its time. Here the loop watches ZeroMQ's
own descriptor and reads the socket itself.

ZeroMQ's descriptor signals a change only once: the reader must read until nothing is left, or be
called again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import zmq

from common.errors import ConfigError
from common.ports import ANY_PORT, Ports
from wire.addresses import draw_key
from wire.holds import Hold
from wire.messages.any_message import AnyMessage
from wire.peer_monitors import PEER_CHECK_S, PeerState
from wire.security import Curve
from wire.sockets import Inbound, Mail, PeerSockets, open_context
from wire.zap import ZapHandler, end_context

_AT_ONCE = 256  # messages read before the loop's other callbacks run: a few milliseconds


class LoopMailbox:
    """An address for typed messages. Everything here is called on the loop that made it."""

    def __init__(
        self,
        interface: str,
        curve: Curve | None,
        on_mail: Callable[[list[Mail]], None],
        on_peer: Callable[[str, PeerState], None],
        ports: Ports = ANY_PORT,
    ) -> None:
        """Bind one of `ports` on `interface`. On the loop, `on_mail` is called with mail, in order of
        arrival, and `on_peer` with the address of a peer that has come up or gone down. Raises ConfigError
        when no port can be had."""
        self._loop = asyncio.get_running_loop()
        self._on_mail = on_mail
        self._context = open_context()
        self._zap = None if curve is None else ZapHandler(self._context)
        try:
            self._inbound = Inbound(self._context, interface, curve, ports, draw_key())
        except ConfigError:
            end_context(self._context, self._zap)
            raise
        self.address = self._inbound.address
        self._peers = PeerSockets(self._context, self.address, curve, on_peer)
        self._descriptor = int(self._inbound.socket.getsockopt(zmq.FD))
        self._closed = False
        self._flush_due = False
        self._loop.add_reader(self._descriptor, self._read)
        self._loop.call_soon(self._read)  # for mail that came before the loop watched the descriptor
        self._loop.add_reader(self._peers.descriptor, self._check_peers)
        self._check = self._loop.call_later(PEER_CHECK_S, self._check_soon)

    @property
    def dropped(self) -> int:
        """Messages that could not be queued for their peer."""
        return self._peers.dropped

    @property
    def rejected_messages(self) -> int:
        """Messages that did not decode."""
        return self._inbound.rejected_messages

    def send(self, to: str, message: AnyMessage) -> None:
        """Queue a message for the mailbox at `to`. Never blocks; delivery is not promised.

        It leaves when the loop has run the callbacks that are due now, in one frame with everything else that
        they send to `to`.
        """
        self._peers.send(to, message)
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def forget(self, peer: str) -> None:
        """Drop the connection to a peer that is gone, and what is queued for it."""
        self._peers.forget(peer)

    def watch(self, peers: frozenset[str]) -> None:
        """Stay connected to these peers, so that their states are reported though nothing is sent.

        Any others are closed when they are idle, those of the last call too. The state of a peer that was not
        watched before is reported again if it is known.
        """
        self._peers.watch(peers)

    def connections(self, holder: str, now: float) -> list[Hold]:
        """The connections of `holder`, this process, to peers that are not watched."""
        return self._peers.connections(holder, now)

    def close(self) -> None:
        """Stop listening and free the port. What is queued gets half a second to leave."""
        if not self._closed:
            self._peers.flush()
            self._closed = True
            self._check.cancel()
            self._loop.remove_reader(self._descriptor)
            self._loop.remove_reader(self._peers.descriptor)
            self._peers.close()
            end_context(self._context, self._zap)

    def _flush(self) -> None:
        self._flush_due = False
        if not self._closed:
            self._peers.flush()

    def _check_soon(self) -> None:
        self._check = self._loop.call_later(PEER_CHECK_S, self._check_soon)
        self._check_peers()

    def _check_peers(self) -> None:
        if not self._closed:
            now = time.monotonic()
            self._peers.check(now)
            self._inbound.check(now)

    def _read(self) -> None:
        if self._closed:
            return
        mail, empty = self._inbound.receive(_AT_ONCE)
        if not empty:
            self._loop.call_soon(self._read)
        if mail:
            self._on_mail(mail)
