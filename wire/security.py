"""CURVE for every ZeroMQ socket of a cluster that has a secret."""

from __future__ import annotations

import hashlib

import zmq
from zmq.utils import z85


class Curve:
    """One key pair derived from the cluster secret, used at both ends.

    A process that knows the secret is a member, with all rights. The private key is the SHA-256 of the
    secret; libsodium clamps it.
    """

    def __init__(self, secret: str) -> None:
        self._private = z85.encode(hashlib.sha256(b"baton-curve-1" + secret.encode()).digest())
        self._public = zmq.curve_public(self._private)

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket accept members only. Call it before `bind`."""
        socket.curve_secretkey = self._private
        socket.curve_publickey = self._public
        socket.curve_server = True

    def connect(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket connect to members only. Call it before `connect`."""
        socket.curve_secretkey = self._private
        socket.curve_publickey = self._public
        socket.curve_serverkey = self._public


def curve_for(secret: str | None) -> Curve | None:
    """The cluster's Curve, or None when no secret is set."""
    return Curve(secret) if secret else None
