"""Assignments: the version of its model that each request runs on (docs/decisions/0037-versions.md).

A request gets a version when it is submitted. With its first token the version is fixed: another version
would contradict what the client has. Until then its rooms go to another version if theirs has no decode
worker. Afterwards they wait for a worker of theirs; while another version serves, at most `version_wait_s`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256

from common.errors import Unavailable
from router.index.global_index import as_hashes
from router.options import RoomOptions
from router.placement.models import ModelVersions
from router.placement.policy import PlacementRequest
from router.placement.version import ModelVersion
from router.streams.generation import Submission
from router.streams.stream import RoomStream
from wire.codec import pack_tokens

_OPENING_TOKENS = 256
_NO_HASHES = as_hashes([])


class Assignment:
    """One request's version. Its rooms share it."""

    def __init__(self, model: ModelVersions, version: ModelVersion, key: bytes = b"") -> None:
        """`key` decides which version, when there is a choice."""
        self.model = model
        self.version = version
        self.key = key
        self.fixed = False  # the request has output
        self.continues = False  # a part of the request was answered: the rest is not refused any more
        self.rooms: set[int] = set()  # that are not over
        self.admission = version.admission  # also if the version changes: a room has its turn once
        self._page_tokens = version.placer.page_tokens  # of which its prompts' hashes are

    def fix(self) -> None:
        """The request has output. Repeats change nothing."""
        if not self.fixed:
            self.fixed = True
            self.version.streams += 1
            self.version.health.note(True)

    def next_part(self) -> Assignment:
        """For further rooms of the request when these are over. Submit at once after it.

        Raises Unavailable when the version is not known any more.
        """
        if self.version not in self.model.all:
            raise version_gone(self.model.name)
        following = Assignment(self.model, self.version, self.key)
        following.fixed = following.continues = True
        return following

    @property
    def is_outlived(self) -> bool:
        """Whether another version serves and this one does not."""
        return not self.version.serving and self.model.another_serves(self.version)

    @property
    def _is_held_back(self) -> bool:
        return self.version.held_back and self.model.another_serves(self.version)

    def renew(self, rooms: Mapping[int, RoomStream]) -> None:
        """Go to a version that serves, if this one does not, the request has no output, and none of its
        `rooms` has workers."""
        version = self.version
        if self.fixed or not (self.is_outlived or self._is_held_back):
            return
        if all(rooms[number].epoch is None for number in self.rooms if number in rooms):
            self.version = self.model.choose(self.key)
            version.rooms -= len(self.rooms)
            self.version.rooms += len(self.rooms)

    def adapted(self, request: PlacementRequest) -> PlacementRequest:
        """What the version's policy is told: a version with other pages knows nothing of the hashes."""
        if self._page_tokens == self.version.placer.page_tokens:
            return request
        return request._replace(hashes=_NO_HASHES)


class Assignments:
    """The assignments of a router's rooms, by number. Belongs to one event loop."""

    def __init__(self, options: RoomOptions) -> None:
        self._wait_s = options.version_wait_s
        self._of: dict[int, Assignment] = {}
        self._gone_since: dict[int, float] = {}  # rooms whose version has no worker while another serves

    def __getitem__(self, number: int) -> Assignment:
        """The assignment of a room that is not over."""
        return self._of[number]

    def add(self, rooms: Iterable[int], assignment: Assignment) -> None:
        """New rooms, of one request."""
        for number in rooms:
            self._of[number] = assignment
            assignment.rooms.add(number)
            assignment.version.rooms += 1

    def drop(self, number: int) -> None:
        """The room is over."""
        assignment = self._of.pop(number)
        assignment.rooms.discard(number)
        assignment.version.rooms -= 1

    def overdue(self, rooms: Iterable[RoomStream], now: float) -> list[tuple[int, Unavailable]]:
        """The rooms, among these without workers, that have waited too long for one of their version."""
        gone = {
            room.number: self._gone_since.get(room.number, now)
            for room in rooms
            if self._of[room.number].is_outlived
        }
        self._gone_since = gone  # of no other room: one that had workers again begins anew
        return [
            (number, version_gone(self._of[number].model.name))
            for number, since in gone.items()
            if now - since >= self._wait_s
        ]


def version_key(submission: Submission) -> bytes:
    """What decides which version a request gets: equal for the requests of one session or conversation.

    Without a session that is what the conversation began with. Tenants alone would be too coarse: one of them
    may be most of the load.
    """
    s = submission
    opening = s.session or s.opening
    begun = opening.encode() if opening else pack_tokens(s.prompts[0][:_OPENING_TOKENS])
    return sha256(s.tenant.encode() + b"\0" + begun).digest()


def version_gone(model: str) -> Unavailable:
    """What the client of a stream is told whose version is not served any more."""
    return Unavailable(
        f"the version of {model!r} on which this stream began is not served any more, and another would "
        "contradict its tokens: send the request again"
    )
