"""Binding ZeroMQ sockets to a port of a range."""

from __future__ import annotations

import zmq

from common.ports import Ports, bind_free


def bind_socket(socket: zmq.Socket[bytes], interface: str, ports: Ports) -> str:
    """Bind to a free port, and return the endpoint. Raises ConfigError, after closing the socket."""

    def bind(port: int) -> None:
        try:
            socket.bind(f"tcp://{interface}:{port or '*'}")
        except zmq.ZMQError as error:
            raise OSError(error.errno, error.strerror) from None

    try:
        bind_free(ports, interface, bind)
    except BaseException:
        socket.close(linger=0)
        raise
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"))
