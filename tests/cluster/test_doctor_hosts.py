"""`baton doctor` between two hosts: a firewall and a cut cable are told apart. The hosts are namespaces."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from cluster.config import parse_config
from cluster.doctor.checks import judge
from cluster.doctor.facts import Case, Finding, Grade, Target
from cluster.doctor.gather import gather
from cluster.doctor.preflight import connect
from tests.support.other_host import OtherHost, other_host, why_no_other_host

pytestmark = [
    pytest.mark.skipif(why_no_other_host() != "", reason=why_no_other_host()),
    pytest.mark.skipif(shutil.which("iptables") is None, reason="a firewall needs iptables"),
]

ROOT = Path(__file__).parents[2]
RANGES = {"mailboxes": "28700-28709", "kv": "28710-28719"}
LISTEN = """
import json, sys
from cluster.doctor.preflight import Listeners
from wire.options import PortOptions

ranges = json.loads(sys.argv[2])
with Listeners("there", sys.argv[1], PortOptions(**ranges), list(ranges)) as listeners:
    print(json.dumps([[*target[:5], target.token.hex()] for target in listeners.targets]), flush=True)
    sys.stdin.read()
"""


class Listening(NamedTuple):
    host: OtherHost
    targets: list[Target]


@contextmanager
def listening() -> Iterator[Listening]:
    """Another host with a listener on a port of each range."""
    with other_host() as host:
        process = subprocess.Popen(
            [*host.command, sys.executable, "-c", LISTEN, host.address, json.dumps(RANGES)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            told = json.loads(process.stdout.readline())
            yield Listening(host, [Target(*fields, token=bytes.fromhex(token)) for *fields, token in told])
        finally:
            process.stdin.close()
            process.wait(timeout=20.0)
            process.stdout.close()


def faults(there: Listening) -> list[Finding]:
    """What the doctor finds when this host connects to the other one."""
    here = gather("here", None, b"")
    nodes = [replace(here, address="10.0.0.1"), replace(here, node="there", address=there.host.address)]
    config = parse_config({"model": "m", "worker": {"engine": "fake"}})
    case = Case(nodes, connect("here", there.targets), config)
    return [one for one in judge(case) if one.check == "reachable" and one.grade is Grade.FAULT]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.doctor.preflight._CONNECT_S", 1.0)


def test_a_firewall_that_drops_one_range() -> None:
    with listening() as there:
        assert faults(there) == []
        drop = ["-A", "INPUT", "-p", "tcp", "--dport", RANGES["kv"].replace("-", ":"), "-j", "DROP"]
        subprocess.run([*there.host.command, "iptables", *drop], check=True)
        (fault,) = faults(there)
    assert (fault.node, fault.remedy) == ("there", "open 28710-28719 between the nodes (docs/security.md)")
    assert fault.found == f"port {there.targets[1].port} of ports.kv is closed to here: no answer within 1 s"


def test_an_address_that_is_not_reached_at_all() -> None:
    with listening() as there:
        there.host.set_cable("down")
        (fault,) = faults(there)
    assert fault.found.startswith(f"the announced address {there.host.address} is not reached from here: no ")
    assert fault.remedy.startswith("set interface to the device or address of the network that all nodes")
