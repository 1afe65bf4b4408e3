"""MooncakeEngine: the interface to Mooncake's TransferEngine.

Properties of Mooncake 0.3, measured: dropping the last reference stops its threads and closes its sockets, so
it stores nothing afterwards. A batch takes at most 1,024 entries. A write that returned 0 has been applied at
the receiver; a part of one that failed may still be in progress. An engine inherited through fork hangs.
`initialize` returning 0 does not mean RDMA. An engine listens on two ports, which it draws at random from a
range that is read when the library is loaded. So ports of that range that must not be drawn are bound
meanwhile (common/used_ports.py): a peer that knows an address of an engine that is gone would write into the
memory of the one that listens there now, without being asked anything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from common.errors import ConfigError, TransferError
from common.ports import Ports
from common.used_ports import only_fresh

_MAX_BATCH = 1024
_INFINIBAND = Path("/sys/class/infiniband")
_PORT_VARIABLES = ("MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT")
_PORTS_OF_AN_ENGINE = 2


class MooncakeEngine:
    """One TransferEngine with its registered memory. `session` is its address for peers."""

    def __init__(self, interface: str, progress_s: float) -> None:
        """Raises ConfigError when the package, a library that it needs, or the network is missing."""
        self.protocol = "rdma" if has_rdma() else "tcp"
        kind = _engine_class()
        for key, value in {
            "MC_TCP_BIND_ADDRESS": interface,
            "MC_TCP_PROGRESS_TIMEOUT_SEC": str(max(1, round(progress_s))),
        }.items():
            os.environ.setdefault(key, value)
        self._engine: Any = kind()
        with _without_used_ports(interface):
            code = self._engine.initialize(interface, "P2PHANDSHAKE", self.protocol, "")
        if code != 0:
            ports = "-".join(os.environ.get(name, "") for name in _PORT_VARIABLES)
            raise ConfigError(
                "kv_transfer_backend",
                f"Mooncake cannot start over {self.protocol} on {interface}"
                + (f" with two ports of {ports}" if len(ports) > 1 else ""),
                "give an interface of this host, and ports.mooncake with free ports, or use tcp",
            )
        self.session = f"{interface}:{self._engine.get_rpc_port()}"

    def register(self, ptr: int, nbytes: int) -> None:
        """Let this memory be read from and written to. Raises ConfigError when it cannot be pinned."""
        if self._engine.register_memory(ptr, nbytes) != 0:
            raise ConfigError(
                "kv_transfer_backend",
                f"Mooncake cannot register {nbytes} bytes",
                "raise the limit on locked memory (ulimit -l), or use tcp",
            )

    def write(self, session: str, sources: list[int], targets: list[int], lengths: list[int]) -> None:
        """Copy pieces of registered memory into the peer's, and return when all are applied there.

        Raises TransferError. Then some may have been applied, and some may still be in progress.
        """
        engine = self._engine
        if engine is None:
            raise TransferError("Mooncake has been stopped here")
        for first in range(0, len(sources), _MAX_BATCH):
            batch = slice(first, first + _MAX_BATCH)
            code = engine.batch_transfer_sync_write(session, sources[batch], targets[batch], lengths[batch])
            if code != 0:
                raise TransferError(f"Mooncake's write to {session} failed with {code}")

    def close(self) -> None:
        """Stop the engine and all of its threads. No write may be in progress."""
        self._engine = None


def choose_ports(ports: Ports) -> None:
    """Let all engines of this process listen on these ports; any: those that Mooncake has (15000-17000).

    Call it before anything else here: afterwards it changes nothing.
    """
    if not ports.any_free:
        for name, port in zip(_PORT_VARIABLES, (ports.choice.start, ports.choice.stop - 1), strict=True):
            os.environ[name] = str(port)


def _without_used_ports(interface: str) -> AbstractContextManager[None]:
    """While an engine draws its ports: those that were used lately are not there. (Where Mooncake's own range
    holds, they are: it is not ours alone.)"""
    first, last = (os.environ.get(name, "") for name in _PORT_VARIABLES)
    if not (first.isdigit() and last.isdigit()):
        return nullcontext()
    return only_fresh(interface, range(int(first), int(last) + 1), _PORTS_OF_AN_ENGINE)


def has_rdma() -> bool:
    """Whether Mooncake is installed and its topology shows an RDMA device."""
    return not why_no_rdma()


@cache
def why_no_rdma() -> str:
    """Why Mooncake cannot use RDMA on this host; "" when it can."""
    if not _INFINIBAND.is_dir() or not any(_INFINIBAND.iterdir()):
        return f"this host has no RDMA device in {_INFINIBAND}"  # spares most machines the import
    try:
        kind = _engine_class()
    except ConfigError as error:
        return str(error)
    if any(_devices(json.loads(kind().get_local_topology()))):
        return ""
    return "Mooncake's topology shows no RDMA device"


def _devices(topology: dict[str, list[list[str]]]) -> Iterable[str]:
    """Every device of every location, preferred and available."""
    return (device for lists in topology.values() for devices in lists for device in devices)


def _engine_class() -> Any:
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # read when the library is loaded
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        remedy = "install mooncake-transfer-engine-non-cuda (-cuda13 with CUDA 13), or use tcp"
        if ".so" in str(error):
            remedy = "install the system packages libibverbs1, libnuma1 and libcurl4, or use tcp"
        raise ConfigError("kv_transfer_backend", f"Mooncake cannot be loaded: {error}", remedy) from None
    return TransferEngine
