"""AES-256-GCM for what goes over a TCP connection: a FrameCipher for each direction.

Both ends derive the two keys by HKDF from the endpoint's token and from a nonce of each side. So every
connection has keys of its own, and a connection that is recorded and sent again does not decrypt. The GCM
nonce of a frame is its number. A frame that was changed, left out, repeated or moved fails, because the
receiver decrypts it under another number.
"""

from __future__ import annotations

from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from common.errors import TransferError

CIPHER = "aes-256-gcm"
"""What an endpoint's parameter `cipher` says when its connections are encrypted."""
TAG_BYTES = 16
MAX_PLAIN_BYTES = 256 << 10  # of a page frame
_KEY_BYTES = 32
_NONCE_BYTES = 12
_FRAMES_PER_KEY = (
    1 << 20
)  # of at most 2**14 blocks: below the bound of RFC 8446, section 5.5 (2**34.5 blocks)


class FrameCipher:
    """Encrypts, or decrypts, the frames of one direction of one connection, in order. One thread."""

    def __init__(self, key: bytes) -> None:
        """`key` is used for this direction of this connection only."""
        self._key = key
        self._aead = AESGCM(key)
        self._number = 0

    def encrypt(self, plain: memoryview | bytes, into: memoryview, head: bytes | None = None) -> None:
        """Write the next frame and its tag to `into`, which is TAG_BYTES longer. `head` is authenticated."""
        nonce = self._next_nonce()  # first: it may change the key
        self._aead.encrypt_into(nonce, plain, head, into)

    def decrypt(self, frame: memoryview, into: memoryview, head: bytes | None = None) -> None:
        """Write the next frame's bytes to `into`, which is TAG_BYTES shorter. Raises TransferError when it is
        not what the peer encrypted as its next frame; then `into` has bytes that must not be used."""
        nonce = self._next_nonce()
        try:
            self._aead.decrypt_into(nonce, frame, head, into)
        except InvalidTag:
            raise TransferError("a frame is not what the peer sent next") from None

    def _next_nonce(self) -> bytes:
        """The number of the frame under the current key. Both ends change the key after as many frames."""
        if self._number == _FRAMES_PER_KEY:
            self._key = HKDFExpand(SHA256(), _KEY_BYTES, b"baton kv next key").derive(self._key)
            self._aead = AESGCM(self._key)
            self._number = 0
        self._number += 1
        return self._number.to_bytes(_NONCE_BYTES, "big")


class CipherPair(NamedTuple):
    """A connection's two directions."""

    to_receiver: FrameCipher
    to_sender: FrameCipher


def derive_ciphers(token: str, receiver_nonce: bytes, sender_nonce: bytes) -> CipherPair:
    """The ciphers of the connection on which these nonces were exchanged."""
    hkdf = HKDF(SHA256(), 2 * _KEY_BYTES, salt=receiver_nonce + sender_nonce, info=b"baton kv keys")
    keys = hkdf.derive(token.encode())
    return CipherPair(FrameCipher(keys[:_KEY_BYTES]), FrameCipher(keys[_KEY_BYTES:]))
