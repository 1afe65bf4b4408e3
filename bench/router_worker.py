"""A worker without a model for bench.router: a process that speaks the wire protocol and does nothing else.

    python -m bench.router_worker --role decode --directory tcp://127.0.0.1:40001 --model m

It sends ONE `Tokens` message per token, whatever else is due at the same moment, so that the router has to
take each one by itself. One thread reads and writes the sockets: a mailbox with its own would cost this
process, which shares the machine with the router, more than all the rest. `Inspect` is answered with how long
prefill took it since the last time: from getting a Prefill to sending token 0, in milliseconds.

Nothing is repeated: between processes of one machine nothing is lost, and a bench in which something were
must fail rather than measure it. tests/support/fake_worker.py is the one that keeps to the whole protocol.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from dataclasses import dataclass

import zmq

from wire.host import host_identity
from wire.messages import (
    Abort,
    Announce,
    AnyMessage,
    Decode,
    FinishReason,
    GenerateRequest,
    GroupTarget,
    Inspect,
    Inspected,
    KVDone,
    KVTarget,
    Prefill,
    Receipt,
    Release,
    Reserved,
    Timeline,
    TokenRun,
    Tokens,
    TransferEndpoint,
    kind_of,
)
from wire.records import GroupLayout, Role, WorkerLoad, WorkerRecord, layout_digest
from wire.sockets import Inbound, Peers
from wire.stages import RequestStage, stamp

_ANNOUNCE_S = 1.0
_AT_ONCE = 64  # messages read before the next token
_PAGE_TOKENS = 16
_FIRST_TOKEN, _TOKENS = 1000, 2000  # ids it says, in turn: ordinary ones in every vocabulary
_ROOMY = WorkerLoad(free_tokens=1 << 24, headroom_tokens=1 << 24, headroom_rows=1 << 12)
_PREFILL_STAGES = (
    RequestStage.PREFILL_WAITING, RequestStage.PREFILL_FORWARD, RequestStage.PREFILL_TRANSFER_KV_CACHE,
)  # fmt: skip
_DECODE_STAGES = (
    RequestStage.DECODE_BOOTSTRAP, RequestStage.DECODE_WAITING, RequestStage.DECODE_TRANSFERRED,
    RequestStage.DECODE_LOOP,
)  # fmt: skip
Key = tuple[int, int]  # room, epoch


@dataclass(slots=True)
class _Room:
    request: GenerateRequest
    router: str
    upto: int = 0  # next position to send
    target: str | None = None  # P: who sent KVTarget


class BenchWorker:
    """One prefill or decode worker. `run` never returns."""

    def __init__(self, role: Role, directory: str, model: str, prefill_s: float, step_s: float) -> None:
        self._role = role
        self._directory = directory
        self._prefill_s = prefill_s
        self._step_s = step_s
        context = zmq.Context()
        self._inbound = Inbound(context, "127.0.0.1", None)
        self._send = Peers(context, self._inbound.address, None).send
        self._record = _record(role, self._inbound.address, model)
        self._layout = layout_digest(self._record.groups)
        self._rooms: dict[Key, _Room] = {}
        self._running: dict[Key, _Room] = {}  # D: rooms that say a token each step
        self._early: dict[Key, tuple[str, AnyMessage]] = {}  # from a worker that was quicker than the router
        self._prefilling: list[tuple[float, float, Key]] = []  # P: when it is due, when it came, which
        self._own_ms: list[float] = []
        self._announce_at = self._step_at = 0.0

    def run(self) -> None:
        """Take mail, say tokens, announce."""
        while True:
            now = time.perf_counter()
            if now >= self._announce_at:
                self._announce_at = now + _ANNOUNCE_S
                self._send(self._directory, Announce(self._record))
            if self._running and now >= self._step_at:
                self._step_at = now + self._step_s
                self._step()
            while self._prefilling and self._prefilling[0][0] <= now:
                self._prefilled(*self._prefilling.pop(0)[1:])
            if self._inbound.socket.poll(self._pause_ms()):
                for sender, message in self._inbound.receive(_AT_ONCE)[0]:
                    self._take(sender, message)

    def _pause_ms(self) -> int:
        due = self._announce_at
        if self._running:
            due = min(due, self._step_at)
        if self._prefilling:
            due = min(due, self._prefilling[0][0])
        return max(0, math.ceil((due - time.perf_counter()) * 1e3))

    def _take(self, sender: str, message: AnyMessage) -> None:
        if isinstance(message, Prefill | Decode):
            self._send(sender, Receipt(message.room, message.epoch, kind_of(message)))
            self._begin(sender, message)
        elif isinstance(message, KVTarget | KVDone | Release):
            self._peer_said(sender, message)
        elif isinstance(message, Abort):
            self._send(sender, Receipt(message.room, message.epoch, "abort"))
            self._rooms.pop((message.room, message.epoch), None)
            self._running.pop((message.room, message.epoch), None)
        elif isinstance(message, Inspect):
            median = statistics.median(self._own_ms) if self._own_ms else None
            self._send(sender, Inspected(message.token, json.dumps({"own_ms": median})))
            self._own_ms.clear()

    def _begin(self, router: str, message: Prefill | Decode) -> None:
        key = (message.room, message.epoch)
        room = self._rooms[key] = _Room(message.request, router)
        if isinstance(message, Prefill):
            now = time.perf_counter()
            if self._prefill_s:
                self._prefilling.append((now + self._prefill_s, now, key))
            else:
                self._prefilled(now, key)
        elif message.prefill is None:
            self._running[key] = room
        else:
            self._send(router, Reserved(*key))
            self._send(message.prefill, self._target(key, message.request))
        if key in self._early:
            self._peer_said(*self._early.pop(key))

    def _prefilled(self, came: float, key: Key) -> None:
        room = self._rooms.get(key)
        if room is None:
            return  # aborted
        self._say_token(room)
        self._own_ms.append((time.perf_counter() - came) * 1e3)
        if room.target is not None:
            self._ship(key, room)

    def _peer_said(self, sender: str, message: AnyMessage) -> None:
        assert isinstance(message, KVTarget | KVDone | Release)
        key = (message.room, message.epoch)
        room = self._rooms.get(key)
        if room is None:
            self._early[key] = (sender, message)
        elif isinstance(message, KVTarget):
            room.target = sender
            if room.upto:
                self._ship(key, room)
        elif isinstance(message, KVDone):
            self._running[key] = room
        else:
            del self._rooms[key]

    def _ship(self, key: Key, room: _Room) -> None:
        assert room.target is not None
        context = len(room.request.prompt) // 4
        if room.request.sampling.max_new_tokens == 1:
            self._send(room.target, Release(*key))
        else:
            self._send(room.target, KVDone(*key, context, _FIRST_TOKEN, 1024))
        self._over(key, room, _PREFILL_STAGES)

    def _step(self) -> None:
        for key, room in list(self._running.items()):
            self._say_token(room)
            if room.upto == room.request.sampling.max_new_tokens:
                del self._running[key]
                self._over(key, room, _DECODE_STAGES)

    def _say_token(self, room: _Room) -> None:
        request, position = room.request, room.upto
        room.upto = position + 1
        finish = FinishReason.LENGTH if room.upto == request.sampling.max_new_tokens else None
        token = _FIRST_TOKEN + position % _TOKENS
        run = TokenRun(request.room, request.epoch, position, [token], finish=finish)
        self._send(room.router, Tokens(self._record.id, [run]))

    def _over(self, key: Key, room: _Room, stages: tuple[RequestStage, ...]) -> None:
        stamps = [stamp(stage) for stage in stages]
        self._send(room.router, Timeline(*key, self._record.id, stamps, 1024, "shm"))
        del self._rooms[key]

    def _target(self, key: Key, request: GenerateRequest) -> KVTarget:
        pages = list(range(-(-len(request.prompt) // (4 * _PAGE_TOKENS))))
        return KVTarget(
            *key, self._record.id, self._record.incarnation, self._record.host, self._layout,
            [TransferEndpoint("shm", "")], {"full": GroupTarget(0, pages)},
        )  # fmt: skip


def _record(role: Role, address: str, model: str) -> WorkerRecord:
    shape = (2, 2, 2, _PAGE_TOKENS, 8)
    layout = GroupLayout("full", "full", shape, "float32", "plain", _PAGE_TOKENS, 4 * 8 * _PAGE_TOKENS * 8)
    return WorkerRecord(
        id=f"{role}-{os.getpid()}", incarnation=time.time_ns(), role=role, mailbox=address, events="",
        replay="", model=model, fingerprint="bench", groups=(layout,), max_context_tokens=1 << 15,
        total_tokens=1 << 24, max_running_requests=1 << 12, pid=os.getpid(), host=host_identity(),
        transfer_backends=("shm",), load=_ROOMY,
    )  # fmt: skip


def main() -> None:
    """The process."""
    parser = argparse.ArgumentParser(description="A worker without a model, for bench.router.")
    parser.add_argument("--role", type=Role, choices=list(Role), required=True)
    parser.add_argument("--directory", required=True, help="the directory's mailbox address")
    parser.add_argument("--model", default="m", help="served model name")
    parser.add_argument("--prefill-ms", type=float, default=0.0, help="from Prefill to token 0")
    parser.add_argument("--step-ms", type=float, default=0.0, help="between two tokens of a room, at least")
    given = parser.parse_args()
    BenchWorker(given.role, given.directory, given.model, given.prefill_ms / 1e3, given.step_ms / 1e3).run()


if __name__ == "__main__":
    main()
