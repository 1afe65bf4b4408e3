"""AdminListener: the second HTTP listener of a router, for operators (docs/doors.md)."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Awaitable, Callable

from common.errors import ConfigError
from common.host import LOOPBACK, is_loopback
from router.api.admin_app import build_admin_app
from router.connections import ConnectionLimits, HttpConfig, HttpServer
from router.dashboard.live import LiveFeed
from router.keys import ADMIN_KEY_ENV, Keys, plain_keys
from router.listener import bind, url_of
from router.options import AdminOptions
from router.page import Page
from router.tls import Tls

_LIMITS = ConnectionLimits(connections=64, head_bytes=16_384, head_s=10.0)
_CLOSE_S = 6.0  # longer than the server waits for its connections


class AdminListener:
    """Has its port from the start. Serves on the event loop on which it is started. Close it there."""

    def __init__(self, options: AdminOptions, reached_at: str, tls: Tls | None = None) -> None:
        """Read the key, bind the first free port of the range. `reached_at` is this host's address, where
        others find the listener if it is on all addresses. `tls` is not used on loopback, which is no name
        of a certificate.

        Raises ConfigError when no port is free, and for an address that others reach when there is no key.
        """
        host = options.admin_host
        keys = Keys("admin_key_file", options.admin_key_file, ADMIN_KEY_ENV, plain_keys)
        if not (is_loopback(host) or keys.required):
            raise ConfigError(
                "admin_host",
                f"{host} is not loopback, and there is no key",
                f"set admin_key_file or {ADMIN_KEY_ENV}, or use {LOOPBACK}",
            )
        self._socket = _bind_first(host, options.admin_port_range)
        self._tls = None if is_loopback(host) else tls
        self.url = url_of(self._socket, self._tls is not None, reached_at if _is_any(host) else "")
        self._keys = keys
        self._live: LiveFeed | None = None
        self._server: HttpServer | None = None
        self._serving: asyncio.Task[None] | None = None

    def start(self, open_page: Callable[[str], Awaitable[Page]]) -> None:
        """Serve these pages."""
        assert self._serving is None, "it has started already"
        self._live = LiveFeed(open_page, self.url)
        app = build_admin_app(open_page, self._live, self._keys)
        self._server = HttpServer(HttpConfig(app, _LIMITS, self._tls))
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    async def close(self) -> None:
        """Free the port. Closing twice changes nothing."""
        if self._serving is not None and self._server is not None and self._live is not None:
            self._live.close()
            self._server.should_exit = True
            await asyncio.wait([self._serving], timeout=_CLOSE_S)
        self._socket.close()


def _bind_first(host: str, ports: range) -> socket.socket:
    """It listens already: else another process could bind the same port."""
    for port in ports:
        try:
            bound = bind(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(
                    "admin_host", f"{host} cannot be bound ({error.strerror})", "use a local address"
                ) from None
            continue
        try:
            bound.listen()
        except OSError:
            bound.close()
        else:
            return bound
    raise ConfigError("admin_ports", f"no port of {host} is free", "give other ports, or 0 for any free one")


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
