"""Which address an `interface` means."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.host import AUTO, local_address


@pytest.mark.parametrize(
    ("interface", "address"),
    [("127.0.0.1", "127.0.0.1"), ("10.1.2.3", "10.1.2.3"), ("lo", "127.0.0.1"), ("localhost", "127.0.0.1")],
)
def test_an_address_a_device_and_a_name(interface: str, address: str) -> None:
    assert local_address(interface) == address


def has_route() -> bool:
    return len(Path("/proc/net/route").read_text().splitlines()) > 1


@pytest.mark.skipif(not has_route(), reason="this host has no route to others")
def test_auto_is_an_address_that_can_be_bound_and_reached() -> None:
    with socket.create_server((local_address(AUTO), 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5.0).close()


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "::"])
def test_all_addresses_at_once_cannot_be_announced(everywhere: str) -> None:
    with pytest.raises(ConfigError, match="no address that peers can connect to"):
        local_address(everywhere)


def test_an_address_of_ipv6_is_refused() -> None:
    with pytest.raises(ConfigError, match="is an address of IPv6"):
        local_address("::1")


def test_what_is_nothing_here_is_refused_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"give an address, one of .*lo") as raised:
        local_address("no-such-device")
    assert raised.value.key == "interface"
