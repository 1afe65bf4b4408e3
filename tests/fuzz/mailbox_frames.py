"""Hostile frames to mailboxes: the router's, a worker's, the directory's."""

from __future__ import annotations

from collections.abc import Callable

import zmq
from msgspec.structs import replace

from tests.fuzz.attacker import Attacker
from tests.fuzz.findings import Findings
from wire.messages.caches import Inspect, Inspected
from wire.messages.directory import Announce, Announced
from wire.records import WorkerRecord

_AT_ONCE = 500  # frames between two questions
_LYING_HEADS = 0.05


def send_frames(attacker: Attacker, mailbox: str, count: int, findings: Findings) -> None:
    """Send `count` frames to a router or a worker, which must still answer questions in between."""

    def ask(socket: zmq.Socket[bytes], number: int) -> bool:
        socket.send(attacker.frame_of(Inspect("rooms", number)))
        return attacker.answered(Inspected, token=number)

    _send(attacker, mailbox, count, findings, ask)


def send_directory_frames(
    attacker: Attacker, mailbox: str, count: int, record: WorkerRecord, findings: Findings
) -> None:
    """Send `count` frames to the directory, which must still grant leases in between. `record` is the
    attacker's: it announces incarnations above that one."""

    def ask(socket: zmq.Socket[bytes], number: int) -> bool:
        announced = replace(record, mailbox=attacker.address, incarnation=record.incarnation + number)
        socket.send(attacker.frame_of(Announce(announced)))
        return attacker.answered(Announced, worker=record.id, incarnation=announced.incarnation)

    _send(attacker, mailbox, count, findings, ask)


def _send(
    attacker: Attacker,
    mailbox: str,
    count: int,
    findings: Findings,
    ask: Callable[[zmq.Socket[bytes], int], bool],
) -> None:
    """`ask` sends an honest question behind the frames, and says whether it was answered."""
    with attacker.connect(mailbox) as socket:
        for start in range(0, count, _AT_ONCE):
            frames = min(_AT_ONCE, count - start)
            for _ in range(frames):
                lies = attacker.random.random() < _LYING_HEADS
                socket.send(attacker.liar.frame(attacker.liar.wrong_head() if lies else attacker.head))
            findings.frames += frames
            if not ask(socket, start + frames):
                findings.hangs += 1
                findings.tell(f"{mailbox} does not answer after {start + frames} frames")
                return
