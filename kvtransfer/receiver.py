"""The decode side of a hand-off: PoolReceiver (one per worker) and KVReceiver (one per room and epoch)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common.errors import TransferError
from kvtransfer.checksum import page_checksums
from kvtransfer.pages import PageIds, as_pages
from kvtransfer.poll import KVPoll
from kvtransfer.region import PoolRegion, check_pages
from kvtransfer.rooms import RoomTable
from kvtransfer.transport import NOTHING_LANDED, Fence, Landed, ReceiverTransport
from wire.messages import GroupTarget, KVDone, TransferEndpoint


class PoolReceiver:
    """This worker's pools, open to writers over one or more backends. `kvtransfer.select.open_receiver`
    builds it."""

    def __init__(
        self, regions: PoolRegion, rooms: RoomTable, transports: Sequence[ReceiverTransport]
    ) -> None:
        """Owns the transports, best first, all granting from `rooms`."""
        self.regions = regions
        self._rooms = rooms
        self._transports = transports

    @property
    def endpoints(self) -> list[TransferEndpoint]:
        """Every way in, best first (KVTarget.endpoints). May change; ask for each target."""
        return [transport.endpoint for transport in self._transports]

    @property
    def backends(self) -> tuple[str, ...]:
        """Their names, for the worker record."""
        return tuple(endpoint.backend for endpoint in self.endpoints)

    def open(self, room: int, epoch: int, pages: Mapping[str, PageIds]) -> None:
        """From now on these pages may be written for this room and epoch, by whoever has an endpoint."""
        for group, ids in pages.items():
            assert check_pages(self.regions[group], ids), f"pages outside the pool of group {group}"
        self._rooms.open(room, epoch, pages)

    def landed(self, room: int, epoch: int) -> Landed:
        """Progress of an open room."""
        return self._rooms.landed(room, epoch)

    def close_room(self, room: int, epoch: int) -> Fence:
        """No new write of this room and epoch begins; the fence tells when none is in progress either."""
        return self._rooms.close_room(room, epoch)

    def close(self) -> None:
        """Close every transport."""
        for transport in self._transports:
            transport.close()


class KVReceiver:
    """One room in one epoch: reserved pages that fill up until `commit` or `abort`. Owner's thread only."""

    def __init__(self, pool: PoolReceiver, room: int, epoch: int, context_tokens: int) -> None:
        """`context_tokens` is how many tokens (prompt and forced) the pages are to hold."""
        self.room = room
        self.epoch = epoch
        self.context_tokens = context_tokens
        self._pool = pool
        self._pages: dict[str, PageIds] = {}
        self._state = KVPoll.BOOTSTRAPPING
        self._final = NOTHING_LANDED

    def pre_alloc(self, groups: Mapping[str, GroupTarget]) -> None:
        """Open the pages of a KVTarget that is about to be sent."""
        assert self._state is KVPoll.BOOTSTRAPPING, "a receiver is opened once"
        self._pages = {name: as_pages(target.page_ids) for name, target in groups.items()}
        self._pool.open(self.room, self.epoch, self._pages)
        self._state = KVPoll.WAITING_FOR_INPUT

    def poll(self) -> KVPoll:
        """Where it stands."""
        if self._state is KVPoll.WAITING_FOR_INPUT and self.landed.total:
            self._state = KVPoll.TRANSFERRING
        return self._state

    @property
    def landed(self) -> Landed:
        """Bytes that have arrived, and over which backend; final after commit or abort."""
        if self._state in (KVPoll.WAITING_FOR_INPUT, KVPoll.TRANSFERRING):
            return self._pool.landed(self.room, self.epoch)
        return self._final

    def commit(self, done: KVDone, verify: bool = False) -> int:
        """The sender says that all is there: check it, close the room, return the bytes.

        With `verify` the message must carry checksums and they are compared, on this thread. Raises
        TransferError when the message is of another room or epoch (nothing changes: it is not for us) or
        when something is missing or different (`abort` is what remains to be done).
        """
        if (done.room, done.epoch) != (self.room, self.epoch):
            raise TransferError(
                f"metadata of room {done.room} epoch {done.epoch} for room {self.room} epoch {self.epoch}"
            )
        if self._state is KVPoll.SUCCESS:
            return self._final.total  # a repeat
        if self.poll() not in (KVPoll.WAITING_FOR_INPUT, KVPoll.TRANSFERRING):
            raise TransferError(f"room {self.room} epoch {self.epoch} takes no pages: {self._state.name}")
        landed = self.landed
        problem = self._problem(done, landed, verify)
        if problem is not None:
            raise TransferError(f"room {self.room} epoch {self.epoch}: {problem}")
        self._final = landed
        self._state = KVPoll.SUCCESS
        return landed.total

    def abort(self) -> Fence:
        """Take nothing more. The pages may be given away once the fence has passed; may be called again."""
        if self._state is not KVPoll.SUCCESS:
            self._final = self.landed
            self._state = KVPoll.FAILED
        return self._pool.close_room(self.room, self.epoch)

    def _problem(self, done: KVDone, landed: Landed, verify: bool) -> str | None:
        if done.context_tokens != self.context_tokens:
            return f"{done.context_tokens} tokens were computed where {self.context_tokens} are expected"
        if landed.missing or landed.total != done.kv_bytes:
            missing = ", ".join(f"{count} of group {group}" for group, count in landed.missing.items())
            return f"missing pages: {missing or 'none'}; {landed.total} of {done.kv_bytes} bytes arrived"
        if not self._pool.close_room(self.room, self.epoch).passed:
            return "somebody is still writing to its pages"
        if verify:
            for group, pages in self._pages.items():
                if done.checksums.get(group) != page_checksums(self._pool.regions[group], pages):
                    return f"the checksums of group {group} differ"
        return None
