"""The router's side of bench.host, in a process of its own: starts rooms, takes tokens, acknowledges them."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import numpy as np

from router.streams.worker_mail import ACK_EVERY_S
from wire.mailbox import Mailbox
from wire.messages.rooms import Ack, Decode, Tokens
from wire.request import GenerateRequest, SamplingParams

_END_S = 5.0

Rooms = list[tuple[str, list[GenerateRequest]]]
"""Requests by the mailbox address of the decode worker that computes them, their prompts included."""


def requests(
    first_room: int, count: int, prompt_tokens: int, sampling: SamplingParams
) -> list[GenerateRequest]:
    """Requests of one kind, each with a prompt of its own."""
    return [
        GenerateRequest(
            request_id=str(room),
            room=room,
            epoch=1,
            prompt=((np.arange(prompt_tokens) * 7 + room) % 32768).astype("<i4").tobytes(),
            sampling=sampling,
        )
        for room in range(first_room, first_room + count)
    ]


@contextmanager
def running_router(rooms: Rooms) -> Iterator[None]:
    """A process that starts the rooms and takes their output until the end of the context."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(there, rooms), daemon=True)
    process.start()
    try:
        yield
    finally:
        here.close()
        process.join(_END_S)
        if process.is_alive():
            process.kill()
            process.join()


def _serve(end: Connection, rooms: Rooms) -> None:
    """Until the other end of `end` is closed."""
    with Mailbox() as mailbox:
        for worker, requested in rooms:
            for request in requested:
                mailbox.send(worker, Decode(request, None))
        acknowledged_at = 0.0
        upto: dict[str, dict[tuple[int, int], int]] = {}
        while not end.poll():
            for mail in mailbox.wait(ACK_EVERY_S):
                if isinstance(mail.message, Tokens):
                    seen = upto.setdefault(mail.sender, {})
                    for run in mail.message.runs:
                        seen[run.room, run.epoch] = run.start + len(run.tokens)
            if time.monotonic() - acknowledged_at >= ACK_EVERY_S:
                acknowledged_at = time.monotonic()
                for worker, ends in upto.items():
                    mailbox.send(worker, Ack([(*key, position) for key, position in ends.items()]))
                upto.clear()
