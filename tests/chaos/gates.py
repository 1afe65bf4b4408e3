"""Gates: a forward, or a write of pages, waits in a worker until the harness lets it go on.

In the worker's process (tests/chaos/child.py). It also tells the harness what no stage stamp says: which kind
of forward or write waits, and that a request was retracted or a drain has begun.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import kvtransfer.cuda_ipc
import kvtransfer.mooncake
import kvtransfer.shm
import kvtransfer.tcp
import worker.parts
from engine.batch import Engine, ForwardBatch, Pending
from scheduler.req import Req
from scheduler.request_table import RequestTable
from tests.chaos.observed import DECODE, FIRST, LAST, MIDDLE, MOVE
from wire.stages import RequestStage
from worker.drain import Drain

_LONGEST_HOLD_S = 30.0
_POLL_S = 0.01


class Gates:
    """Which kinds are held, and how long each takes besides. Told by the harness through `pipe`."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()
        self._held: frozenset[str] = frozenset()
        self._pace: dict[str, float] = {}
        threading.Thread(target=self._listen, name="gates", daemon=True).start()

    def tell(self, *event: object) -> None:
        """Report an event to the harness."""
        with self._lock:
            self._pipe.send(event)

    def enter(self, kinds: frozenset[str]) -> None:
        """Wait while one of the kinds is held, then for as long as the slowest of them takes."""
        if kinds & self._held:
            deadline = time.monotonic() + _LONGEST_HOLD_S
            self.tell("held", sorted(kinds & self._held))
            while kinds & self._held and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            self.tell("passed", sorted(kinds))
        seconds = max((self._pace.get(kind, 0.0) for kind in kinds), default=0.0)
        if seconds:
            time.sleep(seconds)

    def _listen(self) -> None:
        while True:
            try:
                held, pace = self._pipe.recv()
            except (EOFError, OSError):  # the harness has ended: so does this process (child.py)
                return
            self._held, self._pace = frozenset(held), dict(pace)


class GatedEngine:
    """An Engine whose forwards pass the gates before they are launched."""

    def __init__(self, engine: Engine, gates: Gates) -> None:
        self._engine = engine
        self._gates = gates

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def launch(self, batch: ForwardBatch) -> Pending:
        """See Engine."""
        self._gates.enter(kinds_of(batch))
        return self._engine.launch(batch)


def kinds_of(batch: ForwardBatch) -> frozenset[str]:
    """The kinds of a forward's sequences."""
    sampled = np.isin(np.arange(len(batch.q_lens)), batch.sampled)
    chunk = (batch.q_lens > 1) | ~sampled
    kinds = {
        FIRST: chunk & ~sampled & (batch.q_lens == batch.seq_lens),
        MIDDLE: chunk & ~sampled & (batch.q_lens < batch.seq_lens),
        LAST: chunk & sampled,
    }
    found = {kind for kind, rows in kinds.items() if rows.any()}
    return frozenset(found or {DECODE})


def put_gates(gates: Gates) -> None:
    """Every worker made in this process from now on has these gates, and reports its stages."""
    build_engine = vars(worker.parts)["build_engine"]

    def build_gated(*arguments: Any, **named: Any) -> Any:
        engine, memory = build_engine(*arguments, **named)
        return GatedEngine(engine, gates), memory

    vars(worker.parts)["build_engine"] = build_gated
    for sender in (
        kvtransfer.cuda_ipc.CudaIpcSender,
        kvtransfer.shm.ShmSender,
        kvtransfer.tcp.TcpSender,
        kvtransfer.mooncake.MooncakeSender,
    ):
        _before(sender, "_move", lambda *_: gates.enter(frozenset({MOVE})))

    def stamped(req: Req, stage: RequestStage) -> None:
        gates.tell("stage", req.room, req.epoch, str(stage), time.time_ns())

    _before(Req, "stamp", stamped)
    _before(RequestTable, "retract", lambda _, req: gates.tell("retracted", req.room, req.epoch))
    _before(Drain, "begin", lambda *_: gates.tell("draining"))


def _before(owner: type, method: str, first: Callable[..., None]) -> None:
    """Call `first` with the arguments of every call of the method, before it."""
    whole = getattr(owner, method)

    def both(*arguments: Any, **named: Any) -> Any:
        first(*arguments)
        return whole(*arguments, **named)

    setattr(owner, method, both)
