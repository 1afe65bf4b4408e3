"""Hostile peers of a decode worker's KV channels: strangers, and such as know the token and lie."""

from __future__ import annotations

import random
import socket
import struct
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context

import numpy as np

from common.errors import TransferError
from common.secrets import ClusterSecret
from kvtransfer.frames import LENGTH, Begin, End, Frame, Granted, Hello, Pools, Staged, bound, encode_frame
from kvtransfer.greeting import introduce
from tests.fuzz.attacker import Attacker
from wire.codec import pack_tokens
from wire.messages.rooms import Decode
from wire.messages.transfer import KVTarget, TransferEndpoint
from wire.request import GenerateRequest, SamplingParams
from wire.security import curve_for

_SILENCE_S = 5.0
_KEPT = 40  # connections that stay open at once
_PAGES = (0, 1, 2, -1, 10**6, 2**62, -(2**63))


def send_peers(decode: str, room: int, count: int, secret: ClusterSecret | None) -> int:
    """Let `count` hostile peers visit the worker with that mailbox, about a room that an attacker opens.

    In a process of their own: pages that it was granted in shared memory are free when it has ended. Returns
    how many there were: none if the worker reserves nothing.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_send_peers, decode, room, count, secret).result()


def _send_peers(decode: str, room: int, count: int, secret: ClusterSecret | None) -> int:
    with Attacker(curve_for(secret), room, ()) as attacker:
        target = _open_room(attacker, decode, room)
        if target is None:
            return 0
        kept: list[socket.socket] = []
        for number in range(count):
            endpoint = target.endpoints[number % len(target.endpoints)]
            with suppress(OSError, TransferError):
                kept.append(_knock(endpoint))
                _visit(kept[-1], endpoint, target, attacker.random)
            while len(kept) > _KEPT:
                kept.pop(0).close()
        for sock in kept:
            sock.close()
    return count


def _open_room(attacker: Attacker, decode: str, room: int) -> KVTarget | None:
    """Where a worker wants the KV of a new room."""
    request = GenerateRequest(
        request_id=f"fuzz-{room}",
        sampling=SamplingParams(max_new_tokens=4),
        room=room,
        epoch=0,
        prompt=pack_tokens(list(range(97, 97 + 20))),
    )
    with attacker.connect(decode) as sender:
        sender.send(attacker.frame_of(Decode(request, prefill=attacker.address)))
        target = attacker.wait_for(KVTarget, room=room)
    assert target is None or isinstance(target, KVTarget)
    return target


def _knock(endpoint: TransferEndpoint) -> socket.socket:
    if endpoint.backend == "shm":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        bound(sock, _SILENCE_S)
        sock.connect("\0" + endpoint.address.removeprefix("@"))
        return sock
    host, _, port = endpoint.address.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=_SILENCE_S)
    bound(sock, _SILENCE_S)
    return sock


def _visit(sock: socket.socket, endpoint: TransferEndpoint, target: KVTarget, draw: random.Random) -> None:
    """Behave in one of the wrong ways. Raises OSError or TransferError when the worker hangs up."""
    match draw.randrange(7):
        case 0:
            return  # silent for as long as it is there
        case 1:
            sock.sendall(LENGTH.pack(100) + b"half")
        case 2:
            sock.sendall(draw.randbytes(draw.randrange(1, 400)))
        case 3:
            sock.sendall(LENGTH.pack(draw.choice((0, 257, 1 << 31, (1 << 32) - 1))) + b"\x91" * 256)
        case 4:
            said = encode_frame(Hello(draw.randbytes(32), draw.randbytes(16)))
            sock.sendall(LENGTH.pack(len(said)) + said)
        case _:
            _lie_with_the_token(sock, endpoint, target, draw)


def _lie_with_the_token(
    sock: socket.socket, endpoint: TransferEndpoint, target: KVTarget, draw: random.Random
) -> None:
    stream = introduce(sock, endpoint)
    descriptors: list[int] | None = [] if endpoint.backend == "shm" else None
    try:
        pools = stream.receive(descriptors)
    finally:
        for descriptor in descriptors or ():
            socket.close(descriptor)
    assert isinstance(pools, Pools), "the worker describes its pools first"
    for _ in range(draw.randrange(1, 6)):
        frame = _lying_frame(target, draw)
        stream.send(frame)
        if isinstance(frame, Begin) and isinstance(stream.receive(), Granted):
            sock.sendall(draw.randbytes(draw.choice((0, 3, 5000))))  # not the pages that it has announced
            return
    if draw.random() < 0.5:
        sock.sendall(struct.pack("<I", draw.choice((0, 5, (16 << 20) + 1, (1 << 32) - 1))) + b"\x91" * 5)


def _lying_frame(target: KVTarget, draw: random.Random) -> Frame:
    pages = np.array([draw.choice(_PAGES) for _ in range(draw.randrange(5))], dtype="<i8").tobytes()
    granted = [one for group in target.groups.values() for one in group.page_ids]
    room = draw.choice((target.room, target.room, 0, -1, 2**62))
    group = draw.choice((*target.groups, "full", "", "x" * 1000))
    return draw.choice(
        (
            Begin(room, draw.choice((0, 0, -1, 7)), group, pages),
            Begin(room, 0, group, pages + b"torn"),
            Begin(target.room, 0, group, np.array(granted * 2, dtype="<i8").tobytes()),
            Begin(target.room, 0, group, np.array(granted, dtype="<i8").tobytes()),
            End(draw.random() < 0.5, draw.random() < 0.5),
            Staged(draw.choice((-1, 10**9)), draw.choice((0, 1, 7))),
            Granted(2**62),
            Hello(b"", b""),
        )
    )
