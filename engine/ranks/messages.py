"""What rank 0 of a worker and its other ranks tell one another, over a Unix socket of their own.

Rank 0 says LoadPart, then OpenPools, RecordDecode on GPUs, and then Compute again and again. A rank answers
all but Compute with Ready, LoadPart twice: when it is there, and when it has loaded. It may answer with
CannotStart, and ends then. It ends when rank 0 hangs up. Pages are not sent: all ranks map the same memory.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from multiprocessing.connection import Connection
from socket import SO_SNDTIMEO, SOL_SOCKET, recv_fds, send_fds, socket
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt

from engine.batch import ForwardBatch, PooledPrompt, SamplingRows, StateSlots, WindowPages
from engine.config import EngineConfig

_NONE = SamplingRows((), np.zeros(0, np.int64))
_MAX_FDS = 16
_SEND_BOUND = struct.pack("ll", 30, 0)  # seconds in which a rank that is not stopped reads


class LoadPart(msgspec.Struct, frozen=True, tag="load_part"):
    """Load part `rank` of `size`. GPUs meet in the file `meeting`. On CPUs the descriptors of a
    SharedMemoryGroup's memory and socket follow, and a rank waits `timeout_s` for another in a forward."""

    config: EngineConfig
    rank: int
    size: int
    timeout_s: float = 0.0
    meeting: str = ""


class OpenPools(msgspec.Struct, frozen=True, tag="open_pools"):
    """The pages of each group, by name. The descriptors of their memory follow in this order, of those that
    have bytes. `own`: groups that are in memory of this rank alone."""

    num_pages: dict[str, int]
    page_size: int
    own: list[str]


class RecordDecode(msgspec.Struct, frozen=True, tag="record_decode"):
    """Record decode steps (DecodeLimits) together with rank 0. They are computed from records then."""

    sequences: int
    context_pages: int
    rows: int


class GiveBack(msgspec.Struct, frozen=True, tag="give_back"):
    """Give the GPU what is not used; pools that were open are not used any more."""


class Window(msgspec.Struct, frozen=True, array_like=True):
    """WindowPages."""

    page_table: bytes
    out_slots: bytes


class States(msgspec.Struct, frozen=True, array_like=True):
    """StateSlots."""

    reads: bytes
    writes: bytes


class Compute(msgspec.Struct, frozen=True, tag="compute"):
    """A ForwardBatch without what only rank 0 needs: its tokens, which are shared when they are known, and
    what is done with hidden states. `read`: the sequences of which all hidden states are read. `heads`: the
    tokens of the pack that go through the head after the forward, in so many calls; those of a recorded step
    are not named."""

    positions: bytes
    out_slots: bytes
    rows: bytes
    q_lens: bytes
    seq_lens: bytes
    page_table: bytes
    sampled: bytes
    read: list[int]
    window: Window | None
    states: States | None
    heads: list[bytes]

    @classmethod
    def of(cls, batch: ForwardBatch, heads: Sequence[npt.NDArray[np.int64]]) -> Self:
        """For the other ranks."""
        window, states = batch.window, batch.state
        return cls(
            positions=batch.positions.tobytes(),
            out_slots=batch.out_slots.tobytes(),
            rows=batch.rows.tobytes(),
            q_lens=batch.q_lens.tobytes(),
            seq_lens=batch.seq_lens.tobytes(),
            page_table=batch.page_table.tobytes(),
            sampled=batch.sampled.tobytes(),
            read=[*(one.sequence for one in batch.scored), *(one.sequence for one in batch.pooled)],
            window=Window(window.page_table.tobytes(), window.out_slots.tobytes()) if window else None,
            states=States(states.reads.tobytes(), states.writes.tobytes()) if states else None,
            heads=[tokens.tobytes() for tokens in heads],
        )

    def batch(self) -> ForwardBatch:
        """With 0 for each token."""
        q_lens, positions = _int32(self.q_lens), _int64(self.positions)
        window, states = self.window, self.states

        def table(data: bytes) -> npt.NDArray[np.int32]:
            return _int32(data).reshape(len(q_lens), -1)

        return ForwardBatch(
            input_ids=np.zeros(len(positions), np.int64),
            positions=positions,
            out_slots=_int64(self.out_slots),
            rows=_int32(self.rows),
            q_lens=q_lens,
            seq_lens=_int32(self.seq_lens),
            page_table=table(self.page_table),
            sampled=_int32(self.sampled),
            sampling=_NONE,
            window=WindowPages(table(window.page_table), _int64(window.out_slots)) if window else None,
            state=StateSlots(_int32(states.reads), _int32(states.writes)) if states else None,
            pooled=tuple(PooledPrompt(sequence, 0) for sequence in self.read),
        )

    def head_calls(self) -> list[npt.NDArray[np.int64]]:
        """The tokens of each call."""
        return [_int64(tokens) for tokens in self.heads]


def _int32(data: bytes) -> npt.NDArray[np.int32]:
    return np.frombuffer(bytearray(data), np.int32)  # torch wants memory that can be written


def _int64(data: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(bytearray(data), np.int64)


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """What was asked for is done."""


class CannotStart(msgspec.Struct, frozen=True, tag="cannot_start"):
    """A ConfigError."""

    key: str
    problem: str
    remedy: str


Order = LoadPart | OpenPools | RecordDecode | GiveBack | Compute
Answer = Ready | CannotStart


class RankSocket:
    """One end of the socket between rank 0 and another rank. Raises OSError or EOFError if the other has
    ended, or does not read."""

    def __init__(self, sock: socket) -> None:
        """Own `sock`."""
        self._socket = sock
        sock.setsockopt(SOL_SOCKET, SO_SNDTIMEO, _SEND_BOUND)
        self._frames = Connection(sock.dup().detach())  # bytes with their length; nothing is pickled
        self._encoder = msgspec.msgpack.Encoder()
        self._orders = msgspec.msgpack.Decoder(Order)
        self._answers = msgspec.msgpack.Decoder(Answer)

    def send(self, message: Order | Answer) -> None:
        self._frames.send_bytes(self._encoder.encode(message))

    def send_fds(self, fds: list[int]) -> None:
        """After the message that announces them."""
        if fds:
            send_fds(self._socket, [b"\0"], fds)

    def order(self) -> Order:
        """Wait for rank 0."""
        order: Order = self._orders.decode(self._frames.recv_bytes())
        return order

    def receive_fds(self, count: int) -> list[int]:
        """Wait for descriptors, which the caller then owns."""
        assert count <= _MAX_FDS, "more pools than a model has"
        return recv_fds(self._socket, 1, count)[1] if count else []

    def answer(self, timeout_s: float) -> Answer:
        """Wait for the other rank. Raises TimeoutError."""
        if not self._frames.poll(timeout_s):
            raise TimeoutError
        answer: Answer = self._answers.decode(self._frames.recv_bytes())
        return answer

    def close(self) -> None:
        """Hang up."""
        self._frames.close()
        self._socket.close()
