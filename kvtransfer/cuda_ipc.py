"""cuda_ipc: the decode worker's pool is memory of a GPU that prefill workers on the same host map and copy
into, from their own pools: on one GPU, or between two over NVLink or PCIe. No page goes through host memory.

Who is let in, and when a write is over: local.py. A write's copies are queued on the sender's stream for
copies, when the forward that computed the pages is complete (the shipper waits for it), and its `End` leaves
when the event behind them has passed. Decode launches the forwards that read the pages after that.
"""

from __future__ import annotations

import functools
import logging

from common.errors import ConfigError, TransferError
from kvcache.device_memory import DeviceError, DeviceMapping, DeviceMemory
from kvcache.page_runs import coalesce
from kvtransfer.channel import Channel, GrantedWrite, Peer, Uncertain
from kvtransfer.copies import CopyQueue, Unsettled, settle
from kvtransfer.local import LocalReceiver, LocalSender, Mapped, Unmappable
from kvtransfer.region import PoolRegion
from kvtransfer.rooms import RoomTable
from kvtransfer.transport import Bounds
from wire.messages.transfer import TransferEndpoint

log = logging.getLogger(__name__)

BACKEND = "cuda_ipc"
_FAILURES = (DeviceError, RuntimeError, TransferError)  # of the driver, of torch's streams and events, late
_DEVICE = "device"  # parameter of the endpoint: the UUID of the GPU that has the pools


def obstacle_to_receive(regions: PoolRegion) -> str:
    """Why peers cannot copy into these pools; "" if they can."""
    private = ", ".join(group for group, region in regions.items() if region.fd is None)
    return obstacle_to_send(regions) or (f"group {private} is in memory of its own" if private else "")


def obstacle_to_send(regions: PoolRegion) -> str:
    """Why these pools cannot be copied into those of peers; "" if they can."""
    if not regions or any(region.copies is None for region in regions.values()):
        return "the pools are not on a GPU"
    if any(region.memory is None for region in regions.values()):
        return "the GPU cannot share its memory (the log says why)"
    return ""


class CudaIpcReceiver(LocalReceiver):
    """ReceiverTransport over pools that live in exported memory of a GPU."""

    def __init__(self, regions: PoolRegion, rooms: RoomTable, bounds: Bounds) -> None:
        """Raises ConfigError when a pool is not in such memory."""
        _refuse(obstacle_to_receive(regions))
        super().__init__(BACKEND, {_DEVICE: _device(regions).uuid}, regions, rooms, bounds)


class CudaIpcSender(LocalSender):
    """SenderTransport that copies from this worker's GPU into the receiver's pool. What is on the host must
    be loaded first."""

    def __init__(self, regions: PoolRegion, bounds: Bounds) -> None:
        """Raises ConfigError when the pools are not on a GPU that can share memory."""
        _refuse(obstacle_to_send(regions))
        super().__init__(regions, bounds)
        self._device = _device(regions)
        self._obstacles: dict[str, str] = {}  # by the UUID of the other GPU
        self._kept: list[Mapped] = []  # copies into them may be under way for ever

    def obstacle(self, endpoint: TransferEndpoint) -> str:
        uuid = endpoint.params.get(_DEVICE, "")
        if uuid not in self._obstacles:
            self._obstacles[uuid] = self._barrier(uuid)
            if self._obstacles[uuid]:
                log.warning("cuda_ipc is not used towards GPU %s: %s", uuid, self._obstacles[uuid])
        return self._obstacles[uuid]

    def _barrier(self, uuid: str) -> str:
        try:
            return "" if self._device.reaches(uuid) else "this worker's GPU has no peer access to it"
        except DeviceError as error:
            return str(error)

    def _attach(self, peer: Peer, channel: Channel) -> None:
        try:
            super()._attach(peer, channel)
        except Unmappable as error:
            # The next hand-off takes the endpoint's next backend (select.py), not this one again.
            uuid = peer.endpoint.params.get(_DEVICE, "")
            self._obstacles[uuid] = str(error)
            log.warning("cuda_ipc is not used towards GPU %s from now on: %s", uuid, error)
            raise

    def _map(self, fd: int, nbytes: int) -> DeviceMapping:
        return self._device.open(fd, nbytes)

    def _detach(self, peer: Peer) -> None:
        for mapping in self._mappings.pop(peer, {}).values():
            if mapping not in self._kept:
                mapping.close()

    def _move(self, granted: GrantedWrite) -> None:
        """One copy for each run of neighbouring pages: a page has all layers, so it is large enough."""
        region, write, mapping = granted.region, granted.write, self._target(granted)
        assert region.copies is not None, "checked when this sender was made"
        size, runs = region.page_bytes, coalesce(write.src_pages, write.dst_pages)
        copies = zip(
            (mapping.ptr + runs.dst * size).tolist(),
            (region.ptr + runs.src * size).tolist(),
            (runs.length * size).tolist(),
            strict=True,
        )
        try:
            region.copies.put(functools.partial(self._device.copy, copies, region.copies.stream)).wait()
        except _FAILURES as error:
            self._settle(region.copies, mapping)
            raise TransferError(f"copying on the GPU failed: {error}") from None

    def _settle(self, copies: CopyQueue, mapping: Mapped) -> None:
        """After a failure: wait for what was queued all the same. Raises Uncertain if its end cannot be
        seen."""
        try:
            settle(copies)
        except Unsettled as error:
            self._kept.append(mapping)
            raise Uncertain(f"copying on the GPU failed: {error}") from None


def _refuse(obstacle: str) -> None:
    if obstacle:
        raise ConfigError("kv_transfer_backend", f"cuda_ipc does not work here: {obstacle}", "use auto")


def _device(regions: PoolRegion) -> DeviceMemory:
    memory = next(iter(regions.values())).memory
    assert memory is not None, "asked for an obstacle before"
    return memory
