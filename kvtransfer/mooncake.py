"""mooncake: one-sided writes through Mooncake's TransferEngine: RDMA if there is a device, else its TCP.

The control protocol (grants) has a TCP connection of its own. Pages of `_DIRECT_BYTES` and more are written
from pool to pool; where they lie in several memories, part by part, if both sides have the same parts. Others
are gathered into a staging buffer, written to the receiver's as one block, and scattered there: because of
Mooncake's cost per entry, 32 KiB pages are half as fast as one block.

The fence. Staged: only this process stores into the pool, and it checks the room before each scatter. Direct:
the grant ends with the sender's `End`, sent after Mooncake has reported that everything was applied. When
that End does not come (the peer is gone, its write failed, or the room was closed and the peer is silent),
this side's engine is stopped. That ends every thread and connection that could still store something. A new
engine takes its place; other writes in progress fail and are tried again.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

import numpy as np

from common.errors import ConfigError, TransferError
from common.ports import ANY_PORT, Ports
from kvcache.page_runs import PageIds, coalesce, copy_pages
from kvtransfer.channel import GrantedWrite, PeerSender, Uncertain
from kvtransfer.frames import Begin, End, Ended, Granted, Pools, Staged
from kvtransfer.granting import GrantingReceiver
from kvtransfer.listener import hang_up
from kvtransfer.mooncake_engine import MooncakeEngine, has_rdma
from kvtransfer.region import NO_REGIONS, GroupRegion, PoolRegion
from kvtransfer.rooms import Grant, RoomTable
from kvtransfer.streams import Stream
from kvtransfer.tcp import connected_socket, listening_endpoint, listening_socket
from kvtransfer.transport import Bounds
from wire.messages.transfer import TransferEndpoint

__all__ = ["BACKEND", "MooncakeReceiver", "MooncakeSender", "has_rdma"]

log = logging.getLogger(__name__)

BACKEND = "mooncake"
_DIRECT_BYTES = 256 << 10
_MAX_SPOILED = 8  # staging buffers that a failed write may still change
_HALF_BYTES = 4 << 20  # a staging buffer is two halves: one is written while the other is scattered


class _Stage:
    """A registered staging buffer: two halves of `_HALF_BYTES`."""

    def __init__(self, engine: MooncakeEngine) -> None:
        self._memory = np.zeros(2 * _HALF_BYTES, dtype=np.uint8)
        self.ptr = self._memory.ctypes.data
        engine.register(self.ptr, self._memory.nbytes)


class _Stages:
    """Staging buffers of one engine, one per write in progress. A spoiled one, which a failed write may still
    change, is kept but not used again."""

    def __init__(self, engine: MooncakeEngine) -> None:
        self._engine = engine
        self._all: list[_Stage] = []
        self._free: list[_Stage] = []
        self._lock = threading.Lock()
        self.spoiled = 0

    def take(self) -> _Stage:
        """Raises TransferError when a new one is needed and cannot be registered."""
        with self._lock:
            if not self._free:
                try:
                    self._all.append(_Stage(self._engine))
                except ConfigError as error:
                    raise TransferError(f"no staging buffer: {error}") from None
                return self._all[-1]
            return self._free.pop()

    def give_back(self, stage: _Stage) -> None:
        with self._lock:
            self._free.append(stage)

    def spoil(self) -> None:
        """A buffer that was taken will not be given back."""
        with self._lock:
            self.spoiled += 1


class _Station:
    """A receiver's engine, and what ends with it."""

    def __init__(self, regions: PoolRegion, interface: str, progress_s: float) -> None:
        self.engine = MooncakeEngine(interface, progress_s)
        _register(self.engine, regions)
        self.stages = _Stages(self.engine)
        self.peers: set[socket.socket] = set()
        self.stopped = False


class MooncakeReceiver(GrantingReceiver[_Station]):
    """ReceiverTransport over Mooncake."""

    def __init__(
        self,
        regions: PoolRegion,
        rooms: RoomTable,
        bounds: Bounds,
        interface: str,
        encrypted: bool = False,
        ports: Ports = ANY_PORT,
    ) -> None:
        """`encrypted` and `ports` are of the control frames: Mooncake moves the bytes in the clear, and
        listens elsewhere (mooncake_engine.choose_ports). Raises ConfigError
        when Mooncake or the interface does not work here."""
        self._interface = interface
        self._lock = threading.Lock()  # guards the station: its engine is not stopped while it is used
        self._station = _Station(regions, interface, bounds.silence_s)
        sock = listening_socket(interface, ports)
        endpoint = listening_endpoint(BACKEND, sock, encrypted)
        endpoint.params["protocol"] = self._station.engine.protocol
        super().__init__(sock, endpoint, regions, rooms, bounds)

    def close(self) -> None:
        """Stop listening and the engine. After that no grant of this backend is unfinished."""
        super().close()
        with self._lock:
            self._halt()

    @contextmanager
    def _admit(self, stream: Stream) -> Iterator[_Station]:
        """The current engine, through which this peer writes."""
        with self._lock:
            if self._station.stopped:
                if self._listener.closing.is_set():
                    raise TransferError("the receiver is closing")
                try:
                    self._station = _Station(self._regions, self._interface, self._bounds.silence_s)
                except ConfigError as error:
                    raise TransferError(f"Mooncake does not start again: {error}") from None
            station = self._station
            station.peers.add(stream.sock)
        try:
            yield station
        finally:
            with self._lock:
                station.peers.discard(stream.sock)

    def _addresses(self, region: GroupRegion) -> tuple[int, ...]:
        return tuple(part.ptr for part in region.parts) if _is_large(region) else ()

    def _send_pools(self, stream: Stream, session: _Station) -> None:
        stream.send(Pools(self._infos(), session=session.engine.session))

    def _interrupt(self, stream: Stream, begin: Begin) -> Callable[[], None] | None:
        return None if self._goes_direct(begin) else lambda: hang_up(stream.sock)

    def _goes_direct(self, begin: Begin) -> bool:
        return begin.direct and _is_large(self._regions[begin.group])

    def _see_through(self, stream: Stream, session: _Station, begin: Begin, grant: Grant) -> None:
        if self._goes_direct(begin):
            self._see_direct(stream, session, grant)
        else:
            self._see_staged(stream, session, grant)

    def _see_direct(self, stream: Stream, station: _Station, grant: Grant) -> None:
        landed = False
        try:
            with suppress(TransferError):  # a peer that has given up has sent its End before
                stream.send(Granted())
            end = self._await_end(stream, grant)
            landed = end.landed
            if not end.certain:
                raise TransferError("the peer's write failed")
        except TransferError:
            self._stop(station)
            raise
        finally:
            self._rooms.finish(grant, landed=landed)
        stream.send(Ended())

    def _await_end(self, stream: Stream, grant: Grant) -> End:
        """Wait for the sender's End. Raises TransferError when it does not come within `write_s`, or within
        `silence_s` after the room was closed."""
        poller = select.poll()
        poller.register(stream.sock, select.POLLIN)
        deadline = time.monotonic() + self._bounds.write_s
        while not poller.poll(100):
            if grant.revoked:
                deadline = min(deadline, time.monotonic() + self._bounds.silence_s)
            if time.monotonic() > deadline:
                raise TransferError("the peer does not say that its write is over")
        end = stream.receive()
        if not isinstance(end, End):
            raise TransferError("expected an End")
        return end

    def _see_staged(self, stream: Stream, station: _Station, grant: Grant) -> None:
        with self._storing(grant), self._lock:
            if station.stopped:
                raise TransferError("Mooncake was restarted")
            stage = station.stages.take()
        landed = False
        try:
            with self._storing(grant):
                stream.send(Granted(stage=stage.ptr))
                landed = self._scatter_all(stream, stage, grant)
            self._rooms.finish(grant, landed=landed)
        finally:
            if landed:
                station.stages.give_back(stage)  # no write to it is in progress
            else:
                self._spoil(station)
        if not landed:
            raise TransferError("the peer's write failed")
        stream.send(Ended())

    def _spoil(self, station: _Station) -> None:
        """A failed write may still change a staging buffer. After too many of those, restart the engine."""
        station.stages.spoil()
        if station.stages.spoiled >= _MAX_SPOILED:
            self._stop(station)

    def _scatter_all(self, stream: Stream, stage: _Stage, grant: Grant) -> bool:
        """Copy what arrives in the staging buffer to its pages. Whether all of it arrived."""
        region, done = self._regions[grant.group], 0
        while isinstance(frame := stream.receive(), Staged):
            end = done + frame.count
            if frame.half not in (0, 1) or not done < end <= len(grant.pages):
                raise TransferError("the peer staged pages that it did not announce")
            if frame.count * region.page_bytes > _HALF_BYTES:
                raise TransferError("the peer staged more than the buffer holds")
            if grant.revoked:
                raise TransferError("the room was closed during a write")
            source, at = stage.ptr + frame.half * _HALF_BYTES, 0
            with closing(region.from_host(grant.pages[done:end])) as batches:
                for host in batches:
                    count = len(host.pages)
                    copy_pages(source, np.arange(at, at + count), host.ptr, host.pages, region.page_bytes)
                    at += count
            done = end
            stream.send(Ended())
        return isinstance(frame, End) and frame.landed and done == len(grant.pages)

    def _stop(self, station: _Station) -> None:
        """Stop the engine: nothing that was written through this station can land after that. Idempotent."""
        with self._lock:
            if not station.stopped:
                log.warning("stopping Mooncake's engine: a write in progress cannot be waited for")
                self._halt()

    def _halt(self) -> None:
        """Stop the current station's engine. The caller holds the lock."""
        self._station.stopped = True
        self._station.engine.close()
        for sock in self._station.peers:
            hang_up(sock)


class MooncakeSender(PeerSender):
    """SenderTransport over Mooncake."""

    def __init__(
        self, regions: PoolRegion, bounds: Bounds, interface: str, arenas: PoolRegion = NO_REGIONS
    ) -> None:
        """Raises ConfigError when Mooncake or the interface does not work here."""
        super().__init__(regions, bounds, arenas)
        self._engine = MooncakeEngine(interface, bounds.silence_s)
        if self._engine.protocol == "rdma":  # over TCP, Mooncake reads a source that is not registered
            _register(self._engine, regions)
            _register(self._engine, arenas)
        self._stages = _Stages(self._engine)

    def close(self) -> None:
        """Drain every peer. The engine stops with the last write in progress."""
        super().close()
        self._engine.close()

    def _connect(self, endpoint: TransferEndpoint) -> socket.socket:
        theirs = endpoint.params.get("protocol")
        if theirs != self._engine.protocol:
            raise TransferError(f"Mooncake speaks {self._engine.protocol} here and {theirs} there")
        return connected_socket(endpoint.address, self._bounds)

    def _move(self, granted: GrantedWrite) -> None:
        theirs = granted.channel.pools.groups[granted.write.group]
        if theirs.takes_directly(granted.region.page_parts):
            self._move_direct(granted)
        else:
            self._move_staged(granted)

    def _move_direct(self, granted: GrantedWrite) -> None:
        write = granted.write
        theirs = granted.channel.pools.groups[write.group].ptrs
        runs = coalesce(write.src_pages, write.dst_pages)
        sources: list[int] = []
        targets: list[int] = []
        lengths: list[int] = []
        for part, target in zip(granted.region.parts, theirs, strict=True):
            sources += (part.ptr + runs.src * part.page_bytes).tolist()
            targets += (target + runs.dst * part.page_bytes).tolist()
            lengths += (runs.length * part.page_bytes).tolist()
        try:
            self._engine.write(granted.channel.pools.session, sources, targets, lengths)
        except TransferError as error:
            raise Uncertain(str(error)) from None

    def _move_staged(self, granted: GrantedWrite) -> None:
        region, pages, channel = granted.region, granted.write.src_pages, granted.channel
        per_half = _HALF_BYTES // region.page_bytes
        stage = self._stages.take()
        half = unconfirmed = 0
        try:
            for first in range(0, len(pages), per_half):
                if unconfirmed == 2:  # the half to be written next is still being scattered
                    channel.expect_ended()
                    unconfirmed -= 1
                batch = pages[first : first + per_half]
                self._write_half(granted, stage, half * _HALF_BYTES, batch)
                channel.stream.send(Staged(len(batch), half))
                half, unconfirmed = 1 - half, unconfirmed + 1
            for _ in range(unconfirmed):
                channel.expect_ended()
        except Uncertain:
            self._stages.spoil()
            raise TransferError("Mooncake's write into the staging buffer failed") from None
        except TransferError:
            self._stages.give_back(stage)
            raise
        self._stages.give_back(stage)

    def _write_half(self, granted: GrantedWrite, stage: _Stage, offset: int, pages: PageIds) -> None:
        """Gather these pages in one half of this side's staging buffer and write it to the receiver's. Raises
        Uncertain: the engine may still be reading the buffer."""
        region, at = granted.region, 0
        with closing(region.to_host(pages)) as batches:
            for host in batches:
                target = np.arange(at, at + len(host.pages))
                copy_pages(host.ptr, host.pages, stage.ptr + offset, target, region.page_bytes)
                at += len(host.pages)
        session, theirs = granted.channel.pools.session, granted.grant.stage + offset
        try:
            self._engine.write(session, [stage.ptr + offset], [theirs], [at * region.page_bytes])
        except TransferError as error:
            raise Uncertain(str(error)) from None


def _register(engine: MooncakeEngine, regions: PoolRegion) -> None:
    """Let the engine at the pools that it moves pages from or to itself. The pages of the others go through
    staging buffers, so no peer of the engine can reach them."""
    for region in regions.values():
        if _is_large(region):
            for part in region.parts:
                engine.register(part.ptr, part.nbytes)


def _is_large(region: GroupRegion) -> bool:
    """Whether pages, or the parts of them, are worth an entry each."""
    return region.parts[0].page_bytes >= _DIRECT_BYTES
