"""Ranks: the other ranks of a worker, as rank 0 knows them. It starts and ends their processes."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import torch

from common.errors import ConfigError
from engine.batch import ForwardBatch
from engine.config import EngineConfig
from engine.errors import DeviceLost
from engine.graphs import DecodeLimits
from engine.parallel.group import RankGroup, SharedMemoryGroup, allocate_memory
from engine.parallel.nccl import NcclGroup
from engine.ranks.messages import CannotStart, Compute, GiveBack, LoadPart, Order, RankSocket, RecordDecode
from engine.ranks.pools import show
from kvcache.pool import KVCache

_START_S = 120.0  # to import torch
_LOAD_S = 3600.0
_RECORD_S = 600.0
_POOLS_S = 120.0
_EXIT_S = 10.0


class Ranks:
    """Ranks 1 to size - 1. One thread; close it, or use it as a context manager."""

    def __init__(self, config: EngineConfig, devices: Sequence[str], timeout_s: float) -> None:
        """Start them, and their loading of the model. Rank i computes on device i; GPUs that are all
        different exchange values by NCCL. `timeout_s` bounds how long a rank on a CPU waits for another in a
        forward. Raises ConfigError if one ends."""
        self._others: list[_Rank] = []
        self._opened = ExitStack()
        by_nccl = torch.device(devices[0]).type == "cuda" and len({*devices}) == len(devices)
        try:
            if by_nccl:
                self.group: RankGroup = self._start_with_nccl(config, devices)
            else:
                self.group = self._start_with_memory(config, devices, timeout_s)
        except BaseException:
            self.close()
            raise

    def _start_with_memory(
        self, config: EngineConfig, devices: Sequence[str], timeout_s: float
    ) -> SharedMemoryGroup:
        size = len(devices)
        memory = allocate_memory(size)
        waits: list[socket.socket] = []
        group = SharedMemoryGroup(0, memory, waits, size)
        self._opened.callback(group.close)
        for rank in range(1, size):
            ours, theirs = socket.socketpair()
            waits.append(ours)
            ours.settimeout(timeout_s)
            own = replace(config, device=devices[rank])
            with theirs:
                assert memory.fd is not None, "it is not closed"
                self._start(LoadPart(own, rank, size, timeout_s), [memory.fd, theirs.fileno()])
        self._answers(_START_S)
        return group

    def _start_with_nccl(self, config: EngineConfig, devices: Sequence[str]) -> NcclGroup:
        folder = self._opened.enter_context(TemporaryDirectory(prefix="baton-ranks-"))  # this user's alone
        meeting = Path(folder) / "meeting"
        for rank, device in enumerate(devices[1:], 1):
            own = replace(config, device=device)
            self._start(LoadPart(own, rank, len(devices), meeting=str(meeting)))
        self._answers(_START_S)
        group = NcclGroup(0, len(devices), meeting, torch.device(devices[0]))
        self._opened.callback(group.close)
        return group

    def _start(self, order: LoadPart, fds: Sequence[int] = ()) -> None:
        self._others.append(_Rank(order.rank))
        self._others[-1].ask(order, fds)

    def await_loaded(self) -> None:
        """Wait until every rank has its part of the model. Raises ConfigError if one cannot load it."""
        self._answers(_LOAD_S)

    def open_pools(self, pools: Mapping[str, KVCache]) -> None:
        """Show them the pages. Raises ConfigError if one cannot use them."""
        for rank in self._others:
            rank.ask(*show(pools, rank.number))
        self._answers(_POOLS_S)

    def record_decode(self, limits: DecodeLimits) -> None:
        """Have them record decode steps. This rank must record them next, and then wait for the others."""
        self._ask(RecordDecode(limits.sequences, limits.context_pages, limits.rows))

    def await_recorded(self) -> None:
        """Wait until all have. Raises ConfigError if one cannot."""
        self._answers(_RECORD_S)

    def give_back(self) -> None:
        """Have them give their GPUs what they do not use. Pools must be opened again after it."""
        self._ask(GiveBack())
        self._answers(_POOLS_S)

    def compute(self, batch: ForwardBatch, heads: Sequence[npt.NDArray[np.int64]]) -> None:
        """Have them compute the batch, and then the head of these tokens, call by call. This rank must do so
        next, and share its input ids before that; in a recorded step the record does. Raises DeviceLost if
        one has ended."""
        order = Compute.of(batch, heads)
        for rank in self._others:
            rank.tell(order)

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
        self._opened.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, order: Order) -> None:
        for rank in self._others:
            rank.ask(order)

    def _answers(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for rank in self._others:
            rank.await_answer(deadline)


class _Rank:
    """One of them."""

    def __init__(self, number: int) -> None:
        self.number = number
        ours, theirs = socket.socketpair()
        self.socket = RankSocket(ours)
        with theirs, ExitStack() as on_error:
            on_error.callback(self.socket.close)
            self.process = subprocess.Popen(  # noqa: S603  our own module
                [sys.executable, "-m", "engine.ranks", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # stderr: stdout has the worker's ready line
                pass_fds=[theirs.fileno()],
            )
            on_error.pop_all()

    def tell(self, order: Compute) -> None:
        try:
            self.socket.send(order)
        except OSError as error:
            raise DeviceLost(f"rank {self.number} has ended") from error

    def ask(self, order: Order, fds: Sequence[int] = ()) -> None:
        """What follows is `await_answer`, which says why a rank has ended."""
        with suppress(OSError):
            self.socket.send(order)
            self.socket.send_fds(list(fds))

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
        self.process.wait(_EXIT_S)
