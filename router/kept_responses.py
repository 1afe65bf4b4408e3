"""Kept responses: what later requests to /v1/responses go on from, shared by the routers of a directory.

The router that answered keeps the response, and sends a copy to one other router. A router that has not got a
response asks all others at once. So a response outlives any one router, and is lost with both that keep it,
or by its age, or when newer ones take its place. Copies are not made again: a response that has lost one of
its routers lives on in the other. Keeping all in the directory was rejected: its process is one of the
routers' or an actor of theirs, and would hold, and lose, the responses of all.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from itertools import count
from typing import NamedTuple
from zlib import crc32

from common.errors import Unavailable
from router.options import ResponseOptions
from wire.messages.any_message import AnyMessage
from wire.messages.routers import DropResponse, FindResponse, FoundResponse, KeepResponse
from wire.sockets import Mail

_ANSWER_S = 1.0


class ResponseKey(NamedTuple):
    """Nobody finds the response of another tenant."""

    tenant: str
    id: str


class _Kept(NamedTuple):
    content: bytes
    until: float


class ResponseStore:
    """The responses that one router keeps. Those that came first go first. Pure: time is passed in."""

    def __init__(self, options: ResponseOptions) -> None:
        self._options = options
        self._kept: OrderedDict[ResponseKey, _Kept] = OrderedDict()  # oldest first
        self.size = 0  # bytes

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, key: ResponseKey, content: bytes, now: float) -> bool:
        """Keep a response, and forget older ones where it is too much. False: it is too large, or none is
        kept."""
        most, largest = self._options.kept_responses, self._options.kept_responses_bytes
        self.drop(key)
        if not most or len(content) > largest:
            return False
        self._kept[key] = _Kept(content, now + self._options.kept_responses_s)
        self.size += len(content)
        while len(self._kept) > most or self.size > largest or self._oldest().until <= now:
            self.drop(next(iter(self._kept)))
        return True

    def find(self, key: ResponseKey, now: float) -> bytes | None:
        """A response, unless it is too old."""
        kept = self._kept.get(key)
        return kept.content if kept is not None and kept.until > now else None

    def drop(self, key: ResponseKey) -> None:
        """Forget a response, if it is there."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            self.size -= len(kept.content)

    def _oldest(self) -> _Kept:
        return next(iter(self._kept.values()))


class _Search:
    """A question to other routers."""

    def __init__(self, asked: Collection[str]) -> None:
        self.without = set(asked)  # who has not answered
        self.found: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()

    def take(self, sender: str, content: bytes) -> None:
        """`content`: b"" from a router that has no such response."""
        self.without.discard(sender)
        if not self.found.done() and (content or not self.without):
            self.found.set_result(content or None)


class KeptResponses:
    """One router's part. Belongs to its event loop."""

    def __init__(
        self,
        options: ResponseOptions,
        send: Callable[[str, AnyMessage], None],
        others: Callable[[], Collection[str]],
    ) -> None:
        """`others`: the mailboxes of the directory's other routers."""
        self._store = ResponseStore(options)
        self._send = send
        self._others = others
        self._tokens = count(1)
        self._searches: dict[int, _Search] = {}

    def __len__(self) -> int:
        """How many responses are kept here, copies included."""
        return len(self._store)

    def keep(self, key: ResponseKey, content: bytes) -> bool:
        """Keep a response here and at another router. False: it is too large, or none is
        kept."""
        if not self._store.keep(key, content, time.monotonic()):
            return False
        others = self._others()
        if others:
            other = max(others, key=lambda address: crc32(f"{key.id} {address}".encode()))
            self._send(other, KeepResponse(*key, content))
        return True

    async def find(self, key: ResponseKey) -> bytes | None:
        """A response, wherever it is kept. Raises Unavailable if a router that may have it is silent."""
        content = self._store.find(key, time.monotonic())
        others = self._others()
        if content is not None or not others:
            return content
        token = next(self._tokens)
        search = self._searches[token] = _Search(others)
        for other in others:
            self._send(other, FindResponse(*key, token))
        try:
            return await asyncio.wait_for(search.found, _ANSWER_S)
        except TimeoutError:
            raise Unavailable("not every router says whether it keeps this response: try again") from None
        finally:
            del self._searches[token]

    def drop(self, key: ResponseKey) -> None:
        """Forget a response everywhere."""
        self._store.drop(key)
        for other in self._others():
            self._send(other, DropResponse(*key))

    def take(self, mail: Mail) -> bool:
        """Take another router's message. False for any other. From a process that the directory does not
        list as a router it is dropped: conversations are told to nobody else."""
        message = mail.message
        if not isinstance(message, KeepResponse | FindResponse | FoundResponse | DropResponse):
            return False
        if mail.sender not in self._others():
            return True
        if isinstance(message, KeepResponse):
            key = ResponseKey(message.tenant, message.response)
            self._store.keep(key, message.content, time.monotonic())
        elif isinstance(message, FindResponse):
            found = self._store.find(ResponseKey(message.tenant, message.response), time.monotonic())
            self._send(mail.sender, FoundResponse(message.token, found or b""))
        elif isinstance(message, DropResponse):
            self._store.drop(ResponseKey(message.tenant, message.response))
        else:
            search = self._searches.get(message.token)
            if search is not None:
                search.take(mail.sender, message.content)
        return True
