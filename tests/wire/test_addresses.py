"""Addresses come from other processes: what is one, and what is not."""

from __future__ import annotations

import pytest

from common.errors import WireError
from wire.addresses import Address, is_directory, parse_address, same_process

KEY, OTHER = "0f" * 32, "1e" * 32


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://127.0.0.1:1", "tcp://[::1]:65535", "tcp://[fe80::1%eth0]:80", "tcp://worker-0.baton.svc:7000"],
)
def test_good_ones(endpoint: str) -> None:
    assert parse_address(endpoint) == Address(endpoint, "")
    assert parse_address(f"{endpoint}/{KEY}") == Address(endpoint, KEY)


@pytest.mark.parametrize(
    "text",
    [
        "", "tcp://", "tcp://host", "tcp://host:0", "tcp://host:65536", "tcp://*:80", "tcp://:80", "host:80",
        "ipc:///etc/passwd", "inproc://zeromq.zap.01", "tcp://host:80/", f"tcp://host:80/{KEY}0",
        f"tcp://host:80/{KEY.upper()}", "tcp://host:80;x", "tcp://host:80\n", "tcp://ho st:80", "tcp://\u0665:80",
        "tcp://host:\u0661", "tcp://" + "h" * 300 + ":80", "tcp://eth0;1.2.3.4:80",
    ],
)  # fmt: skip
def test_bad_ones(text: str) -> None:
    with pytest.raises(WireError, match="no address"):
        parse_address(text)


def test_keys_tell_processes_apart() -> None:
    assert same_process(f"tcp://a:1/{KEY}", f"tcp://b:2/{KEY}")
    assert not same_process(f"tcp://a:1/{KEY}", f"tcp://a:1/{OTHER}")
    assert not same_process(f"tcp://a:1/{KEY}", "tcp://a:1")


def test_the_directory_has_the_configured_address_or_proves_that_it_is_one() -> None:
    assert is_directory(f"tcp://a:1/{KEY}", f"tcp://a:1/{KEY}")
    assert not is_directory(f"tcp://b:1/{KEY}", f"tcp://a:1/{KEY}")
    assert is_directory("tcp://10.0.0.1:7000", "tcp://directory:7000")
