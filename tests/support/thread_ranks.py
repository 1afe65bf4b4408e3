"""Ranks as threads of one process: for what stands in for a GPU, which exists in one process."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt

from engine.batch import ForwardBatch
from engine.graphs import DecodeLimits
from engine.parallel.group import RankGroup, SharedMemoryGroup, allocate_memory
from engine.ranks.messages import Compute
from engine.ranks.rank import ModelPart
from tests.support.eager_recorder import EagerRecorder

WAIT_S = 30.0


def two_groups() -> tuple[RankGroup, RankGroup]:
    """Of two ranks in one process."""
    memory, pair = allocate_memory(2), socket.socketpair()
    for end in pair:
        end.settimeout(WAIT_S)
    return SharedMemoryGroup(0, memory, [pair[0]], 2), SharedMemoryGroup(1, memory, [pair[1]], 2)


class ThreadRanks:
    """What a ModelRunner needs of Ranks. Rank 1 computes on a thread, in the order in which it is told to."""

    def __init__(self, group: RankGroup, rank: ModelPart) -> None:
        self.group = group
        self.recorder = EagerRecorder()
        self.computed = 0
        self._rank = rank
        self._told: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._recorded: Future[None] = Future()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def compute(self, batch: ForwardBatch, heads: Sequence[npt.NDArray[np.int64]]) -> None:
        order = Compute.of(batch, heads)
        self._told.put(lambda: self._rank.compute(order))

    def record_decode(self, limits: DecodeLimits) -> None:
        def record() -> None:
            self._rank.record_decode(limits, self.recorder)
            self._recorded.set_result(None)

        self._told.put(record)

    def await_recorded(self) -> None:
        self._recorded.result(WAIT_S)

    def check(self) -> None:
        assert self._failure is None, self._failure

    def close(self) -> None:
        self._told.put(None)
        self._thread.join(WAIT_S)
        self.group.close()
        self._rank._group.close()
        self.check()

    def _run(self) -> None:
        try:
            while (order := self._told.get()) is not None:
                order()
                self.computed += 1
        except BaseException as error:
            self._failure = error
            raise
