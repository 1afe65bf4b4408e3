"""A worker without a model that keeps to the wire protocol, and injects faults.

Its tokens are a checksum of (prompt, choice, position), so a test knows the answer whatever the path, the
number of restarts, and the messages lost on the way.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
import struct
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from common.host import host_identity
from tests.support.members import curve_of
from wire.codec import unpack_tokens
from wire.holds import HoldReport
from wire.mailbox import Mail, Mailbox
from wire.messages.any_message import AnyMessage
from wire.messages.base import Receipt, kind_of
from wire.messages.caches import (
    CacheCleared,
    CacheTier,
    ClearCache,
    ForgetTenant,
    Inspect,
    Inspected,
    TenantForgotten,
    TierRemoval,
)
from wire.messages.directory import Announce, Announced, Join, Joined, Replaced, Withdraw
from wire.messages.rooms import (
    Abort,
    Ack,
    Claim,
    Claimed,
    ClaimedRoom,
    Decode,
    Prefill,
    Rejected,
    RejectKind,
    Resend,
    Reserved,
    RoomStatus,
    Timeline,
    Tokens,
)
from wire.messages.transfer import GroupTarget, KVDone, KVTarget, Release, TransferEndpoint
from wire.records import GroupLayout, Role, WorkerLoad, WorkerRecord, layout_digest
from wire.request import FinishReason, GenerateRequest, TokenLogprobs, TokenRun
from wire.retransmitter import RetransmitKey, Retransmitter
from wire.stages import RequestStage, Stamp, stamp

VOCABULARY = 256
VECTOR = struct.pack("<4f", 3.0, 4.0, 0.0, 12.0)  # of every prompt, if nothing else is said
_ids = itertools.count(1)


def token_at(prompt: bytes, choice: int, position: int) -> int:
    """The token of the fake model."""
    return zlib.crc32(prompt + choice.to_bytes(4, "little") + position.to_bytes(4, "little")) % VOCABULARY


def expected_tokens(prompt: bytes, count: int, choice: int = 0) -> list[int]:
    """The tokens of a room without faults."""
    return [token_at(prompt, choice, position) for position in range(count)]


@dataclass
class Faults:
    """Faults of the messages that the worker sends or gets: probabilities in [0, 1], delays in seconds."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    longest_delay_s: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def fates(self) -> list[float]:
        """The delay of each copy of a message; no copy: it is lost. Different delays reorder messages."""
        chance = self._random.random
        copies = 0 if chance() < self.drop else 2 if chance() < self.duplicate else 1
        return [chance() * self.longest_delay_s if chance() < self.delay else 0.0 for _ in range(copies)]


@dataclass
class _Room:
    request: GenerateRequest
    router: str
    peer: str | None
    ready: bool = False  # may emit
    upto: int = 0  # next position to emit
    acked: int = 0
    target_from: str | None = None  # P: who sent KVTarget
    stamps: list[Stamp] = field(default_factory=list)


def group_layout(
    page_size: int = 16, dtype: str = "float32", tile_order: str = "plain", kind: str = "full"
) -> GroupLayout:
    """A small page."""
    shape = (2, 2, 2, page_size, 8)
    return GroupLayout("full", kind, shape, dtype, tile_order, page_size, 4 * 2 * 2 * 2 * page_size * 8)


class FakeWorker:
    """A thread with a mailbox. Call `close` or `die` at the end."""

    def __init__(
        self,
        role: Role,
        directory: str,
        *,
        worker_id: str | None = None,
        model: str = "tiny",
        fingerprint: str = "fake",
        version: str = "",
        faults: Faults | None = None,
        step_s: float = 0.0,
        prefill_s: float = 0.0,
        token: Callable[[bytes, int, int], int] = token_at,
        vector: Callable[[bytes], bytes] = lambda _prompt: VECTOR,
        eos_at: int | None = None,
        eos_token: int | None = None,
        load: WorkerLoad | None = None,
        reject: RejectKind | None = None,
        max_context: int = 4096,
        layout: GroupLayout | None = None,
        secret: str | None = None,
        events: str = "",
        replay: str = "",
        cached_tokens: int = 0,
        announce_s: float = 0.2,
    ) -> None:
        self.mailbox = Mailbox(curve=curve_of(secret))
        roomy = WorkerLoad(free_tokens=1 << 20, headroom_tokens=1 << 20, headroom_rows=1 << 10)
        self.record = WorkerRecord(
            id=worker_id or f"{role}-{next(_ids)}",
            incarnation=0,
            role=role,
            mailbox=self.mailbox.address,
            events=events,
            replay=replay,
            model=model,
            fingerprint=fingerprint,
            version=version,
            groups=(layout or group_layout(),),
            max_context_tokens=max_context,
            total_tokens=1 << 20,
            max_running_requests=256,
            pid=os.getpid(),
            host=host_identity(),
            transfer_backends=("shm",),
            load=load or roomy,
        )
        self.reject = reject
        self.silent = False  # reads messages and answers none
        self.wait_at: int | None = None  # output tokens with which every room waits until this is None again
        self.claimable = True  # gives its rooms, those that have ended too, to a router that claims them
        self.seen: list[AnyMessage] = []
        self.leased = threading.Event()
        self.waiting = 0.0  # its part of the rooms that wait in routers, as the directory says
        self.replaced = threading.Event()
        self.aborted: set[tuple[int, int]] = set()
        self._directory = directory
        self._nonce = random.getrandbits(62) + 1
        self._faults = faults or Faults()
        self._step_s = step_s
        self._prefill_s = prefill_s
        self._token = token
        self._vector = vector
        self._eos_at = eos_at
        self._eos_token = eos_token
        self._cached = cached_tokens
        self._announce_s = announce_s
        self._rooms: dict[tuple[int, int], _Room] = {}
        self._early: dict[tuple[int, int], Mail] = {}  # KVTarget or KVDone before Prefill or Decode
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._retransmitter = Retransmitter(self._send, first_interval_s=0.05)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=self.record.id, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Withdraw from the directory and end."""
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join(timeout=5.0)  # it must not announce itself after Withdraw
            self.mailbox.send(self._directory, Withdraw(self.record.id, self.record.incarnation))
            self.mailbox.close()

    def die(self) -> None:
        """End without a message, as a killed worker does."""
        self._closing.set()
        self._thread.join(timeout=5.0)
        self.mailbox.close()

    def drain(self) -> None:
        """Refuse new rooms and reject those that run, so that the router starts them elsewhere."""
        self.reject = RejectKind.DRAINING
        self.record = msgspec.structs.replace(self.record, draining=True)
        self._after(0.0, self._announce)
        self._after(0.0, self._hand_over)

    def open_rooms(self) -> int:
        """How many rooms have begun here and not ended."""
        return len(self._rooms)

    def count(self, kind: type[Prefill | Decode | Abort]) -> int:
        """The number of different (room, epoch) of which a message of this kind came."""
        return len({(m.room, m.epoch) for m in list(self.seen) if isinstance(m, kind)})

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        next_announce = 0.0
        next_step = 0.0
        while not self._closing.is_set():
            for mail in self.mailbox.wait(self._wait_s()):
                for delay in self._faults.fates():
                    self._after(delay, partial(self._take, mail))
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                heapq.heappop(self._timers)[2]()
            if now >= next_announce:
                next_announce = now + self._announce_s
                self._announce()
            if now >= next_step:
                next_step = now + self._step_s
                self._step()
            self._retransmitter.tick(now)

    def _wait_s(self) -> float:
        if any(room.ready for room in list(self._rooms.values())):
            return max(0.0005, self._step_s / 4)
        return 0.005 if self._timers or len(self._retransmitter) else 0.02

    def _after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._order), action))

    def _send(self, to: str, message: AnyMessage) -> None:
        for delay in self._faults.fates():
            if delay == 0.0:
                self.mailbox.send(to, message)
            else:
                self._after(delay, partial(self.mailbox.send, to, message))

    def _announce(self) -> None:
        if self.replaced.is_set():
            return
        if self.record.incarnation:
            self.mailbox.send(self._directory, Announce(self.record, self._nonce))
        else:
            self.mailbox.send(self._directory, Join(self.record.id, self._nonce))

    def _take(self, mail: Mail) -> None:
        sender, message = mail
        self.seen.append(message)
        if self.silent:
            return
        if isinstance(message, Joined):
            if not self.record.incarnation:
                self.record = msgspec.structs.replace(self.record, incarnation=message.incarnation)
                self._announce()
        elif isinstance(message, Announced):
            self.waiting = message.waiting
            self.leased.set()
        elif isinstance(message, Replaced):
            self.replaced.set()
        elif isinstance(message, Prefill | Decode):
            self._begin(sender, message)
        elif isinstance(message, KVTarget | KVDone | Release):
            self._send(sender, Receipt(message.room, message.epoch, kind_of(message)))
            self._peer_sent(mail)
        elif isinstance(message, Receipt):
            self._retransmitter.answered(RetransmitKey(sender, message.room, message.epoch, message.of))
        elif isinstance(message, Abort):
            self._send(sender, Receipt(message.room, message.epoch, "abort"))
            self.aborted.add((message.room, message.epoch))
            self._rooms.pop((message.room, message.epoch), None)
        elif isinstance(message, Resend):
            self._again(sender, message)
        elif isinstance(message, Ack):
            for room, epoch, upto in message.items:
                held = self._rooms.get((room, epoch))
                if held is not None:
                    held.acked = max(held.acked, upto)
        elif isinstance(message, Claim):
            self._send(sender, Claimed(message.token, self._claim(sender, message.rooms)))
        elif isinstance(message, Inspect):
            report = HoldReport([], {}) if message.what == "leases" else {"what": message.what}
            self._send(sender, Inspected(message.token, msgspec.json.encode(report).decode()))
        elif isinstance(message, ClearCache):
            self._send(sender, CacheCleared(message.token, dict.fromkeys(message.tiers, 3)))
        elif isinstance(message, ForgetTenant):
            removed: dict[CacheTier, TierRemoval] = {"device": TierRemoval(5, 640)}
            self._send(sender, TenantForgotten(message.token, 2, removed, locked_pages=1))

    def _begin(self, sender: str, message: Prefill | Decode) -> None:
        request = message.request
        key = (request.room, request.epoch)
        self._send(sender, Receipt(*key, kind_of(message)))
        if key in self.aborted or key in self._rooms:
            return
        if self.reject is not None:
            self._send(sender, Rejected(*key, self.reject, f"{self.record.id} says {self.reject}"))
            return
        base = len(request.forced)
        if isinstance(message, Prefill):
            room = _Room(request, sender, message.decode, upto=base)
            room.stamps.append(stamp(RequestStage.PREFILL_WAITING))
            self._rooms[key] = room
            self._after(self._prefill_s, lambda: self._prefilled(key))
        else:
            room = _Room(request, sender, message.prefill, ready=False, upto=base)
            room.stamps.append(stamp(RequestStage.DECODE_BOOTSTRAP))
            self._rooms[key] = room
            if message.prefill is None:
                self._after(self._prefill_s, lambda: self._ready(key))
            else:
                self._send(sender, Reserved(*key))
                pages = -(-len(unpack_tokens(request.prompt)) // 16)
                target = KVTarget(
                    *key, self.record.id, self.record.host,
                    layout_digest(self.record.groups), [TransferEndpoint("shm", "")],
                    {"full": GroupTarget(0, list(range(pages)))}, 0,
                )  # fmt: skip
                self._send_until_answered(message.prefill, target)
        if key in self._early:
            self._peer_sent(self._early.pop(key))

    def _peer_sent(self, mail: Mail) -> None:
        sender, message = mail
        assert isinstance(message, KVTarget | KVDone | Release)
        key = (message.room, message.epoch)
        room = self._rooms.get(key)
        if room is None:
            self._early[key] = mail
        elif isinstance(message, KVTarget):
            room.target_from = sender
            self._ship(key)
        elif isinstance(message, KVDone):
            assert message.first_token == self._next(room, len(room.request.forced))
            self._ready(key)
        else:
            del self._rooms[key]

    def _prefilled(self, key: tuple[int, int]) -> None:
        room = self._rooms.get(key)
        if room is not None:
            room.stamps.append(stamp(RequestStage.PREFILL_FORWARD))
            room.upto += 1
            self._send_tokens(room.router, [self._run_of(room, room.upto - 1)])
            self._ship(key)

    def _ship(self, key: tuple[int, int]) -> None:
        room = self._rooms.get(key)
        if room is None or room.target_from is None or room.upto == len(room.request.forced):
            return
        base = len(room.request.forced)
        if all(known.stage is not RequestStage.PREFILL_TRANSFER_KV_CACHE for known in room.stamps):
            room.stamps.append(stamp(RequestStage.PREFILL_TRANSFER_KV_CACHE))  # not of a repeated KVTarget
        if self._finish(room, base) is not None:
            self._send_until_answered(room.target_from, Release(*key))
        else:
            context = len(unpack_tokens(room.request.prompt)) + base
            done = KVDone(*key, context, self._next(room, base), 1024, cached_tokens=self._cached)
            self._send_until_answered(room.target_from, done)
        self._send(room.router, Timeline(*key, self.record.id, room.stamps, ended_ns=time.time_ns()))

    def _ready(self, key: tuple[int, int]) -> None:
        room = self._rooms.get(key)
        if room is not None and not room.ready and room.upto == len(room.request.forced):
            room.ready = True  # a repeated KVDone must not start again what has finished
            room.stamps.append(stamp(RequestStage.DECODE_LOOP))

    def _step(self) -> None:
        by_router: dict[str, list[TokenRun]] = {}
        for room in list(self._rooms.values()):
            waits = self.wait_at is not None and room.upto >= self.wait_at
            if room.ready and not waits and self.record.role is Role.DECODE:
                room.upto += 1
                run = self._run_of(room, room.upto - 1)
                by_router.setdefault(room.router, []).append(run)
                if run.finish is not None:
                    room.ready = False
                    key = (room.request.room, room.request.epoch)
                    told = Timeline(*key, self.record.id, room.stamps, 1024, "shm", ended_ns=time.time_ns())
                    self._send(room.router, told)
        for router, runs in by_router.items():
            self._send_tokens(router, runs)

    def _again(self, sender: str, message: Resend) -> None:
        room = self._rooms.get((message.room, message.epoch))
        if room is None:
            if (message.room, message.epoch) not in self.aborted:
                text = "unknown room"
                self._send(sender, Rejected(message.room, message.epoch, RejectKind.UNKNOWN, text))
        elif message.start < room.upto:
            self._send_tokens(sender, [self._run_of(room, message.start, room.upto - message.start)])
        else:
            waits_for = "" if room.ready or room.peer is None else room.peer
            self._send(sender, RoomStatus(message.room, message.epoch, room.stamps[-1].stage, 0, waits_for))

    def _claim(self, router: str, rooms: list[int]) -> list[ClaimedRoom]:
        claimed = []
        for (number, epoch), room in self._rooms.items():
            if number in rooms and self.claimable:
                room.router = router
                claimed.append(ClaimedRoom(number, epoch, len(room.request.forced)))
        return claimed

    def _hand_over(self) -> None:
        for (number, epoch), room in list(self._rooms.items()):
            self._send(room.router, Rejected(number, epoch, RejectKind.DRAINING, "leaving"))
            del self._rooms[number, epoch]

    def _run_of(self, room: _Room, start: int, count: int = 1) -> TokenRun:
        request = room.request
        tokens = [self._next(room, position) for position in range(start, start + count)]
        logprobs = None
        if request.sampling.top_logprobs is not None:
            k = request.sampling.top_logprobs
            logprobs = [
                TokenLogprobs(0.0)  # not known: another epoch's
                if position < len(request.forced)
                else TokenLogprobs(-0.25, [((token + i) % VOCABULARY, -0.25 - i) for i in range(k)])
                for position, token in enumerate(tokens, start)
            ]
        finish = self._finish(room, start + count - 1)
        scores = None
        if start == 0 and request.sampling.prompt_logprobs is not None:
            prompt = unpack_tokens(request.prompt).tolist()
            k = request.sampling.prompt_logprobs
            scores = [
                TokenLogprobs(-0.125, [((token + i) % VOCABULARY, -0.125 - i) for i in range(k)])
                for token in prompt[1:]
            ]
        pooled = None
        if start == 0 and request.sampling.pooling is not None:
            pooled = self._vector(request.prompt)
        return TokenRun(
            request.room, request.epoch, start, tokens, logprobs, finish, self._cached, scores, pooled
        )

    def _finish(self, room: _Room, position: int) -> FinishReason | None:
        if self._eos_at == position or self._next(room, position) == self._eos_token:
            return FinishReason.STOP
        return FinishReason.LENGTH if position + 1 == room.request.sampling.max_new_tokens else None

    def _next(self, room: _Room, position: int) -> int:
        return self._token(room.request.prompt, room.request.choice, position)

    def _send_tokens(self, router: str, runs: list[TokenRun]) -> None:
        self._send(router, Tokens(self.record.id, runs))

    def _send_until_answered(self, to: str, message: KVTarget | KVDone | Release) -> None:
        key = RetransmitKey(to, message.room, message.epoch, kind_of(message))
        self._retransmitter.say(key, message, time.monotonic(), timeout_s=10.0)
