"""Ranks: the other ranks of a worker, as rank 0 knows them. It starts and ends their processes."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch

from common.errors import ConfigError
from engine.batch import ForwardBatch
from engine.config import EngineConfig
from engine.errors import DeviceLost
from engine.parallel.group import RankGroup, SharedMemoryGroup, allocate_memory
from engine.ranks.messages import CannotStart, Compute, LoadPart, Order, RankSocket
from engine.ranks.pools import describe
from kvcache.pool import KVCache

_LOAD_S = 3600.0
_POOLS_S = 120.0
_EXIT_S = 10.0


class Ranks:
    """Ranks 1 to size - 1. One thread; close it, or use it as a context manager."""

    def __init__(self, config: EngineConfig, size: int, timeout_s: float) -> None:
        """Start them, and their loading of the model. `timeout_s` bounds how long a rank waits for another in
        a forward."""
        self._others: list[_Rank] = []
        memory = allocate_memory(size)
        barriers: list[socket.socket] = []
        self.group: RankGroup = SharedMemoryGroup(0, memory, barriers, size)
        try:
            for number in range(1, size):
                self._others.append(_Rank(number))
                ours, theirs = socket.socketpair()
                barriers.append(ours)
                ours.settimeout(timeout_s)
                with theirs:
                    assert memory.fd is not None, "it is not closed"
                    order = LoadPart(config, number, size, timeout_s)
                    self._others[-1].tell(order, [memory.fd, theirs.fileno()])
        except BaseException:
            self.close()
            raise

    def await_loaded(self) -> None:
        """Wait until every rank has its part of the model. Raises ConfigError if one cannot load it."""
        self._answers(_LOAD_S)

    def open_pools(self, pools: Mapping[str, KVCache]) -> None:
        """Show them the pages. Raises ConfigError if one cannot use them."""
        opened, fds = describe(pools)
        for rank in self._others:
            rank.tell(opened, fds)
        self._answers(_POOLS_S)

    def compute(self, batch: ForwardBatch, input_ids: torch.Tensor) -> None:
        """Have them compute the batch. This rank must compute it next."""
        order = Compute.of(batch)
        for rank in self._others:
            rank.tell(order)
        self.group.share(input_ids)

    def check(self) -> None:
        """Raises DeviceLost if one has ended. From any thread."""
        for rank in [*self._others]:
            if (status := rank.process.poll()) is not None:
                raise DeviceLost(f"rank {rank.number} has ended, with status {status}")

    def close(self) -> None:
        """End them. Idempotent."""
        for rank in self._others:
            rank.socket.close()
        while self._others:
            self._others.pop().end()
        self.group.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answers(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for rank in self._others:
            rank.await_answer(deadline)


class _Rank:
    """One of them."""

    def __init__(self, number: int) -> None:
        self.number = number
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(  # noqa: S603  our own module
                [sys.executable, "-m", "engine.ranks", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                pass_fds=[theirs.fileno()],
            )
        self.socket = RankSocket(ours)

    def tell(self, order: Order, fds: Sequence[int] = ()) -> None:
        try:
            self.socket.send(order)
            self.socket.send_fds(list(fds))
        except OSError as error:
            raise DeviceLost(f"rank {self.number} has ended") from error

    def await_answer(self, deadline: float) -> None:
        try:
            answer = self.socket.answer(max(0.0, deadline - time.monotonic()))
        except (OSError, EOFError, TimeoutError) as error:
            why = "does not answer" if isinstance(error, TimeoutError) else "has ended"
            raise ConfigError("tp_size", f"rank {self.number} {why}", "see its last lines above") from error
        if isinstance(answer, CannotStart):
            raise ConfigError(answer.key, answer.problem, answer.remedy)

    def end(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_EXIT_S)
            return
        self.process.kill()
        self.process.wait()
