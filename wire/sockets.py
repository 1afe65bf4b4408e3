"""The sockets of both kinds of mailbox: one bound to receive, and one connected per peer to send.

A frame is a byte with the length of the sender's mailbox address, that address, a mark, then messages, each
after its length in four bytes, little-endian: all that the sender had for this peer at one moment. The mark
is the proof that the sender is a member in a cluster with a secret (wire/security.py); else it says for which
process the frame is (wire/senders.py). (One ZeroMQ message per message, or one ZeroMQ frame per part, cost
reader and writer several times as much.) A receiver answers by sending to that address. Nothing depends on
ZeroMQ's routing ids, which change with every reconnect; the sockets are PULL and PUSH, which have none.
Objects of both classes are used by one thread at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import zmq

from common.errors import WireError
from common.ports import ANY_PORT, Ports
from common.quiet_log import QuietLog
from wire.addresses import Address, keyed, parse_address
from wire.binding import bind_socket
from wire.codec import decode, encode
from wire.holds import Hold
from wire.messages.any_message import AnyMessage
from wire.peer_monitors import PeerMonitors, PeerState, send_heartbeats
from wire.security import Curve
from wire.senders import Senders, mark_of

log = logging.getLogger(__name__)

_NOW = int(zmq.NOBLOCK)  # a plain int: pyzmq's flags are enums, which cost more than the work itself
_QUEUED_PER_PEER = 100_000  # frames
_LONGEST_FRAME = 1 << 20  # bytes; a longer message has a frame of its own
_LENGTH = 4
_LARGEST_MESSAGE = 256 << 20  # bytes of a ZeroMQ message; a prompt and its log-probabilities are far smaller
_MOST_SOCKETS = 30_000
_MOST_PEERS = 8_000
_HANDSHAKE_MS = 5000
_REBIND_S = 1.0
_MOST_BAD = 16  # messages of a frame; what follows them is not read
_USER_ID = "User-Id"
_IDLE_PEER_S = 300.0
_IDLE_CHECK_S = 10.0
_DOWN_PEER_S = 10.0  # longer than a partition that rooms survive; a process that is gone never comes back


def open_context() -> zmq.Context[zmq.Socket[bytes]]:
    """A context for thousands of peers: each has three sockets, and ZeroMQ's default is a thousand."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, _MOST_SOCKETS)
    return context


class Mail(NamedTuple):
    """A message and the mailbox address of whoever sent it."""

    sender: str
    message: AnyMessage


class Inbound:
    """The bound socket. `address` is where peers reach it."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        interface: str,
        curve: Curve | None,
        ports: Ports = ANY_PORT,
        key: str = "",
    ) -> None:
        """Binds one of `ports` on `interface`. `key` is of the address in a cluster without a secret; "": a
        directory at a fixed port has none. Raises ConfigError when no port can be had."""
        self.socket = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, _LARGEST_MESSAGE)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        if curve is not None:
            curve.serve(self.socket)
        self._endpoint = bind_socket(self.socket, interface, ports)
        self.address = keyed(self._endpoint, key) if curve is None else curve.address(self._endpoint)
        self._curve = curve
        self._bound_as = "" if curve is None else curve.public
        self._rebind_at = 0.0
        self._senders = Senders(curve, key)
        self._quiet = QuietLog(log)
        self.rejected_messages = 0

    def receive(self, most: int) -> tuple[list[Mail], bool]:
        """About `most` messages of what has arrived, without waiting, and whether nothing is left.

        A frame of a stranger, and a message that does not decode, is counted, logged and left out.
        """
        mail: list[Mail] = []
        for _ in range(most):  # frames; also if each is rejected, this ends
            try:
                frame, key = self._next()
            except zmq.Again:
                return mail, True
            try:
                self._open(frame, key, mail)
            except WireError as error:
                self._reject(error)
            if len(mail) >= most:
                break
        return mail, False

    def check(self, now: float) -> None:
        """Bind again if the key of this address is another one since the cluster's secret was changed."""
        curve = self._curve
        if curve is None or curve.public == self._bound_as or now < self._rebind_at:
            return
        self._rebind_at = now + _REBIND_S
        try:
            if self._bound_as:
                self.socket.unbind(self._endpoint)  # the connections stay
                self._bound_as = ""
            curve.serve(self.socket)
            self.socket.bind(self._endpoint)
        except zmq.ZMQError as error:  # ZeroMQ frees the port a little later
            log.info("%s is not bound yet with its new key: %s", self.address, error)
            return
        self._bound_as = curve.public

    def _next(self) -> tuple[bytes, str]:
        """The next frame, and its connection's key. Raises zmq.Again."""
        if self._curve is None:
            return self.socket.recv(_NOW), ""
        frame = self.socket.recv(_NOW, copy=False)
        return frame.bytes, str(frame.get(_USER_ID))

    def _open(self, frame: bytes, key: str, mail: list[Mail]) -> None:
        """Add a frame's messages. Raises WireError when it has no proper head, or few proper messages."""
        sender, begin = self._senders.find(frame, key)
        if begin >= len(frame):
            raise WireError(f"a frame of {len(frame)} bytes holds no message")
        bad = 0
        while begin < len(frame):
            payload = begin + _LENGTH
            begin = payload + int.from_bytes(frame[begin:payload], "little")
            try:
                mail.append(Mail(sender, decode(frame[payload:begin])))
            except WireError as error:
                bad += 1
                if bad == _MOST_BAD:
                    raise
                self._reject(error)

    def _reject(self, why: WireError) -> None:
        self.rejected_messages += 1
        self._quiet.warning("mailbox %s: rejected a message: %s", self.address, why)


@dataclass(slots=True)
class _Peer:
    address: Address
    socket: zmq.Socket[bytes]
    used_at: float
    mark: bytes  # b"" in a cluster with a secret: the head ends with a proof
    frame: bytearray  # what goes out with the next flush
    messages: int = 0  # in it


class PeerSockets:
    """Connections to the mailboxes that were sent something or are watched. Others are closed when idle.

    `on_peer` is called from `check` with the address of a peer that has come up or gone down. Sending to a
    peer that is down is no error: ZeroMQ keeps what is queued until the peer is up again or forgotten. One
    that is down, is not watched and is sent nothing for ten seconds is forgotten; one that is up, after five
    minutes.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        reply_address: str,
        curve: Curve | None,
        on_peer: Callable[[str, PeerState], None],
    ) -> None:
        self._context = context
        self._reply_address = reply_address
        self._head = _make_head(reply_address, curve)
        self._curve = curve
        self._version = 0  # of the curve
        self._attempts: dict[str, int] = {}  # by address, for addresses without a key
        self._quiet = QuietLog(log)
        self._peers: dict[str, _Peer] = {}
        self.watched: frozenset[str] = frozenset()
        self._on_peer = on_peer
        self._down: set[str] = set()
        self._idle_check_at = 0.0
        self._monitors = PeerMonitors(context, self._on_state)
        self.descriptor = self._monitors.descriptor  # readable when a peer may have changed
        self._unsent: list[_Peer] = []
        self.dropped = 0  # messages

    def send(self, to: str, message: AnyMessage) -> None:
        """Add the message to what the next `flush` sends to `to`. One to no valid address is dropped."""
        peer = self._peers.get(to) or self._connect(to)
        if peer is None:
            self.dropped += 1
            return
        payload = encode(message)
        if peer.messages and len(peer.frame) + len(payload) > _LONGEST_FRAME:
            self._send(peer)
        if not peer.messages:
            peer.used_at = time.monotonic()  # not idle: it has a frame to send
            self._unsent.append(peer)
            peer.frame += self._head
            peer.frame += peer.mark
        peer.frame += len(payload).to_bytes(_LENGTH, "little")
        peer.frame += payload
        peer.messages += 1

    def flush(self) -> None:
        """Hand all frames to ZeroMQ. Never blocks: what cannot be queued is counted in `dropped`."""
        unsent, self._unsent = self._unsent, []
        for peer in unsent:
            self._send(peer)

    def watch(self, addresses: frozenset[str]) -> None:
        """Stay connected to these peers, so that their states are reported though nothing is sent.

        Any others are closed when they are idle, those of the last call too. The state of a peer that was not
        watched before is reported again if it is known.
        """
        new, self.watched = addresses - self.watched, addresses
        for address in new:
            if address in self._peers:
                self._monitors.repeat(address)
            else:
                self._connect(address)

    def check(self, now: float) -> None:
        """Report peers that have come up or gone down, and forget those that are down or idle for long."""
        if self._curve is not None:
            self._curve.refresh(now)
            if self._curve.version != self._version:
                self._follow(self._curve)
        self._monitors.check(now)
        if self._down:
            self._forget_unused(self._down, now - _DOWN_PEER_S)
        if now >= self._idle_check_at:
            self._idle_check_at = now + _IDLE_CHECK_S
            self._forget_unused(self._peers, now - _IDLE_PEER_S)

    def connections(self, holder: str, now: float) -> list[Hold]:
        """The connections of `holder` to peers that are not watched. Their age is since something was sent.

        May be called from any thread.
        """
        rows = []
        for address, peer in list(self._peers.items()):  # in one step, as far as other threads can see
            if address not in self.watched:
                idle_s = now - peer.used_at
                bound_s = _DOWN_PEER_S if address in self._down else _IDLE_PEER_S
                rows.append(Hold(holder, "connection", address, None, None, idle_s, bound_s - idle_s))
        return rows

    def forget(self, address: str) -> None:
        """Drop the connection to a peer that is gone, and what is queued for it."""
        peer = self._peers.pop(address, None)
        self._down.discard(address)
        if peer is not None:
            peer.messages = 0
            self._monitors.remove(address)
            peer.socket.close(linger=0)

    def close(self) -> None:
        """Stop monitoring. The sockets are closed with their context, when what is queued has left."""
        self._monitors.close()

    def _send(self, peer: _Peer) -> None:
        if not peer.messages:
            return  # sent when its frame was full, or forgotten
        try:
            peer.socket.send(bytes(peer.frame), _NOW)
        except zmq.Again:
            self.dropped += peer.messages
        peer.frame.clear()
        peer.messages = 0

    def _follow(self, curve: Curve) -> None:
        """The accepted secrets have changed."""
        self._version = curve.version
        self._head = _make_head(self._reply_address, curve)
        if curve.fixed_address:  # connections show the key with which they were made
            self._reconnect(list(self._peers))

    def _connect(self, address: str) -> _Peer | None:
        """A new connection. None when there cannot be one: addresses come from other processes."""
        if len(self._peers) >= _MOST_PEERS:
            self._quiet.warning("no connection to a peer at %s: there are %d", address, _MOST_PEERS)
            return None
        try:
            parsed = parse_address(address)
            socket = self._context.socket(zmq.PUSH)
        except (WireError, zmq.ZMQError) as error:
            self._quiet.warning("cannot connect to a peer: %s", error)
            return None
        socket.setsockopt(zmq.SNDHWM, _QUEUED_PER_PEER)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if self._curve is not None:
            self._curve.connect(socket, parsed, self._attempts.get(address, 0))
        send_heartbeats(socket)
        try:
            self._monitors.add(address, socket)
            try:
                socket.connect(parsed.endpoint)
            except zmq.ZMQError:
                self._monitors.remove(address)
                raise
        except zmq.ZMQError as error:  # the address is none, or no descriptors are left
            self._quiet.warning("cannot connect to a peer at %r: %s", address, error)
            socket.close(linger=0)
            return None
        now = time.monotonic()
        mark = mark_of(parsed.key) if self._curve is None else b""
        peer = self._peers[address] = _Peer(parsed, socket, now, mark, bytearray())
        return peer

    def _on_state(self, address: str, state: PeerState) -> None:
        if state is PeerState.DOWN:
            self._down.add(address)
        else:
            self._down.discard(address)
        self._on_peer(address, state)
        if state is PeerState.DOWN and address in self._peers and self._curve is not None:
            keys = self._curve.attempts(self._peers[address].address)
            if keys > 1:  # it may have another secret in use
                self._attempts[address] = (self._attempts.get(address, 0) + 1) % keys
                self._reconnect([address])

    def _reconnect(self, addresses: list[str]) -> None:
        """Make new connections to those that are watched; to others, with what they are sent next."""
        for address in addresses:
            self.forget(address)
            if address in self.watched:
                self._connect(address)

    def _forget_unused(self, addresses: Iterable[str], since: float) -> None:
        """Forget those of the peers that are not watched and were sent nothing since then."""
        for address in [one for one in addresses if self._peers[one].used_at < since]:
            if address not in self.watched:
                self.forget(address)


def _make_head(address: str, curve: Curve | None) -> bytes:
    text = address.encode()
    return bytes((len(text),)) + text + (b"" if curve is None else curve.proof(address))
