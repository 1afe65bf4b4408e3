"""ClientHolds: what a router keeps for clients that do not do their part: half-read bodies, unread answers.

A stream costs nothing here for each token or write. A look once in a while sees whether the task that serves
it waits for tokens; if it does not, it waits for the client. `StreamEvents.events`, which is another list
after each write, shows whether that is still the same write as at the last look.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from common.errors import LateBody
from router.measures import Count
from router.streams.generation import Generation
from wire.holds import Hold

log = logging.getLogger(__name__)

_LOOK_S = 1.0  # between two looks at all streams, or less: a quarter of the bound
_OWN_GAP_S = 2.0  # between two looks, and more than planned: this process was stopped or blocked itself


class StreamEvents(Protocol):
    """The events of a stream."""

    @property
    def events(self) -> list[bytes]:
        """Those that are not taken yet. Taking them puts another list in its place."""


@dataclass(slots=True)
class _Stream:
    generation: Generation
    answer: StreamEvents
    bound: asyncio.Timeout
    since: float | None = None  # the look that found it in a write; None: the last look did not
    untaken: list[bytes] | None = None  # `events` at that look

    def look(self, now: float) -> None:
        events = self.answer.events
        if self.generation.waiting:
            self.since = self.untaken = None
        elif self.since is None or self.untaken is not events:
            self.since, self.untaken = now, events


@dataclass(slots=True)
class _Body:
    request_id: str
    since: float


class ClientHolds:
    """Bodies that are being read and streams that are being sent. Belongs to one event loop."""

    def __init__(self, body_timeout_s: float, unread_timeout_s: float, swept: Count) -> None:
        """`swept` counts what is given up."""
        self._body_timeout_s = body_timeout_s
        self._unread_timeout_s = unread_timeout_s
        self._swept = swept
        self._reading: dict[int, _Body] = {}
        self._streams: dict[Generation, _Stream] = {}
        self._look_s = min(_LOOK_S, unread_timeout_s / 4)
        self._looked_at = time.monotonic()

    @property
    def streams(self) -> list[Generation]:
        """Those that are being sent."""
        return list(self._streams)

    @asynccontextmanager
    async def reading(self, request_id: str) -> AsyncIterator[None]:
        """A request's body is read in the block. Raises LateBody when that takes too long."""
        body = _Body(request_id, time.monotonic())
        self._reading[id(body)] = body
        try:
            async with asyncio.timeout(self._body_timeout_s):
                yield
        except TimeoutError:
            self._swept.inc(1, "half-read body")
            raise LateBody(f"the body was not complete after {self._body_timeout_s:g} s") from None
        finally:
            del self._reading[id(body)]

    @asynccontextmanager
    async def sending(self, generation: Generation, answer: StreamEvents) -> AsyncIterator[None]:
        """A stream is sent in the block. When its client reads nothing for too long, the block is left."""
        try:
            async with asyncio.timeout(None) as bound:
                self._streams[generation] = _Stream(generation, answer, bound)
                yield
        except TimeoutError:
            if not bound.expired():
                raise
            self._swept.inc(1, "unread answer")
            log.warning("request %s: its client does not read", generation.submission.request_id)
        finally:
            self._streams.pop(generation, None)

    def tick(self, now: float) -> None:
        """Give up the streams whose clients read nothing for too long."""
        passed_s = now - self._looked_at
        if passed_s < self._look_s:
            return
        self._looked_at = now
        for stream in self._streams.values():
            if passed_s > self._look_s + _OWN_GAP_S:
                stream.since = None
            stream.look(now)
            if stream.since is not None and now - stream.since >= self._unread_timeout_s:
                stream.since = None
                stream.bound.reschedule(0.0)

    def holds(self, holder: str, now: float) -> list[Hold]:
        """What `holder`, this router, keeps for clients."""
        bodies = [
            _hold(holder, "half-read body", body.request_id, None, now - body.since, self._body_timeout_s)
            for body in self._reading.values()
        ]
        answers = []
        for stream in self._streams.values():
            stream.look(now)
            if stream.since is not None and stream.since < now:  # else it may be about to take what came
                of = stream.generation.submission
                age_s, bound_s = now - stream.since, self._unread_timeout_s
                answers.append(_hold(holder, "unread answer", of.request_id, of.first_room, age_s, bound_s))
        return bodies + answers


def _hold(holder: str, what: str, request_id: str, room: int | None, age_s: float, bound_s: float) -> Hold:
    return Hold(holder, what, f"client of {request_id}", room, None, age_s, bound_s - age_s)
