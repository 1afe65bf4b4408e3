"""Which backends a worker offers or can use, and which of them a pair of workers takes.

Decode opens every backend that its machine has and lists the endpoints in every KVTarget, best first: from
GPU to GPU of one host, shared memory, RDMA, plain TCP. Prefill takes the first that works for it.
`kv_transfer_backend` limits a worker to one backend. Mooncake over TCP is taken only when it is named,
because the plain tcp backend is faster.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from common.errors import ConfigError, TransferError
from common.ports import ANY_PORT, Ports
from kvtransfer import cuda_ipc, mooncake, mooncake_engine, shm, tcp
from kvtransfer.channel import PeerSender
from kvtransfer.pages import PageWrite
from kvtransfer.receiver import PoolReceiver
from kvtransfer.region import NO_REGIONS, PoolRegion
from kvtransfer.rooms import RoomTable
from kvtransfer.transport import Bounds, ReceiverTransport
from wire.messages.transfer import Fetch, KVTarget, TransferEndpoint

log = logging.getLogger(__name__)

AUTO = "auto"
BACKENDS = (cuda_ipc.BACKEND, shm.BACKEND, mooncake.BACKEND, tcp.BACKEND)  # best first
_OF_ONE_HOST = (cuda_ipc.BACKEND, shm.BACKEND)


def check_backend(name: str) -> str:
    """`name`, if it is one of BACKENDS or "auto". Raises ConfigError listing them."""
    if name not in (AUTO, *BACKENDS):
        valid = ", ".join((AUTO, *BACKENDS))
        raise ConfigError("kv_transfer_backend", f"there is no backend {name!r}", f"use one of: {valid}")
    return name


def open_receiver(
    regions: PoolRegion,
    backend: str = AUTO,
    interface: str = "127.0.0.1",
    bounds: Bounds | None = None,
    encrypted: bool = False,
    ports: Ports = ANY_PORT,
    mooncake_ports: Ports = ANY_PORT,
) -> PoolReceiver:
    """Open a decode worker's pools. `encrypted`: whether what comes over TCP must be, as it is in a cluster
    with a secret. Raises ConfigError when the named backend does not work here."""
    check_backend(backend)
    bounds = bounds or Bounds()
    mooncake_engine.choose_ports(mooncake_ports)
    rooms = RoomTable()
    transports: list[ReceiverTransport] = []
    try:
        if _takes_cuda_ipc(backend, regions, cuda_ipc.obstacle_to_receive(regions)):
            transports.append(cuda_ipc.CudaIpcReceiver(regions, rooms, bounds))
        if backend == shm.BACKEND or (backend == AUTO and shm.possible(regions)):
            transports.append(shm.ShmReceiver(regions, rooms, bounds))
        if backend == mooncake.BACKEND or (backend == AUTO and mooncake.has_rdma()):
            transports.append(mooncake.MooncakeReceiver(regions, rooms, bounds, interface, encrypted, ports))
        if backend in (tcp.BACKEND, AUTO):
            transports.append(tcp.TcpReceiver(regions, rooms, bounds, interface, encrypted, ports))
    except ConfigError:
        for transport in transports:
            transport.close()
        raise
    return PoolReceiver(regions, rooms, transports)


def _takes_cuda_ipc(backend: str, regions: PoolRegion, obstacle: str) -> bool:
    """Whether it is named, or nothing is in its way. What is in the way of pools on a GPU is logged."""
    if backend == AUTO and obstacle and any(region.copies is not None for region in regions.values()):
        log.warning("no cuda_ipc between the workers of this host: %s", obstacle)
    return backend == cuda_ipc.BACKEND or (backend == AUTO and not obstacle)


class PoolSender:
    """SenderTransport over every backend that this worker can use; an endpoint names its backend."""

    def __init__(self, transports: Mapping[str, PeerSender], host: str) -> None:
        """Owns the transports. `host` is `common.host.host_identity()`."""
        self._transports = transports
        self._host = host

    @property
    def backends(self) -> tuple[str, ...]:
        """Names, for the worker record."""
        return tuple(self._transports)

    def choose(self, target: KVTarget | Fetch) -> TransferEndpoint:
        """The first of the target's endpoints that works from here. Raises TransferError when none does."""
        for endpoint in target.endpoints:
            if endpoint.backend in _OF_ONE_HOST and target.host != self._host:
                continue
            transport = self._transports.get(endpoint.backend)
            if transport is not None and not transport.obstacle(endpoint):
                return endpoint
        offered = ", ".join(endpoint.backend for endpoint in target.endpoints) or "nothing"
        where = "on this host" if target.host == self._host else "on another host"
        raise TransferError(
            f"worker {target.receiver} {where} offers {offered}; this worker can use "
            f"{', '.join(self._transports)}"
        )

    def reads_host(self, endpoint: TransferEndpoint) -> bool:
        """Whether pages of the host tier can be written there from where they are."""
        return bool(self._transports[endpoint.backend].arenas)

    def write(self, endpoint: TransferEndpoint, write: PageWrite) -> int:
        return self._transports[endpoint.backend].write(endpoint, write)

    def suspend(self, endpoint: TransferEndpoint) -> None:
        if endpoint.backend in self._transports:
            self._transports[endpoint.backend].suspend(endpoint)

    def resume(self, endpoint: TransferEndpoint) -> None:
        if endpoint.backend in self._transports:
            self._transports[endpoint.backend].resume(endpoint)

    def drain(self, endpoint: TransferEndpoint) -> None:
        if endpoint.backend in self._transports:
            self._transports[endpoint.backend].drain(endpoint)

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()


def open_sender(
    regions: PoolRegion,
    host: str,
    backend: str = AUTO,
    interface: str = "127.0.0.1",
    bounds: Bounds | None = None,
    mooncake_ports: Ports = ANY_PORT,
    arenas: PoolRegion = NO_REGIONS,
) -> PoolSender:
    """The backends of a prefill worker. Raises ConfigError when the named one does not work here. `arenas`:
    the host tier's pages, which leave from there where the backend can read them."""
    check_backend(backend)
    bounds = bounds or Bounds()
    mooncake_engine.choose_ports(mooncake_ports)
    transports: dict[str, PeerSender] = {}
    if _takes_cuda_ipc(backend, regions, cuda_ipc.obstacle_to_send(regions)):
        transports[cuda_ipc.BACKEND] = cuda_ipc.CudaIpcSender(regions, bounds)
    if backend in (shm.BACKEND, AUTO):
        transports[shm.BACKEND] = shm.ShmSender(regions, bounds, arenas)
    if backend == mooncake.BACKEND or (backend == AUTO and mooncake.has_rdma()):
        transports[mooncake.BACKEND] = mooncake.MooncakeSender(regions, bounds, interface, arenas)
    if backend in (tcp.BACKEND, AUTO):
        transports[tcp.BACKEND] = tcp.TcpSender(regions, bounds, arenas)
    return PoolSender(transports, host)
