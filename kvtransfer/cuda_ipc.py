"""cuda_ipc: the decode worker's pool is memory of GPUs that prefill workers on the same host map and copy
into, from their own pools: on one GPU, or from one to another over NVLink or PCIe. No page goes through host
memory. Where a worker has several GPUs, each has a part of every page, and the other side may have as many
parts or not (kvcache/page_parts.py).

Who is let in, and when a write is over: local.py. A write's copies are queued on the sender's stream for
copies, when the forward that computed the pages is complete (the shipper waits for it), and its `End` leaves
when the event behind them has passed. Decode launches the forwards that read the pages after that.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence

from common.errors import ConfigError, TransferError
from kvcache.device_memory import DeviceError, DeviceMapping, DeviceMemory
from kvcache.page_parts import RowsCopy, pieces
from kvcache.page_runs import coalesce
from kvtransfer.channel import Channel, GrantedWrite, Peer, Uncertain
from kvtransfer.copies import CopyQueue, Unsettled, settle
from kvtransfer.frames import PoolInfo
from kvtransfer.local import LocalReceiver, LocalSender, MappedPool, Unmappable
from kvtransfer.region import GroupRegion, PoolRegion
from kvtransfer.rooms import RoomTable
from kvtransfer.transport import Bounds
from wire.messages.transfer import TransferEndpoint

log = logging.getLogger(__name__)

BACKEND = "cuda_ipc"
_FAILURES = (DeviceError, RuntimeError, TransferError)  # of the driver, of torch's streams and events, late
_DEVICE = "device"  # parameter of the endpoint: UUIDs of the GPUs that have the pools, with commas


def obstacle_to_receive(regions: PoolRegion) -> str:
    """Why peers cannot copy into these pools; "" if they can."""
    private = ", ".join(
        group for group, region in regions.items() if any(part.fd is None for part in region.parts)
    )
    return obstacle_to_send(regions) or (f"group {private} is in memory of its own" if private else "")


def obstacle_to_send(regions: PoolRegion) -> str:
    """Why these pools cannot be copied into those of peers; "" if they can."""
    parts = [part for region in regions.values() for part in region.parts]
    if not parts or any(part.copies is None for part in parts):
        return "the pools are not on a GPU"
    if any(part.memory is None for part in parts):
        return "the GPU cannot share its memory (the log says why)"
    return ""


class CudaIpcReceiver(LocalReceiver):
    """ReceiverTransport over pools that live in exported memory of GPUs."""

    def __init__(self, regions: PoolRegion, rooms: RoomTable, bounds: Bounds) -> None:
        """Raises ConfigError when a pool is not in such memory."""
        _refuse(obstacle_to_receive(regions))
        uuids = ",".join(gpu.uuid for gpu in _gpus(regions))
        super().__init__(BACKEND, {_DEVICE: uuids}, regions, rooms, bounds)


class CudaIpcSender(LocalSender):
    """SenderTransport that copies from this worker's GPUs into the receiver's pool. What is on the host must
    be loaded first."""

    def __init__(self, regions: PoolRegion, bounds: Bounds) -> None:
        """Raises ConfigError when the pools are not on a GPU that can share memory."""
        _refuse(obstacle_to_send(regions))
        super().__init__(regions, bounds)
        self._gpus = _gpus(regions)
        self._obstacles: dict[str, str] = {}  # by the UUIDs of the other side's GPUs
        self._kept: list[MappedPool] = []  # copies into them may be under way for ever

    def obstacle(self, endpoint: TransferEndpoint) -> str:
        uuids = endpoint.params.get(_DEVICE, "")
        if uuids not in self._obstacles:
            self._obstacles[uuids] = self._barrier(uuids.split(","))
            if self._obstacles[uuids]:
                log.warning("cuda_ipc is not used towards GPU %s: %s", uuids, self._obstacles[uuids])
        return self._obstacles[uuids]

    def _barrier(self, uuids: Sequence[str]) -> str:
        """Any of these GPUs may get something from any of this worker's."""
        try:
            reached = all(gpu.reaches(uuid) for gpu in self._gpus for uuid in uuids)
        except DeviceError as error:
            return str(error)
        return "" if reached else "this worker's GPU has no peer access to it"

    def _attach(self, peer: Peer, channel: Channel) -> None:
        try:
            super()._attach(peer, channel)
        except Unmappable as error:
            # The next hand-off takes the endpoint's next backend (select.py), not this one again.
            uuids = peer.endpoint.params.get(_DEVICE, "")
            self._obstacles[uuids] = str(error)
            log.warning("cuda_ipc is not used towards GPU %s from now on: %s", uuids, error)
            raise

    def _map(self, region: GroupRegion, info: PoolInfo, fds: Sequence[int]) -> Iterator[DeviceMapping]:
        """For each piece the part that it goes to, on the GPU that it comes from."""
        theirs = info.page_parts(region.page_parts)
        nbytes = theirs.part_bytes(info.page_bytes) * info.num_pages
        for piece in pieces(info.page_bytes, region.page_parts, theirs):
            yield _gpu(region.parts[piece.source]).open(fds[piece.target], nbytes)

    def _detach(self, peer: Peer) -> None:
        for pool in self._mappings.pop(peer, {}).values():
            if pool not in self._kept:
                for memory in pool.memories:
                    memory.close()

    def _move(self, granted: GrantedWrite) -> None:
        """One copy for each piece and run of neighbouring pages: a page has all layers, so it is large
        enough. A GPU's copies are queued there."""
        pool = self._target(granted)
        try:
            queued = [
                copies.put(functools.partial(gpu.copy, wanted, copies.stream))
                for gpu, copies, wanted in self._copies(granted, pool)
            ]
            for copied in queued:
                copied.wait()
        except _FAILURES as error:
            self._settle(granted.region, pool)
            raise TransferError(f"copying on the GPU failed: {error}") from None

    def _copies(
        self, granted: GrantedWrite, pool: MappedPool
    ) -> Iterator[tuple[DeviceMemory, CopyQueue, list[RowsCopy]]]:
        """Of each piece: where it comes from, and what is to be copied there."""
        region, write = granted.region, granted.write
        columns = (column.tolist() for column in coalesce(write.src_pages, write.dst_pages))
        runs = list(zip(*columns, strict=True))
        theirs = pool.info.page_parts(region.page_parts)
        both = pieces(region.page_bytes, region.page_parts, theirs)
        for piece, memory in zip(both, pool.memories, strict=True):
            part = region.parts[piece.source]
            assert part.copies is not None, "checked when this sender was made"
            copies = [
                copy
                for src, dst, length in runs
                for copy in piece.copies(part.ptr, src, memory.ptr, dst, length)
            ]
            yield _gpu(part), part.copies, copies

    def _settle(self, region: GroupRegion, pool: MappedPool) -> None:
        """After a failure: wait for what was queued all the same. Raises Uncertain if its end cannot be
        seen."""
        try:
            for part in region.parts:
                assert part.copies is not None, "checked when this sender was made"
                settle(part.copies)
        except Unsettled as error:
            self._kept.append(pool)
            raise Uncertain(f"copying on the GPU failed: {error}") from None


def _refuse(obstacle: str) -> None:
    if obstacle:
        raise ConfigError("kv_transfer_backend", f"cuda_ipc does not work here: {obstacle}", "use auto")


def _gpus(regions: PoolRegion) -> tuple[DeviceMemory, ...]:
    """Each GPU once. All groups lie on the same."""
    return tuple(_gpu(part) for part in next(iter(regions.values())).parts)


def _gpu(part: GroupRegion) -> DeviceMemory:
    assert part.memory is not None, "asked for an obstacle before"
    return part.memory
