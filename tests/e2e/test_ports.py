"""Whole stacks within fixed ports, on each form of `interface`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.host import AUTO, local_address
from tests.e2e.test_secrets import refusal
from tests.harness.local_stack import stack
from tests.support.members import write_secret
from wire.addresses import parse_address
from wire.options import PortOptions

RANGES = {"mailboxes": "28800-28839", "events": "28840-28879", "kv": "28880-28899"}


def has_route() -> bool:
    try:
        local_address(AUTO)
    except ConfigError:
        return False
    return True


def place(address: str) -> tuple[str, int]:
    """Host and port of an address."""
    host, _, port = parse_address(address).endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)


@pytest.mark.parametrize(
    ("interface", "address"),
    [
        ("lo", "127.0.0.1"),
        pytest.param(AUTO, None, marks=pytest.mark.skipif(not has_route(), reason="no route to other hosts")),
    ],
)
def test_a_stack_stays_in_its_ranges_and_announces_what_is_reached(
    tmp_path: Path, tiny_model: Path, interface: str, address: str | None
) -> None:
    sockets: dict[str, Any] = {
        "interface": interface,
        "ports": RANGES,
        "cluster_secret_file": str(write_secret(tmp_path)),
    }
    ports = PortOptions(**RANGES)
    fake = {"engine": "fake", "max_total_tokens": 1024, "kv_transfer_backend": "tcp"}
    with stack(tiny_model, tmp_path, 1, 1, dict(sockets), **sockets, **fake) as running:
        assert len(running.generate([*range(40)], 5)["output_ids"]) == 5
        expected = address or local_address(AUTO)
        members = (running.directory, running.router, *running.workers)
        for member in members:
            host, port = place(member.ready["mailbox"])
            assert host == expected
            assert port in ports.of("mailboxes").choice
        for worker in running.workers:
            host, port = place(worker.ready["events"])
            assert (host, port in ports.of("events").choice) == (expected, True)


def test_an_interface_that_means_nothing_here_ends_with_code_2(tmp_path: Path) -> None:
    file = write_secret(tmp_path)
    said = refusal("router.directory", tmp_path, interface="eth77", cluster_secret_file=str(file))
    assert "interface: eth77 is no network device or host name here" in said
    everywhere = refusal("router.directory", tmp_path, interface="0.0.0.0", cluster_secret_file=str(file))
    assert "no address that peers can connect to" in everywhere
