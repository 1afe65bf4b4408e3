"""RoomTable: which pages of this worker's pools may be written, for which room and epoch, and by whom."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from common.errors import TransferError
from kvcache.page_runs import PageIds, as_pages
from kvtransfer.transport import NOTHING_LANDED, Fence, Landed

Key = tuple[int, int]


@dataclass(eq=False)
class Grant:
    """Permission for one writer to write `nbytes` into pages of one open room, until it is finished.

    `revoked` becomes true when the room is closed in between. A writer in this process then stops at once; a
    remote one must be waited for.
    """

    key: Key
    group: str
    pages: PageIds
    nbytes: int
    backend: str
    interrupt: Callable[[], None] | None = None
    revoked: bool = False
    since: float = field(default_factory=time.monotonic)


@dataclass
class _Room:
    pages: dict[str, PageIds]  # sorted
    landed: dict[str, NDArray[np.bool_]]
    nbytes: dict[str, int]
    backend: str = ""  # of the last write that landed
    grants: set[Grant] = field(default_factory=set)
    busy_since: float = 0.0  # when the first of `grants` was given
    busy_s: float = 0.0  # with at least one grant, before that
    fence: Fence | None = None  # set once closed


class RoomTable:
    """One per decode worker. All backends grant from the same table, so a room has one count and one fence.

    The owner's thread opens and closes rooms, the backends' threads begin and finish writes.

    A closed room is kept only while a grant of it is not finished. To a late writer its room is unknown, and
    the write is refused as if the room were closed.
    """

    def __init__(self) -> None:
        self._rooms: dict[Key, _Room] = {}
        self._lock = threading.Lock()

    def open(self, room: int, epoch: int, pages: Mapping[str, PageIds]) -> None:
        """Let these pages be written for this room and epoch, which must not be open already."""
        ordered = {group: np.sort(as_pages(ids)) for group, ids in pages.items()}
        landed = {group: np.zeros(len(ids), dtype=np.bool_) for group, ids in ordered.items()}
        with self._lock:
            assert (room, epoch) not in self._rooms, "a room is opened once per epoch"
            self._rooms[room, epoch] = _Room(ordered, landed, dict.fromkeys(ordered, 0))

    def begin(
        self,
        room: int,
        epoch: int,
        group: str,
        pages: PageIds,
        nbytes: int,
        backend: str,
        interrupt: Callable[[], None] | None = None,
    ) -> Grant:
        """Grant a write of these pages. Raises TransferError when they are not open. `interrupt` is called
        if the room is closed before the grant is finished; it must neither block nor call this table."""
        grant = Grant((room, epoch), group, pages, nbytes, backend, interrupt)
        with self._lock:
            known = self._rooms.get(grant.key)
            if known is None or known.fence is not None:
                raise TransferError(f"room {room} epoch {epoch} is not open here")
            opened = known.pages.get(group)
            if opened is None or not _contained(opened, pages):
                raise TransferError(f"room {room} epoch {epoch} has not opened these pages of group {group}")
            if not known.grants:
                known.busy_since = time.monotonic()
            known.grants.add(grant)
        return grant

    def finish(self, grant: Grant, landed: bool) -> None:
        """Nothing more will be written under this grant. `landed`: all of it was."""
        with self._lock:
            known = self._rooms[grant.key]
            known.grants.remove(grant)
            if not known.grants:
                known.busy_s += time.monotonic() - known.busy_since
            if landed:
                known.nbytes[grant.group] += grant.nbytes
                known.backend = grant.backend
                known.landed[grant.group][np.searchsorted(known.pages[grant.group], grant.pages)] = True
            if known.fence is not None and not known.grants:
                del self._rooms[grant.key]
                known.fence.pass_()

    def landed(self, room: int, epoch: int, expected: Mapping[str, PageIds] | None = None) -> Landed:
        """Progress of an open room; nothing for an unknown one. Missing are pages that are `expected`, by
        default all."""
        with self._lock:
            known = self._rooms.get((room, epoch))
            if known is None:
                return NOTHING_LANDED
            missing = {}
            for group, mask in known.landed.items():
                wanted = (
                    slice(None) if expected is None else np.searchsorted(known.pages[group], expected[group])
                )
                missing[group] = int(np.count_nonzero(~mask[wanted]))
            missing = {group: count for group, count in missing.items() if count}
            return Landed(known.nbytes.copy(), missing, known.backend, known.busy_s)

    def grants(self, room: int, epoch: int) -> list[Grant]:
        """The writes of a room that are granted and not finished."""
        with self._lock:
            known = self._rooms.get((room, epoch))
            return [] if known is None else list(known.grants)

    def close_room(self, room: int, epoch: int) -> Fence:
        """Refuse new writers. The fence passes when the last grant is finished; for an unknown room it has
        passed. May be called again."""
        with self._lock:
            known = self._rooms.get((room, epoch))
            if known is None:
                fence = Fence()
                fence.pass_()
                return fence
            if known.fence is None:
                known.fence = Fence()
            if not known.grants:
                del self._rooms[room, epoch]
                known.fence.pass_()
            for grant in known.grants:
                grant.revoked = True
                if grant.interrupt is not None:
                    grant.interrupt()  # under the lock: after `finish` the connection serves another room
            return known.fence


def _contained(opened: PageIds, pages: PageIds) -> bool:
    """Whether every page is among the opened (sorted) ones, and none comes twice."""
    if len(pages) == 0 or len(opened) == 0:
        return len(pages) == 0
    places = np.searchsorted(opened, pages)
    if int(places.max()) >= len(opened) or len(np.unique(places)) != len(places):
        return False
    return bool(np.array_equal(opened[places], pages))
