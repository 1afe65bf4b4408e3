"""An attacker with a mailbox of its own: a stranger, or a member that lies about everything but its name."""

from __future__ import annotations

import random
import time
from typing import Any, Self

import msgspec
import zmq

from tests.fuzz.lies import Liar
from wire.addresses import parse_address
from wire.codec import encode
from wire.mailbox import Mailbox
from wire.messages.any_message import AnyMessage
from wire.records import WorkerRecord
from wire.security import Curve
from wire.senders import NO_MARK

_ANSWER_S = 20.0


class Attacker:
    """With `curve` a member, which proves its own address as it must. Use it as a context manager."""

    def __init__(self, curve: Curve | None, seed: int, targets: tuple[str, ...]) -> None:
        """`targets`: the mailboxes that its lies name."""
        self.curve = curve
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.random = random.Random(seed)
        self._mailbox = Mailbox(curve=curve)
        self.address = self._mailbox.address
        text = self.address.encode()
        self.head = bytes((len(text),)) + text + (NO_MARK if curve is None else curve.proof(self.address))
        self.liar = Liar(seed, (self.address, *targets), proven=curve is not None)

    def connect(self, mailbox: str) -> zmq.Socket[bytes]:
        """A socket that sends frames to a mailbox, in order."""
        socket = self.context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDTIMEO, int(_ANSWER_S * 1000))
        address = parse_address(mailbox)
        if self.curve is not None:
            self.curve.connect(socket, address)
        socket.connect(address.endpoint)
        return socket

    def frame_of(self, message: AnyMessage) -> bytes:
        """An honest frame."""
        payload = encode(message)
        return self.head + len(payload).to_bytes(4, "little") + payload

    def answered(self, kind: type[AnyMessage], **fields: Any) -> bool:
        """Wait until such a message has come. False when it does not come in time."""
        return self.wait_for(kind, **fields) is not None

    def wait_for(self, kind: type[AnyMessage], **fields: Any) -> AnyMessage | None:
        """The first message of that kind with these values. What else comes is left unread."""
        deadline = time.monotonic() + _ANSWER_S
        while (left := deadline - time.monotonic()) > 0:
            for mail in self._mailbox.wait(left):
                message = mail.message
                if isinstance(message, kind) and all(getattr(message, key) == fields[key] for key in fields):
                    return message
        return None

    def close(self) -> None:
        """Leave."""
        self._mailbox.close()
        self.context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def worker_record(raw: dict[str, Any], **changes: Any) -> WorkerRecord:
    """A worker's record as /debug/workers shows it, with other values."""
    return msgspec.structs.replace(msgspec.convert(raw, WorkerRecord), **changes)
