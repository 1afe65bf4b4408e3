"""The control frames between a sender's transport and a receiver's, over a Unix or TCP stream.

The receiver begins with `Challenge`. The sender proves with `Hello` that it has the endpoint's token. Every
later frame of an encrypted connection is encrypted (`streams.EncryptedStream`). The receiver describes its
pools in `Pools`. Writes follow, one after the other: `Begin`, answered by `Granted` or
`Refused`; the bytes, which every backend moves in its own way; `End`, answered by `Ended`. A frame is a
little-endian uint32 length and a typed MessagePack struct.
"""

from __future__ import annotations

import array
import hashlib
import hmac
import socket
import struct

import msgspec

from common.errors import TransferError
from kvcache.page_parts import PageParts

LENGTH = struct.Struct("<I")
MAX_FRAME = 16 << 20  # page ids of the longest write: millions of pages
_MAX_FDS = 128  # with a frame: of a few groups, each with a part for every rank


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    """A nonce that this connection's Hello must answer."""

    nonce: bytes


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Proof of the token: HMAC-SHA256 over the Challenge's nonce and the sender's own."""

    proof: bytes
    nonce: bytes


class PoolInfo(msgspec.Struct, frozen=True, array_like=True):
    """One group's pool at the receiver, in `ranges` x `copies` parts (kvcache/page_parts.py). `ptrs` are
    their addresses in the receiver's process, where senders write to them."""

    page_bytes: int
    num_pages: int
    ptrs: tuple[int, ...] = ()
    ranges: int = 1
    copies: int = 1

    def page_parts(self, senders: PageParts) -> PageParts:
        """With the blocks and the tail that the sender's pages have. Raises TransferError if they cannot lie
        so."""
        parts = senders._replace(ranges=self.ranges, copies=self.copies)
        if not parts.divides(self.page_bytes):
            raise TransferError("the peer's pages lie in parts that are not of this model")
        return parts

    def takes_directly(self, parts: PageParts) -> bool:
        """Whether pages that lie in `parts` can be written to its addresses: parts that are not alike would
        be written in runs that are too short. Raises TransferError like `page_parts`."""
        theirs = self.page_parts(parts)
        if len(self.ptrs) not in (0, theirs.total):
            raise TransferError("the peer does not say where all parts of its pages are")
        return bool(self.ptrs) and theirs == parts


class Pools(msgspec.Struct, frozen=True, tag="pools"):
    """The receiver's pools by group. Backends of one host send their descriptors with it, in this order.
    `session` is the receiver's address in the backend, for a backend that has its own."""

    groups: dict[str, PoolInfo]
    session: str = ""


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Asks to write these pages (int64, little-endian) of this room and epoch: where the backend has the
    choice, `direct` to their addresses, or by way of a staging buffer."""

    room: int
    epoch: int
    group: str
    pages: bytes
    direct: bool = True


class Granted(msgspec.Struct, frozen=True, tag="granted"):
    """The write may begin, and the receiver waits for its End. `stage` is the address of a staging buffer to
    write to instead of the pool (0: none)."""

    stage: int = 0


class Staged(msgspec.Struct, frozen=True, tag="staged"):
    """The next `count` pages of the granted write lie in this half (0 or 1) of the staging buffer. Answered
    by Ended when they are in the pool and the half may be written again."""

    count: int
    half: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The write may not begin. The connection can be used again."""

    reason: str


class End(msgspec.Struct, frozen=True, tag="end"):
    """The write is over. `landed`: all bytes are there. Otherwise `certain`: no more of them will come."""

    landed: bool
    certain: bool = True


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The receiver has counted what the last frame reported."""


Frame = Challenge | Hello | Pools | Begin | Granted | Refused | Staged | End | Ended
_decoder = msgspec.msgpack.Decoder(Frame)
_encoder = msgspec.msgpack.Encoder()


class Silent(TransferError):
    """No frame began within the socket's time limit."""


class Gone(TransferError):
    """The peer closed the connection, or reset it, between two frames, or before it read a whole one."""


def bound(sock: socket.socket, silence_s: float) -> None:
    """Make every blocking call on the socket fail after `silence_s`.

    The timeouts are the kernel's. `settimeout` would make the socket non-blocking: MSG_WAITALL would have no
    effect, and each call would need a poll.
    """
    sock.setblocking(True)
    limit = struct.pack("@ll", int(silence_s), int(silence_s % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def send_frame(sock: socket.socket, frame: Frame, fds: list[int] | None = None) -> None:
    """Send one frame, and descriptors with it (Unix sockets only). Raises Gone or TransferError."""
    body = encode_frame(frame)
    send_bytes(sock, LENGTH.pack(len(body)) + body, fds)


def send_bytes(sock: socket.socket, data: bytes | bytearray, fds: list[int] | None = None) -> None:
    """Send a frame that is encoded, its length included. Raises Gone or TransferError."""
    try:
        if fds:
            sent = socket.send_fds(sock, [data], fds)
            data = data[sent:]
        sock.sendall(data)
    except (BrokenPipeError, ConnectionResetError):
        raise Gone("the peer closed the connection") from None
    except OSError as error:
        raise TransferError(f"cannot send to the peer: {error}") from None


def receive_frame(sock: socket.socket, fds: list[int] | None = None) -> Frame:
    """Receive one frame; descriptors that come with it are appended to `fds`.

    Raises Silent, Gone, or TransferError for a frame that is cut off or does not decode.
    """
    return decode_frame(receive_bytes(sock, receive_length(sock, MAX_FRAME, fds)))


def receive_length(sock: socket.socket, limit: int, fds: list[int] | None = None) -> int:
    """The length of the frame that follows. Raises Silent, Gone, or TransferError for one above `limit`."""
    (length,) = LENGTH.unpack(_receive(sock, LENGTH.size, fds, starts=True))
    if length > limit:
        raise TransferError(f"the peer announces a frame of {length} bytes; at most {limit} are taken")
    return int(length)


def receive_bytes(sock: socket.socket, nbytes: int) -> bytearray:
    """The rest of a frame that has begun. Raises TransferError when it does not come."""
    return _receive(sock, nbytes, None, starts=False)


def encode_frame(frame: Frame) -> bytes:
    """A frame without its length."""
    return _encoder.encode(frame)


def decode_frame(data: bytearray) -> Frame:
    """The inverse of `encode_frame`. Raises TransferError."""
    try:
        frame: Frame = _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:  # RecursionError: a value nested too deeply
        raise TransferError(f"the peer sent a frame that does not decode: {error}") from None
    return frame


def check_hello(frame: Frame, token: str, nonce: bytes) -> Hello:
    """The frame, if it is a Hello that answers this nonce. Raises TransferError when it is not."""
    if isinstance(frame, Hello) and hmac.compare_digest(frame.proof, proof_of(token, nonce, frame.nonce)):
        return frame
    raise TransferError("the peer does not know this endpoint's token")


def proof_of(token: str, receiver_nonce: bytes, sender_nonce: bytes) -> bytes:
    """The proof that a Hello must contain. The receiver's nonce has a fixed length."""
    return hmac.digest(token.encode(), receiver_nonce + sender_nonce, hashlib.sha256)


def _receive(sock: socket.socket, nbytes: int, fds: list[int] | None, starts: bool) -> bytearray:
    data = bytearray(nbytes)
    view = memoryview(data)
    got = 0
    while got < nbytes:
        try:
            if fds is not None:
                space = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)
                count, ancillary, _, _ = sock.recvmsg_into([view[got:]], space, socket.MSG_CMSG_CLOEXEC)
                for _, kind, payload in ancillary:
                    if kind == socket.SCM_RIGHTS:
                        fds.extend(array.array("i", payload[: len(payload) - len(payload) % 4]))
            else:
                count = sock.recv_into(view[got:])
        except BlockingIOError:
            if starts and got == 0:
                raise Silent("the peer is silent") from None
            raise TransferError("the peer stopped in the middle of a frame") from None
        except ConnectionResetError:
            count = 0
        except OSError as error:
            raise TransferError(f"the connection to the peer broke: {error}") from None
        if count == 0:
            if starts and got == 0:
                raise Gone("the peer closed the connection")
            raise TransferError("the peer closed the connection in the middle of a frame")
        got += count
    return data
