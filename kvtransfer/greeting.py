"""The greeting of a connection: the receiver's Challenge, the sender's Hello, and the Stream that follows.

`Greeting` is the receiver's side. It never blocks, so one thread greets every stranger, and a stranger costs
a descriptor and a few bytes. `introduce` is the sender's side.
"""

from __future__ import annotations

import secrets
import socket

from common.errors import TransferError
from kvtransfer.encryption import CIPHER, derive_ciphers
from kvtransfer.frames import (
    LENGTH,
    Challenge,
    Hello,
    check_hello,
    decode_frame,
    proof_of,
    receive_frame,
    send_frame,
)
from kvtransfer.streams import EncryptedStream, Stream
from wire.messages.transfer import TransferEndpoint

_NONCE_BYTES = 16
_MAX_HELLO = 256


class Greeting:
    """A peer that has not proven yet that it knows the token."""

    def __init__(self, sock: socket.socket, endpoint: TransferEndpoint, deadline: float) -> None:
        """Send the Challenge. The Hello must be there at `deadline` (monotonic). Raises TransferError."""
        self.sock = sock
        self.deadline = deadline
        self._endpoint = endpoint
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._data = bytearray()
        self._wanted = LENGTH.size
        sock.setblocking(False)
        send_frame(sock, Challenge(self._nonce))

    def read(self) -> Stream | None:
        """Take what has come of the Hello. The Stream when it is whole and proves the token; None when it is
        not whole. Raises TransferError for anything else."""
        try:
            data = self.sock.recv(self._wanted - len(self._data))
        except BlockingIOError:
            return None
        except OSError as error:
            raise TransferError(f"the peer left: {error}") from None
        if not data:
            raise TransferError("the peer left")
        self._data += data
        if len(self._data) < self._wanted:
            return None
        if self._wanted == LENGTH.size:
            (length,) = LENGTH.unpack(self._data)
            if not 0 < length <= _MAX_HELLO:
                raise TransferError(f"the peer announces a Hello of {length} bytes")
            self._wanted += length
            return None
        hello = check_hello(decode_frame(self._data[LENGTH.size :]), _token(self._endpoint), self._nonce)
        if not _is_encrypted(self._endpoint):
            return Stream(self.sock)
        ciphers = derive_ciphers(_token(self._endpoint), self._nonce, hello.nonce)
        return EncryptedStream(self.sock, ciphers.to_sender, ciphers.to_receiver)


def introduce(sock: socket.socket, endpoint: TransferEndpoint) -> Stream:
    """Prove to the receiver at this endpoint that its token is known here. Raises TransferError."""
    challenge = receive_frame(sock)
    if not isinstance(challenge, Challenge):
        raise TransferError("the peer did not greet")
    token, nonce = _token(endpoint), secrets.token_bytes(_NONCE_BYTES)
    send_frame(sock, Hello(proof_of(token, challenge.nonce, nonce), nonce))
    if not _is_encrypted(endpoint):
        return Stream(sock)
    ciphers = derive_ciphers(token, challenge.nonce, nonce)
    return EncryptedStream(sock, ciphers.to_receiver, ciphers.to_sender)


def _token(endpoint: TransferEndpoint) -> str:
    return endpoint.params.get("token", "")


def _is_encrypted(endpoint: TransferEndpoint) -> bool:
    """Whether the endpoint's connections are. Raises TransferError for a cipher that is not known here."""
    cipher = endpoint.params.get("cipher", "")
    if cipher not in ("", CIPHER):
        raise TransferError(f"the peer wants the cipher {cipher!r}, which is not known here")
    return bool(cipher)
