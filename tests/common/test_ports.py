"""Ranges of ports: their form, and what ends them. Their order: test_used_ports.py."""

from __future__ import annotations

import socket
from contextlib import ExitStack, closing

import pytest
from pydantic import TypeAdapter, ValidationError

from common.errors import ConfigError
from common.ports import ANY_PORT, Ports, PortText, bind_free

HOST = "127.0.0.1"


@pytest.mark.parametrize(
    ("given", "text"), [(0, "0"), (7000, "7000"), ("7000-7009", "7000-7009"), ("65535", "65535")]
)
def test_forms(given: object, text: str) -> None:
    assert TypeAdapter(PortText).validate_python(given) == text


@pytest.mark.parametrize("given", ["7009-7000", "65536", "1-70000", "a-b", "", "1-", "-5", -5, 1.5, None])
def test_what_is_no_range(given: object) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(PortText).validate_python(given)


def free_pair(held: ExitStack) -> tuple[int, socket.socket]:
    """The first of two neighbouring ports, of which the second is taken and the first is free."""
    while True:
        taken = held.enter_context(socket.create_server((HOST, 0)))
        port = taken.getsockname()[1] - 1
        try:
            socket.create_server((HOST, port)).close()
        except OSError:
            continue
        return port, taken


def test_the_free_port_of_a_range_is_found() -> None:
    with ExitStack() as held:
        first, _ = free_pair(held)
        for _ in range(10):
            with closing(socket.socket()) as sock:
                bind_free(Ports(f"{first}-{first + 1}"), HOST, lambda port: sock.bind((HOST, port)))
                assert sock.getsockname()[1] == first


def test_a_range_that_is_used_up_names_its_option() -> None:
    with socket.create_server((HOST, 0)) as taken, closing(socket.socket()) as sock:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"no port of {port} is free on {HOST}") as raised:
            bind_free(Ports(str(port), "ports.kv"), HOST, lambda port: sock.bind((HOST, port)))
    assert raised.value.key == "ports.kv"


def test_an_address_of_another_host_is_told_apart_from_taken_ports() -> None:
    with closing(socket.socket()) as sock, pytest.raises(ConfigError, match="cannot be bound") as raised:
        bind_free(ANY_PORT, "192.0.2.77", lambda port: sock.bind(("192.0.2.77", port)))
    assert raised.value.key == "interface"
