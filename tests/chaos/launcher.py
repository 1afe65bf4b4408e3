"""Run one of our programs behind a Network: `python -m tests.chaos.launcher NETWORK MODULE [ARGUMENTS]`.

The program itself knows of nothing: what it connects to is replaced by the network's way there.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
from typing import Any

import zmq

import kvtransfer.mooncake
import kvtransfer.tcp
from common.ports import Ports
from tests.chaos.network import ask_network

_TCP = "tcp://"
ROLE_OF_PROGRAM = {
    "router": "router", "router.directory": "directory", "prefill_node": "P", "decode_node": "D",
}  # fmt: skip


class NetworkClient:
    """Asks the network, on behalf of one process. Any thread may use it."""

    def __init__(self, network: str, name: str) -> None:
        """`network` is Network.address."""
        self._network = network
        self.name = name
        self._known: dict[str, str] = {}

    def bound(self, address: str) -> None:
        """This process listens at "host:port"."""
        ask_network(self._network, {"name": self.name, "bound": address})

    def way(self, address: str, is_zmq: bool) -> str:
        """Where to connect in place of "host:port"."""
        if address not in self._known:
            answer = ask_network(self._network, {"name": self.name, "connect": address, "zmq": is_zmq})
            self._known[address] = str(answer["address"])
        return self._known[address]


def put_behind(client: NetworkClient) -> None:
    """From now on, this process's connections go through the network."""
    connect, bind = zmq.Socket.connect, zmq.Socket.bind

    def connect_through(sock: zmq.Socket[bytes], address: str) -> Any:
        if address.startswith(_TCP):
            address = _TCP + client.way(address.removeprefix(_TCP), is_zmq=True)
        return connect(sock, address)

    def bind_and_tell(sock: zmq.Socket[bytes], address: str) -> Any:
        bound = bind(sock, address)
        if address.startswith(_TCP):
            endpoint = sock.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
            client.bound(endpoint.removeprefix(_TCP))
        return bound

    zmq.Socket.connect = connect_through  # type: ignore[method-assign, assignment]
    zmq.Socket.bind = bind_and_tell  # type: ignore[method-assign, assignment]
    _put_transport_behind(client)


def _put_transport_behind(client: NetworkClient) -> None:
    listen, reach = kvtransfer.tcp.listening_socket, kvtransfer.tcp.connected_socket

    def listen_and_tell(interface: str, ports: Ports) -> socket.socket:
        sock = listen(interface, ports)
        client.bound("{}:{}".format(*sock.getsockname()[:2]))
        return sock

    def reach_through(address: str, *further: Any) -> socket.socket:
        return reach(client.way(address, is_zmq=False), *further)

    for module in (kvtransfer.tcp, kvtransfer.mooncake):
        vars(module)["listening_socket"] = listen_and_tell
        vars(module)["connected_socket"] = reach_through


def run_program(module: str, arguments: list[str]) -> None:
    """Run the module as if it had been started itself."""
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main() -> None:
    """Change what it connects with, then run the program."""
    network, module, *arguments = sys.argv[1:]
    put_behind(NetworkClient(network, f"{ROLE_OF_PROGRAM[module]}/{os.getpid()}"))
    run_program(module, arguments)


if __name__ == "__main__":
    main()
