"""GrantingReceiver: the receiver's side of the control protocol, the base of every backend's receiver."""

from __future__ import annotations

import logging
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Generic, TypeVar

import numpy as np

from common.errors import TransferError
from kvtransfer.copies import Unsettled
from kvtransfer.frames import Begin, End, Frame, PoolInfo, Pools, Refused, Silent
from kvtransfer.listener import Listener
from kvtransfer.region import GroupRegion, PoolRegion
from kvtransfer.rooms import Grant, RoomTable
from kvtransfer.streams import Stream
from kvtransfer.transport import Bounds
from wire.messages.transfer import TransferEndpoint

log = logging.getLogger(__name__)

Session = TypeVar("Session")


class GrantingReceiver(ABC, Generic[Session]):
    """A ReceiverTransport behind a listening stream socket: authenticates peers and grants writes.

    A backend implements `_see_through`: how it finds out that a granted write is over.
    """

    def __init__(
        self,
        sock: socket.socket,
        endpoint: TransferEndpoint,
        regions: PoolRegion,
        rooms: RoomTable,
        bounds: Bounds,
    ) -> None:
        """`sock` is bound. Peers reach it at `endpoint`, to which this adds the token."""
        self._regions = regions
        self._rooms = rooms
        self._bounds = bounds
        params = {**endpoint.params, "token": secrets.token_hex(16)}
        self._endpoint = TransferEndpoint(endpoint.backend, endpoint.address, params)
        self._listener = Listener(sock, self._endpoint, bounds, self._serve)
        self._listener.start()

    @abstractmethod
    def _admit(self, stream: Stream) -> AbstractContextManager[Session]:
        """Around an authenticated peer's connection, opened before it may write: the backend's own state."""

    @abstractmethod
    def _see_through(self, stream: Stream, session: Session, begin: Begin, grant: Grant) -> None:
        """Answer `begin` with Granted, and finish the grant when nothing can be written under it any more: at
        once after an End, otherwise when that is certain. Raises TransferError to drop the peer."""

    @contextmanager
    def _storing(self, grant: Grant) -> Iterator[None]:
        """Around what this process itself stores under a grant. If that fails, the grant is finished, unless
        something may still land: then its pages stay out of use as long as this process lives."""
        try:
            yield
        except Unsettled as error:
            log.error("pages of room %d are not used again: %s", grant.key[0], error)
            raise
        except BaseException:
            self._rooms.finish(grant, landed=False)
            raise

    def _send_pools(self, stream: Stream, session: Session) -> None:  # noqa: ARG002 - for overriders
        stream.send(Pools(self._infos()))

    def _addresses(self, region: GroupRegion) -> tuple[int, ...]:  # noqa: ARG002 - for overriders
        """Where senders of this backend write to, of each part; none if they need no address of this
        process."""
        return ()

    def _interrupt(self, stream: Stream, begin: Begin) -> Callable[[], None] | None:  # noqa: ARG002
        """A callback that stops a granted write when its room is closed; None if nothing can stop it."""
        return None

    @property
    def endpoint(self) -> TransferEndpoint:
        return self._endpoint

    def close(self) -> None:
        self._listener.close()

    def _infos(self) -> dict[str, PoolInfo]:
        return {
            name: PoolInfo(
                region.page_bytes,
                region.num_pages,
                self._addresses(region),
                region.page_parts.ranges,
                region.page_parts.copies,
            )
            for name, region in self._regions.items()
        }

    def _serve(self, stream: Stream) -> None:
        with self._admit(stream) as session:
            self._send_pools(stream, session)
            frame = self._next_frame(stream)  # not idle: it has come to write
            while frame is not None:
                self._serve_one(stream, session, frame)
                with self._listener.idle(stream):
                    frame = self._next_frame(stream)

    def _next_frame(self, stream: Stream) -> Frame | None:
        """Wait for the next write, however long the peer is silent. None: the receiver is closing."""
        while not self._listener.closing.is_set():
            with suppress(Silent):
                return stream.receive()
        return None

    def _serve_one(self, stream: Stream, session: Session, frame: Frame) -> None:
        """Handle one whole write."""
        if isinstance(frame, End):
            return  # its sender had given up on the write before it was refused
        if not isinstance(frame, Begin):
            raise TransferError("expected a Begin")
        try:
            grant = self._begin(stream, frame)
        except TransferError as error:
            stream.send(Refused(str(error)))
            return
        self._see_through(stream, session, frame, grant)

    def _begin(self, stream: Stream, frame: Begin) -> Grant:
        region = self._regions.get(frame.group)
        if region is None or len(frame.pages) % 8:
            raise TransferError(f"there are no such pages of a group {frame.group} here")
        pages = np.frombuffer(frame.pages, dtype="<i8").astype(np.int64)
        nbytes = len(pages) * region.page_bytes
        backend, interrupt = self._endpoint.backend, self._interrupt(stream, frame)
        return self._rooms.begin(frame.room, frame.epoch, frame.group, pages, nbytes, backend, interrupt)
