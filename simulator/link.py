"""Link: one worker's way to the others, by how near they are.

Between hosts, a transfer needs the sender's outgoing and the receiver's incoming direction. Each direction
has one transfer at a time, first come, first served. Within a host there is no such thing to wait for.
"""

from __future__ import annotations

from typing import NamedTuple

from router.placement.transfer_rates import Locality, locality
from simulator.options import WorkerModel
from wire.records import WorkerRecord


class Transfer(NamedTuple):
    """When all has arrived, and for how long it was being written (s)."""

    end: float
    seconds: float


class Link:
    """Two directions of equal speed."""

    def __init__(self, record: WorkerRecord, model: WorkerModel) -> None:
        """`record` says where the worker is."""
        self._record = record
        self._model = model
        self._out_free_at = 0.0
        self._in_free_at = 0.0

    def send(self, to: Link, size: float, now: float) -> Transfer:
        """Begin a transfer of `size` bytes as soon as possible."""
        near = locality(self._record, to._record)
        seconds = size / self._bytes_per_s(near)
        if near is Locality.HOST:
            return Transfer(now + seconds, seconds)
        end = max(now, self._out_free_at, to._in_free_at) + seconds
        self._out_free_at = to._in_free_at = end
        return Transfer(end, seconds)

    def would_end(self, to: Link, size: float, now: float) -> float:
        """When a transfer would end that began as soon as possible."""
        near = locality(self._record, to._record)
        begin = now if near is Locality.HOST else max(now, self._out_free_at, to._in_free_at)
        return begin + size / self._bytes_per_s(near)

    def _bytes_per_s(self, near: Locality) -> float:
        if near is Locality.HOST:
            return self._model.host_bytes_per_s
        return self._model.rack_bytes_per_s if near is Locality.RACK else self._model.link_bytes_per_s
