"""`python -m router --options FILE.json [--processes N]`: a router, in one process or several on one port.

Prints one line of JSON when it serves: {"ready": true, "http": ..., "admin": ..., "mailbox": ...}. What
cannot work is one line on stderr that names key and remedy, and exit code 2. Ends cleanly on SIGTERM and
SIGINT.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import uvloop

from common.arguments import ExactParser
from common.descriptors import allow_descriptors
from common.errors import ConfigError
from common.garbage import freeze_gc
from common.options import CONFIG_ERROR_EXIT, exit_on_config_error, read_options
from router.admin_listener import AdminListener
from router.api.app import build_app
from router.connections import ConnectionLimits, HttpConfig, HttpServer, possible_connections
from router.listener import bind, url_of
from router.options import RouterOptions
from router.processes import ProcessFailed
from router.service import Router
from router.supervisor import Supervisor
from router.tls import Tls


class _Server(HttpServer):
    """Prints a line when it serves. After a signal it returns: uvicorn's own would raise the signal again."""

    def __init__(
        self,
        config: HttpConfig,
        ready_line: str,
        on_exit: Callable[[], None],
        works: Callable[[], bool],
        stdout: int | None,
    ) -> None:
        """`on_exit` is called when the server is to end. Connections have a grace period to end after it.
        It ends when `works` is false. `stdout`: the descriptor that takes stdout's place after the line."""
        super().__init__(config)
        self._ready_line = ready_line
        self._stdout = stdout
        self._on_exit = on_exit
        self._works = works

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT end `serve`."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.end)
        yield

    def end(self) -> None:
        """Serve no more requests."""
        self.should_exit = True
        self._on_exit()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second. True ends the server."""
        if not (self.should_exit or self._works()):
            self.end()
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Bind, then print the line."""
        await super().startup(sockets)
        sys.stdout.write(self._ready_line + "\n")
        sys.stdout.flush()
        if self._stdout is not None:
            os.dup2(self._stdout, sys.stdout.fileno())
            os.close(self._stdout)


def main() -> None:
    """Run the process."""
    parser = ExactParser(prog="python -m router", description="Baton's router")
    parser.add_argument("--options", type=Path, required=True, help="a JSON file (router/options.py)")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="processes that share the port")
    parser.add_argument(
        "--further", nargs=5, metavar=("DIRECTORY", "PORT", "FIRST", "ADMIN", "STDOUT"),
        help="internal: a process that --processes starts, and that ends with its stdin",
    )  # fmt: skip
    given = parser.parse_args()
    with exit_on_config_error("router"):
        options = read_options(RouterOptions, given.options).here()
        if given.processes < 1:
            raise ConfigError("--processes", f"{given.processes} processes cannot serve", "give at least 1")
        if given.further is not None:
            directory, port, *_ = given.further
            key = sys.stdin.readline().strip()  # see processes.py
            options = options.model_copy(
                update={"directory": directory, "port": int(port), "resume_key": key or None}
            )
        shared = given.further is not None or given.processes > 1
        with _bind(options, shared) as listener:
            if given.processes > 1:
                code = uvloop.run(_supervise(options, listener, given))
                raise SystemExit(code)
            _listen(listener, options)
            uvloop.run(_serve(options, listener, given))


def _bind(options: RouterOptions, shared: bool) -> socket.socket:
    try:
        return bind(options.host, options.port, shared)
    except OSError as error:
        raise _refused(error, options) from None


def _listen(listener: socket.socket, options: RouterOptions) -> None:
    """bind alone does not fail on every kind of occupied port."""
    # uvicorn keeps a connection that it has closed until the client has read what was written. The kernel
    # ends it, also when the client says that its window is full: much later than the router would leave it.
    late_ms = min(int(10_000 * options.unread_timeout_s), 2**31 - 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, late_ms)
    try:
        listener.listen(2048)
    except OSError as error:
        raise _refused(error, options) from None


def _refused(error: OSError, options: RouterOptions) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        problem = f"{options.host}:{options.port} is in use"
        return ConfigError("port", problem, "choose another, or 0 for any free one")
    return ConfigError("host", f"{options.host} cannot be bound ({error.strerror})", "use a local address")


def _ready_line(url: str, admin_url: str, mailbox: str) -> str:
    return json.dumps({"ready": True, "http": url, "admin": admin_url, "mailbox": mailbox})


async def _supervise(options: RouterOptions, listener: socket.socket, given: argparse.Namespace) -> int:
    """Run `--processes`. This process keeps the port, and does not listen on it. Returns the exit code."""
    allow_descriptors()  # all workers come to it, where it hosts the directory
    tls = _tls(options)
    admin = AdminListener(options, options.interface, tls)
    url = url_of(listener, tls is not None)
    supervisor = Supervisor(options, str(given.options), listener.getsockname()[1], admin.url)
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    try:
        await supervisor.start(given.processes)
        admin.start(supervisor.open_page)
        sys.stdout.write(_ready_line(url, admin.url, supervisor.mailbox_address) + "\n")
        sys.stdout.flush()
        await told.wait()
    except ProcessFailed as failed:
        if failed.code != CONFIG_ERROR_EXIT:
            raise
        return CONFIG_ERROR_EXIT
    finally:
        await admin.close()
        await supervisor.close()
    return 0


def _tls(options: RouterOptions) -> Tls | None:
    if options.tls_cert is None or options.tls_key is None:
        return None
    return Tls(options.tls_cert, options.tls_key)


def _limits(options: RouterOptions) -> ConnectionLimits:
    connections = possible_connections(options.max_connections)
    return ConnectionLimits(connections, options.max_header_bytes, options.header_timeout_s)


async def _serve(options: RouterOptions, listener: socket.socket, given: argparse.Namespace) -> None:
    """Run the only process, or one of several."""
    tls = _tls(options)
    if given.further is not None:
        _, _, first, admin_url, stdout = given.further
        await _serve_api(Router(options, first, admin_url), listener, tls, admin_url, sys.stdin, int(stdout))
        return
    admin = AdminListener(options, options.interface, tls)
    try:
        router = Router(options, None, admin.url)
        admin.start(router.pages.open)
        await _serve_api(router, listener, tls, admin.url)
    finally:
        await admin.close()


async def _serve_api(
    router: Router,
    listener: socket.socket,
    tls: Tls | None,
    admin_url: str,
    until: TextIO | None = None,
    stdout: int | None = None,
) -> None:
    """Serve until a signal comes, or `until` is closed. Close the router. `stdout`: see `_Server`.

    A process with `until` ends when its router fails: another takes its place. Without one, it is better than
    none, and /health tells.
    """
    try:
        config = HttpConfig(build_app(router), _limits(router.options), tls)
        ready = _ready_line(url_of(listener, tls is not None), admin_url, router.mailbox_address)
        freeze_gc()
        server = _Server(config, ready, router.interrupt, lambda: until is None or router.healthy, stdout)
        if until is not None:
            asyncio.get_running_loop().add_reader(until, _end_with_stdin, server)
        await server.serve(sockets=[listener])
    finally:
        router.close()


def _end_with_stdin(server: _Server) -> None:
    """The supervisor has closed the pipe, or has ended: it writes nothing."""
    asyncio.get_running_loop().remove_reader(sys.stdin)
    server.end()


if __name__ == "__main__":
    main()
