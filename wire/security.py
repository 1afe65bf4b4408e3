"""CURVE for every ZeroMQ socket of a cluster that has a secret, and the proof that its owner is a member.

Each process has a key pair of its own, whose public key is part of its addresses (wire/addresses.py). A peer
that connects to an address therefore reaches the process that announced it, and nobody else. In the other
direction CURVE shows the receiver the sender's public key (wire/zap.py), and the head of each frame has the
sender's address with

    HMAC-SHA256(secret, "baton member 1" + address), the first 16 bytes.

The key in that address must be the connection's. So a member cannot speak with the address of another one,
and who does not know the secret is not heard at all. See docs/decisions/0028.

Two key pairs are derived from the secret instead: that of a directory at a fixed port, whose address is in
configurations and has no key, and the one with which the readers of KV events connect, because a publisher
sees no frame of theirs.
"""

from __future__ import annotations

import hmac
from functools import lru_cache

import zmq
from zmq.utils import z85

from common.secrets import ClusterSecret
from wire.addresses import Address

PROOF_BYTES = 16
_DIRECTORY = b"baton directory 1"
_READER = b"baton reader 1"
_MEMBER = b"baton member 1"
_ZAP_DOMAIN = b"baton"


class Curve:
    """The key pair of one process. `version` grows when the accepted secrets have changed.

    May be used by several threads: what changes is replaced as a whole.
    """

    def __init__(self, secret: ClusterSecret, *, fixed_address: bool = False) -> None:
        """`fixed_address`: of a directory at a fixed port."""
        self._secret = secret
        self._seen = secret.accepted
        self.version = 0
        self.fixed_address = fixed_address
        self._pair = _derived(self._seen[0], _DIRECTORY) if fixed_address else _drawn()

    @property
    def public(self) -> str:
        """The public key, hexadecimal."""
        return self._pair[0]

    def address(self, endpoint: str) -> str:
        """The address under which an endpoint of this process is announced."""
        return endpoint if self.fixed_address else f"{endpoint}/{self.public}"

    def refresh(self, now: float) -> None:
        """Read the secret again if it has changed. Call it about once a second; more often costs nothing."""
        self._secret.refresh(now)
        accepted = self._secret.accepted
        if accepted != self._seen:
            if self.fixed_address:
                self._pair = _derived(accepted[0], _DIRECTORY)
            self._seen = accepted
            self.version += 1

    # -- sockets -----------------------------------------------------------------------------------

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket speak CURVE as a server. Call it before `bind`. The context needs a ZapHandler."""
        self._present(socket, self._pair)
        socket.curve_server = True
        socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)

    def connect(self, socket: zmq.Socket[bytes], to: Address, attempt: int = 0) -> None:
        """Make a socket connect to that process only. Call it before `connect`.

        For an address without a key, attempts after the first take the other accepted secrets in turn.
        """
        self._present(socket, self._pair)
        socket.curve_serverkey = _z85(self._key_of(to, attempt))

    def read(self, socket: zmq.Socket[bytes], publisher: Address) -> None:
        """Make a SUB or DEALER socket connect to a publisher of KV events."""
        self._present(socket, _derived(self._seen[0], _READER))
        socket.curve_serverkey = _z85(self._key_of(publisher, 0))

    def attempts(self, to: Address) -> int:
        """How many different keys an address may have."""
        return 1 if to.key else len(self._seen)

    # -- who is a member ---------------------------------------------------------------------------

    def proof(self, address: str) -> bytes:
        """What the owner of an address says to show that it knows the secret."""
        return _proof(self._seen[0], address)

    def is_member(self, address: Address, text: str, proof: bytes, key: str) -> bool:
        """Whether the peer whose connection has that public key may speak as `address`, written as `text`."""
        if address.key:
            owned = hmac.compare_digest(address.key, key)
        else:
            owned = any(hmac.compare_digest(_derived(one, _DIRECTORY)[0], key) for one in self._seen)
        return owned and any(hmac.compare_digest(_proof(one, text), proof) for one in self._seen)

    def is_reader(self, key: str) -> bool:
        """Whether a connection with that public key is a member's that reads events."""
        return any(hmac.compare_digest(_derived(one, _READER)[0], key) for one in self._seen)

    def _key_of(self, to: Address, attempt: int) -> str:
        return to.key or _derived(self._seen[attempt % len(self._seen)], _DIRECTORY)[0]

    @staticmethod
    def _present(socket: zmq.Socket[bytes], pair: tuple[str, bytes]) -> None:
        public, private = pair
        socket.curve_publickey = _z85(public)
        socket.curve_secretkey = private


def curve_for(secret: ClusterSecret | None, *, fixed_address: bool = False) -> Curve | None:
    """A process's Curve, or None when the cluster has no secret."""
    return Curve(secret, fixed_address=fixed_address) if secret is not None else None


def _proof(secret: bytes, address: str) -> bytes:
    return hmac.digest(secret, _MEMBER + address.encode(), "sha256")[:PROOF_BYTES]


def _drawn() -> tuple[str, bytes]:
    public, private = zmq.curve_keypair()
    return z85.decode(public).hex(), private


@lru_cache(maxsize=16)
def _derived(secret: bytes, use: bytes) -> tuple[str, bytes]:
    """(public key in hexadecimal, private key in Z85). libsodium clamps the private key."""
    private = z85.encode(hmac.digest(secret, use, "sha256"))
    return z85.decode(zmq.curve_public(private)).hex(), private


def _z85(key: str) -> bytes:
    encoded: bytes = z85.encode(bytes.fromhex(key))
    return encoded
