"""Listening sockets of a router."""

from __future__ import annotations

import socket


def bind(host: str, port: int, shared: bool = False) -> socket.socket:
    """A TCP socket that does not listen yet. `shared`: other processes bind the same port. Raises OSError."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    bound.setblocking(False)
    return bound


def url_of(bound: socket.socket, tls: bool, host: str = "") -> str:
    """Where a socket is reached over HTTP or HTTPS, at `host` if it is given."""
    own, port = bound.getsockname()[:2]
    shown = host or own
    return f"{'https' if tls else 'http'}://{f'[{shown}]' if ':' in shown else shown}:{port}"
