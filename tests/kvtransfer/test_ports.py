"""KV sockets stay in their ranges; Mooncake's, too."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.ports import Ports
from kvtransfer.select import open_receiver
from tests.kvtransfer.peers import pool

MOONCAKE = Ports("28340-28399", "ports.mooncake")

ENGINE = """
import json, os, sys
from common.errors import ConfigError
from common.ports import Ports
from kvtransfer.mooncake_engine import MooncakeEngine, choose_ports

choose_ports(Ports(sys.argv[1], "ports.mooncake"))
try:
    engine = MooncakeEngine("127.0.0.1", 1.0)
except ConfigError as error:
    print(json.dumps(str(error)))
    sys.exit()
links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
own = {os.readlink(link) for link in links if os.path.islink(link)}
tables = [open(f"/proc/net/{name}").read().splitlines()[1:] for name in ("tcp", "tcp6")]
rows = [line.split() for table in tables for line in table]
listening = [row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]
print(json.dumps([int(row[1].rpartition(":")[2], 16) for row in listening]))
"""

AGAIN = """
import json, sys
from common.ports import Ports
from kvtransfer.mooncake_engine import MooncakeEngine, choose_ports

choose_ports(Ports(sys.argv[1], "ports.mooncake"))
sessions = []
for _ in range(5):
    engine = MooncakeEngine("127.0.0.1", 1.0)
    sessions.append(engine.session)
    engine.close()
print(json.dumps(sessions))
"""


def engine_at(ports: str) -> object:
    """The ports on which a Mooncake engine of a process of its own listens, or why there is none. (Mooncake
    reads its range once in a process.)"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", ENGINE, ports],
        capture_output=True,
        text=True,
        cwd=root,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_kv_over_tcp_stays_in_its_range() -> None:
    ports = Ports("28300-28339", "ports.kv")
    with closing(open_receiver({"full": pool(4, 64)}, "tcp", ports=ports)) as receiver:
        assert int(receiver.endpoints[0].address.rpartition(":")[2]) in ports.choice


def test_a_range_for_kv_that_is_used_up_names_its_option() -> None:
    with closing(open_receiver({"full": pool(4, 64)}, "tcp")) as receiver:
        taken = Ports(receiver.endpoints[0].address.rpartition(":")[2], "ports.kv")
        with pytest.raises(ConfigError, match="no port of") as raised:
            open_receiver({"full": pool(4, 64)}, "tcp", ports=taken)
    assert raised.value.key == "ports.kv"


def test_mooncake_stays_in_its_range() -> None:
    listens = engine_at(MOONCAKE.text)
    assert isinstance(listens, list)
    assert len(listens) == 2
    assert set(listens) <= set(MOONCAKE.choice)


def test_a_range_that_is_too_small_for_mooncake_names_its_option() -> None:
    assert "with two ports of 28339-28339" in str(engine_at("28339"))


def test_a_mooncake_engine_takes_no_port_of_one_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each engine's process ends with its two ports in use, and writes nothing down at its end."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    taken = [engine_at("28360-28365") for _ in range(3)]
    ports = [port for pair in taken if isinstance(pair, list) for port in pair]
    assert sorted(ports) == list(range(28360, 28366))
    again = engine_at("28360-28365")
    assert isinstance(again, list)
    assert set(again) <= set(ports), "of a range that is used up, those that have rested longest"


def test_an_engine_that_is_started_again_has_other_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a receiver starts one again to end a peer's writes (mooncake.py): in the same process, whose library
    has read its range before."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", AGAIN, "28360-28369"],
        capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=60, check=True,
    )  # fmt: skip
    sessions = json.loads(done.stdout.splitlines()[-1])
    assert len(set(sessions)) == 5
