"""Stream: control frames and page bytes over one connected socket, in the clear; EncryptedStream: in AES-GCM.

Both ends of a write know page ids and page size, so page bytes need no head. In the clear they go from pool
to pool without a copy: the sender gives its pages to the kernel in place (sendmsg), and the receiver's kernel
stores them in place (recvmsg_into). Encrypted, every page is cut into frames of at most `MAX_PLAIN_BYTES`,
each of which is encrypted from the pool into a small buffer, or decrypted from one into the pool.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

from common.errors import TransferError
from kvcache.page_runs import stretches
from kvtransfer.encryption import MAX_PLAIN_BYTES, TAG_BYTES, FrameCipher
from kvtransfer.frames import (
    LENGTH,
    MAX_FRAME,
    Frame,
    decode_frame,
    encode_frame,
    receive_bytes,
    receive_frame,
    receive_length,
    send_bytes,
    send_frame,
)
from kvtransfer.region import HostPages

_VECTORS = 512  # buffers per call; the kernel takes 1024
_CALL_BYTES = 4 << 20  # a call ends after about this much, so that closing a room is noticed
_BUFFER_BYTES = 2 * (MAX_PLAIN_BYTES + TAG_BYTES)  # encrypted frames per call; it stays in the CPU's cache


class Stream:
    """A connected socket, for one thread at a time. Does not own it."""

    def __init__(self, sock: socket.socket) -> None:
        """`sock` is bounded in time (`frames.bound`)."""
        self.sock = sock

    def send(self, frame: Frame, fds: list[int] | None = None) -> None:
        """Send a control frame, and descriptors with it (Unix sockets only). Raises Gone or
        TransferError."""
        send_frame(self.sock, frame, fds)

    def receive(self, fds: list[int] | None = None) -> Frame:
        """Receive a control frame; descriptors that come with it are appended to `fds`. Raises Silent, Gone,
        or TransferError for a frame that is cut off or does not decode."""
        return receive_frame(self.sock, fds=fds)

    def send_pages(self, host: HostPages, page_bytes: int, deadline: float) -> None:
        """Send the pages' bytes. Raises TransferError after the deadline (monotonic), or the socket's own
        time limit."""
        for buffers in _calls(host, page_bytes):
            _send_all(self.sock, buffers, deadline)

    def receive_pages(self, host: HostPages, page_bytes: int, check: Callable[[], None]) -> None:
        """Fill the pages. `check` is called before each of the calls that do; it raises to end it. Raises
        TransferError when the peer stops sending."""
        for buffers in _calls(host, page_bytes):
            check()
            _receive_all(self.sock, buffers)


class EncryptedStream(Stream):
    """A Stream whose frames the peer encrypted, in this order, or TransferError is raised and it ends."""

    def __init__(self, sock: socket.socket, sending: FrameCipher, receiving: FrameCipher) -> None:
        """Both ciphers are new."""
        super().__init__(sock)
        self._sending = sending
        self._receiving = receiving
        self._buffer: memoryview | None = None

    def send(self, frame: Frame, fds: list[int] | None = None) -> None:
        assert not fds, "descriptors cannot be encrypted"
        plain = encode_frame(frame)
        size = len(plain) + TAG_BYTES
        data = bytearray(LENGTH.pack(size)) + bytearray(size)
        head = bytes(data[: LENGTH.size])
        self._sending.encrypt(plain, memoryview(data)[LENGTH.size :], head)
        send_bytes(self.sock, data)

    def receive(self, fds: list[int] | None = None) -> Frame:
        assert fds is None, "descriptors cannot be encrypted"
        length = receive_length(self.sock, MAX_FRAME)
        if length < TAG_BYTES:
            raise TransferError("the peer sent a frame without a tag")
        plain = bytearray(length - TAG_BYTES)
        data = memoryview(receive_bytes(self.sock, length))
        self._receiving.decrypt(data, memoryview(plain), LENGTH.pack(length))
        return decode_frame(plain)

    def send_pages(self, host: HostPages, page_bytes: int, deadline: float) -> None:
        for pieces in _encrypted_calls(host, page_bytes):
            frames = self._frames(pieces)
            for piece, frame in zip(pieces, frames, strict=True):
                self._sending.encrypt(piece, frame)
            _send_all(self.sock, [self._whole(frames)], deadline)

    def receive_pages(self, host: HostPages, page_bytes: int, check: Callable[[], None]) -> None:
        for pieces in _encrypted_calls(host, page_bytes):
            check()
            frames = self._frames(pieces)
            _receive_all(self.sock, [self._whole(frames)])
            check()
            for piece, frame in zip(pieces, frames, strict=True):
                self._receiving.decrypt(frame, piece)

    def _frames(self, pieces: list[memoryview]) -> list[memoryview]:
        """Where the encrypted frames of these pieces lie in this stream's buffer, one after the other."""
        if self._buffer is None:
            self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        frames, at = [], 0
        for piece in pieces:
            end = at + len(piece) + TAG_BYTES
            frames.append(self._buffer[at:end])
            at = end
        return frames

    def _whole(self, frames: list[memoryview]) -> memoryview:
        assert self._buffer is not None
        return self._buffer[: sum(map(len, frames))]


def _calls(host: HostPages, page_bytes: int) -> Iterator[list[memoryview]]:
    """The pages as buffers, neighbours joined, grouped into calls of at most `_CALL_BYTES` (or one page)."""
    memory = host.view()
    limit = max(1, _CALL_BYTES // page_bytes)  # pages
    buffers: list[memoryview] = []
    pages = 0
    for begin, end in stretches(host.pages):
        while begin < end:
            count = min(end - begin, limit - pages)
            buffers.append(memory[begin * page_bytes : (begin + count) * page_bytes])
            begin, pages = begin + count, pages + count
            if pages == limit or len(buffers) == _VECTORS:
                yield buffers
                buffers, pages = [], 0
    if buffers:
        yield buffers


def _encrypted_calls(host: HostPages, page_bytes: int) -> Iterator[list[memoryview]]:
    """The pages as pieces of at most MAX_PLAIN_BYTES, grouped into calls whose frames fit in the buffer.

    A piece never spans two pages: on the other side, they may have other neighbours.
    """
    memory = host.view()
    pieces: list[memoryview] = []
    room = _BUFFER_BYTES
    for page in host.pages.tolist():
        begin = page * page_bytes
        for at in range(begin, begin + page_bytes, MAX_PLAIN_BYTES):
            piece = memory[at : min(at + MAX_PLAIN_BYTES, begin + page_bytes)]
            if room < len(piece) + TAG_BYTES:
                yield pieces
                pieces, room = [], _BUFFER_BYTES
            pieces.append(piece)
            room -= len(piece) + TAG_BYTES
    if pieces:
        yield pieces


def _receive_all(sock: socket.socket, buffers: list[memoryview]) -> None:
    """Fill every buffer in one call. Raises TransferError when the peer stops sending."""
    wanted = sum(map(len, buffers))
    try:
        got = sock.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0]
    except OSError as error:
        raise TransferError(f"the connection broke during a write: {error}") from None
    if got < wanted:
        raise TransferError("the peer stopped sending during a write")


def _send_all(sock: socket.socket, buffers: list[memoryview], deadline: float) -> None:
    """Send every buffer. Raises TransferError after the deadline, or the socket's own time limit."""
    while buffers:
        if time.monotonic() > deadline:
            raise TransferError("the write took too long")
        try:
            sent = sock.sendmsg(buffers)
        except OSError as error:
            raise TransferError(f"the connection broke during a write: {error}") from None
        while buffers and sent >= len(buffers[0]):
            sent -= len(buffers[0])
            buffers = buffers[1:]
        if sent:
            buffers = [buffers[0][sent:], *buffers[1:]]
