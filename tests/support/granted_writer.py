"""A writer over memory of one host that stays in the middle of a write for as long as a test wants."""

from __future__ import annotations

import socket

from common.errors import TransferError
from kvcache.page_runs import as_pages
from kvtransfer.channel import Channel, Line
from kvtransfer.pages import PageWrite
from kvtransfer.transport import Bounds
from wire.messages.transfer import FETCH_EPOCH, Fetch, KVTarget


class GrantedWriter:
    """A writer in this process with a grant to write the pages of a KVTarget or a Fetch, not ended yet."""

    def __init__(self, target: KVTarget | Fetch, group: str = "full", backend: str = "shm") -> None:
        """Raises Refusal when decode does not let these pages be written."""
        (endpoint,) = (endpoint for endpoint in target.endpoints if endpoint.backend == backend)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect("\0" + endpoint.address.removeprefix("@"))
        self._channel = Channel(Line(sock), endpoint, Bounds())
        if isinstance(target, Fetch):
            room, epoch = target.transfer, FETCH_EPOCH
        else:
            room, epoch = target.room, target.epoch
        pages = as_pages(target.groups[group].page_ids)
        try:
            page_bytes = self._channel.pools.groups[group].page_bytes
            self._channel.begin(PageWrite(room, epoch, group, pages, pages), page_bytes)
        except TransferError:
            self._channel.close()
            raise

    def end(self) -> None:
        """The write is over; decode has confirmed that."""
        self._channel.end()
        self._channel.close()
