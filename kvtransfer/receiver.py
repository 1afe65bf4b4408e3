"""The decode side of a hand-off: PoolReceiver (one per worker) and KVReceiver (one per room and epoch)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from common.errors import PageDiffers, TransferError
from kvcache.page_runs import PageIds, as_pages
from kvtransfer.checksum import checksums, samples
from kvtransfer.region import PoolRegion, check_pages
from kvtransfer.rooms import Grant, RoomTable
from kvtransfer.transport import Fence, Landed, ReceiverTransport
from wire.checksums import ChecksumMode
from wire.messages.transfer import GroupTarget, KVDone, TransferEndpoint


class PoolReceiver:
    """This worker's pools, open to writers over one or more backends. See `select.open_receiver`."""

    def __init__(
        self, regions: PoolRegion, rooms: RoomTable, transports: Sequence[ReceiverTransport]
    ) -> None:
        """Owns the transports, best first, all granting from `rooms`."""
        self.regions = regions
        self._rooms = rooms
        self._transports = transports

    @property
    def endpoints(self) -> list[TransferEndpoint]:
        """Every way into the pools, best first. They may change: read them anew for each KVTarget."""
        return [transport.endpoint for transport in self._transports]

    @property
    def backends(self) -> tuple[str, ...]:
        """Their names, for the worker record."""
        return tuple(endpoint.backend for endpoint in self.endpoints)

    def open(self, room: int, epoch: int, pages: Mapping[str, PageIds]) -> None:
        """Let every peer that has an endpoint write these pages, for this room and epoch."""
        for group, ids in pages.items():
            assert check_pages(self.regions[group], ids), f"pages outside the pool of group {group}"
        self._rooms.open(room, epoch, pages)

    def landed(self, room: int, epoch: int, expected: Mapping[str, PageIds] | None = None) -> Landed:
        """Progress of an open room. Missing are pages that are `expected`, by default all of its pages."""
        return self._rooms.landed(room, epoch, expected)

    def grants(self, room: int, epoch: int) -> list[Grant]:
        """The writes of a room that are granted and not finished."""
        return self._rooms.grants(room, epoch)

    def close_room(self, room: int, epoch: int) -> Fence:
        """Grant no new write of this room and epoch. The fence passes when no write is in progress."""
        return self._rooms.close_room(room, epoch)

    def close(self) -> None:
        """Close every transport."""
        for transport in self._transports:
            transport.close()


class KVReceiver:
    """One room in one epoch: pages that a sender fills, until `commit` or `abort`. Owner's thread only."""

    def __init__(
        self,
        pool: PoolReceiver,
        room: int,
        epoch: int,
        context_tokens: int,
        groups: Mapping[str, GroupTarget],
    ) -> None:
        """Open the pages of a KVTarget. They are to hold `context_tokens` tokens, prompt and forced."""
        self.room = room
        self.epoch = epoch
        self.context_tokens = context_tokens
        self._pool = pool
        self._pages = {name: as_pages(target.page_ids) for name, target in groups.items()}
        self._committed = False
        self._final: Landed | None = None  # set by commit and abort
        self.opened_at = time.monotonic()
        pool.open(room, epoch, self._pages)

    @property
    def grants(self) -> list[Grant]:
        """Writes that are in progress."""
        return self._pool.grants(self.room, self.epoch)

    @property
    def landed(self) -> Landed:
        """Bytes that have arrived, and over which backend; final after commit or abort."""
        return self._pool.landed(self.room, self.epoch) if self._final is None else self._final

    def commit(
        self,
        done: KVDone,
        wanted: ChecksumMode = ChecksumMode.NONE,
        expected: Mapping[str, PageIds] | None = None,
    ) -> int:
        """The sender says that every page has landed: check that, close the room, return the bytes.

        `expected`: by group, those of the target's pages that the context fills, which are neighbours there;
        by default all. The message must carry the `wanted` checksums, or more. All that it carries are
        compared, on this thread. Raises TransferError when the message is of another room or epoch (then
        nothing has changed), or when something is missing, and PageDiffers when a page is not what was sent
        (then the caller must `abort`).
        """
        if (done.room, done.epoch) != (self.room, self.epoch):
            raise TransferError(
                f"metadata of room {done.room} epoch {done.epoch} for room {self.room} epoch {self.epoch}"
            )
        if self._committed:
            return self.landed.total  # a repeat
        if self._final is not None:
            raise TransferError(f"room {self.room} epoch {self.epoch} takes no pages: it was aborted")
        pages = {group: expected[group] for group in self._pages} if expected is not None else self._pages
        landed = self._pool.landed(self.room, self.epoch, pages)
        problem = self._problem(done, landed, wanted)
        if problem is not None:
            raise TransferError(f"room {self.room} epoch {self.epoch}: {problem}")
        problem = self._difference(done, pages)
        if problem is not None:
            raise PageDiffers(f"room {self.room} epoch {self.epoch}: {problem}")
        self._final = landed
        self._committed = True
        return landed.total

    def abort(self) -> Fence:
        """Take nothing more. The pages may be reused once the fence has passed. May be called again."""
        self._final = self.landed
        return self._pool.close_room(self.room, self.epoch)

    def _problem(self, done: KVDone, landed: Landed, wanted: ChecksumMode) -> str | None:
        expected = self.context_tokens + len(done.output)
        if done.context_tokens != expected:
            return f"{done.context_tokens} tokens were computed where {expected} are expected"
        if landed.missing or landed.total != done.kv_bytes:
            missing = ", ".join(f"{count} of group {group}" for group, count in landed.missing.items())
            return f"missing pages: {missing or 'none'}; {landed.total} of {done.kv_bytes} bytes arrived"
        if done.checksums.mode.stricter(wanted) is not done.checksums.mode:
            return f"kv_checksums is {wanted} here, and the sender's checksums are {done.checksums.mode}"
        if not self._pool.close_room(self.room, self.epoch).passed:
            return "a peer is still writing to its pages"
        return None

    def _difference(self, done: KVDone, expected: Mapping[str, PageIds]) -> str | None:
        """Which page is not what was sent, as far as the message's checksums say."""
        for group, pages in self._pages.items():
            region, sent_pages = self._pool.regions[group], expected[group]
            first = int(np.flatnonzero(pages == sent_pages[0])[0]) if len(sent_pages) else 0
            covered = [
                sample
                for sample in samples(
                    done.checksums.mode, self.room, self.epoch, len(pages), region.page_bytes
                )
                if first <= sample.page < first + len(sent_pages)
            ]
            theirs = done.checksums.sums.get(group, [])
            if len(theirs) != len(covered):
                return f"{len(theirs)} checksums of group {group} came where {len(covered)} are expected"
            for sample, sent, here in zip(covered, theirs, checksums(region, pages, covered), strict=True):
                if sent != here:
                    return f"page {sample.page} of group {group} differs from what was sent"
        return None
