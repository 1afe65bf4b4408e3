"""HostShipping: pages that go to another process from the host tier, and the same from the device's pool."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import numpy as np
import torch

from bench.common import alternate
from bench.transfer import SHAPE_M, ReceivingProcess, Shape, answer_calls
from common.host import host_identity
from kvcache.buffers import allocate_shared
from kvcache.tiers.host_pool import HostArena
from kvtransfer.pages import PageWrite
from kvtransfer.receiver import PoolReceiver
from kvtransfer.region import GroupRegion
from kvtransfer.select import open_receiver, open_sender
from wire.messages.transfer import TransferEndpoint

_SHAPE = Shape(256, SHAPE_M.page_bytes)


class HostShipping:
    """The sending process: a pool and a host arena of equal size, whose pages bear numbers."""

    def __init__(self) -> None:
        self._pool = allocate_shared(_SHAPE.nbytes)
        self._arena = HostArena(_SHAPE.page_bytes, _SHAPE.pages - 1)
        pool = self._pool.tensor.view(_SHAPE.pages, _SHAPE.page_bytes)
        for tensor, first in ((pool, 0), (self._arena.bytes, _SHAPE.pages)):
            tensor.view(torch.int64)[:] = torch.arange(first, first + _SHAPE.pages)[:, None]
        self._sender = open_sender(
            {"full": GroupRegion(pool, self._pool.fd)},
            host_identity(),
            arenas={"full": GroupRegion(self._arena.bytes)},
        )

    def write(self, endpoint: TransferEndpoint, write: PageWrite) -> None:
        """Send the pages."""
        self._sender.write(endpoint, write)


def _sending_main(conn: Connection) -> None:
    answer_calls(conn, HostShipping())


@contextmanager
def _receiving() -> Iterator[tuple[ReceivingProcess, PoolReceiver]]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_sending_main, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        with allocate_shared(_SHAPE.nbytes) as buffer:
            tensor = buffer.tensor.view(_SHAPE.pages, _SHAPE.page_bytes)
            tensor.fill_(1)
            region = GroupRegion(tensor, fd=buffer.fd)
            receiver = open_receiver({"full": region})
            try:
                yield ReceivingProcess(_SHAPE, mine, region), receiver
            finally:
                receiver.close()
    finally:
        mine.close()
        process.join(10)
        process.kill()


def host_against_device(rounds: int) -> float:
    """Bytes/s of sending pages of shape M in random order from the host tier / from the device's pool, by the
    backend that two workers of one machine take; medians of alternating rounds."""
    with _receiving() as (receiving, receiver):

        def send(on_host: bool) -> float:
            src, dst = receiving.order()
            took = receiving.transfer(receiver, src, dst, on_host)
            numbers = receiving.pool.tensor.view(torch.int64)[:, :: _SHAPE.page_bytes // 64].numpy()
            if not (numbers[dst] == (src + on_host * _SHAPE.pages)[:, None]).all():
                raise RuntimeError("a page differs from what was sent")
            return took

        sides = {"device": lambda: send(False), "host": lambda: send(True)}
        alternate(sides, 1)
        took = alternate(sides, rounds)
        return float(np.median(np.array(took["device"]) / np.array(took["host"])))
