"""CURVE for every ZeroMQ socket of a cluster that has a secret."""

from __future__ import annotations

import hashlib

import zmq
from zmq.utils import z85


class Curve:
    """One key pair derived from the cluster secret, used at both ends.

    Who knows the secret is a member; there are no finer roles. The private key is SHA-256 of the secret,
    clamped by libsodium itself.
    """

    def __init__(self, secret: str) -> None:
        self._private = z85.encode(hashlib.sha256(b"baton-curve-1" + secret.encode()).digest())
        self._public = zmq.curve_public(self._private)

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket that will bind accept members only."""
        socket.curve_secretkey = self._private
        socket.curve_publickey = self._public
        socket.curve_server = True

    def connect(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket that will connect talk to members only."""
        socket.curve_secretkey = self._private
        socket.curve_publickey = self._public
        socket.curve_serverkey = self._public


def curve_for(secret: str | None) -> Curve | None:
    """The cluster's Curve, or None when no secret is set."""
    return Curve(secret) if secret else None
