"""One forward pass: its input, its result, and the interface of the engine that computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from engine.spec import ModelSpec
from wire.request import TokenLogprobs

if TYPE_CHECKING:
    from engine.grammar import GrammarCompiler
    from engine.sampling_state import SamplingState

UNKNOWN_TOKEN = -1
"""In `input_ids`: the token last sampled for this row, which was not known when the batch was built."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The sampled sequences. Each request owns its state, the same object in every step."""

    states: tuple[SamplingState, ...]  # N
    positions: npt.NDArray[np.int64]  # [N] output position being sampled, 0 for the first output token


@dataclass(frozen=True, slots=True)
class WindowPages:
    """The page table of the sliding-window group. Like the batch's own it is indexed by logical page.

    Entries of pages that no query of this step sees may be 0, because the request may have freed the pages.
    """

    page_table: npt.NDArray[np.int32]  # [S, max_pages]
    out_slots: npt.NDArray[np.int64]  # [T]


@dataclass(frozen=True, slots=True)
class StateSlots:
    """Slots of the state group.

    A forward reads the state before its first new token from one slot and writes the state after its last
    new token to another slot or to the same one. A slot that is only read is never written, so a forward can
    start from a cached state without copying it.
    """

    reads: npt.NDArray[np.int32]  # [S]; 0: the sequence starts here, without a state
    writes: npt.NDArray[np.int32]  # [S]; 0 for a padding sequence


class ReadRows(NamedTuple):
    """The new tokens of a batch whose hidden states are read: for these alone decoders compute what no page
    depends on."""

    rows: npt.NDArray[np.int64]  # [n] places in the pack, ascending
    starts: npt.NDArray[np.int64]  # [S + 1]: sequence i's are rows[starts[i]:starts[i + 1]]


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """A chunk of a prompt whose tokens' log-probabilities are wanted."""

    sequence: int  # index into S
    targets: npt.NDArray[np.int64]  # [n] the tokens that follow the first n of its new tokens
    best: int  # how many of the best tokens of each place are told, too


@dataclass(frozen=True, slots=True)
class PooledPrompt:
    """A chunk of a prompt whose hidden states are wanted, as one sum."""

    sequence: int  # index into S
    skip: int  # the first of its new tokens that do not count


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """S sequences with T new tokens in total, packed one after the other. N of the sequences are sampled.

    A padding sequence has row 0, page table 0 and out_slots in page 0. Its results are not used.
    """

    input_ids: npt.NDArray[np.int64]  # [T]; UNKNOWN_TOKEN: the last token sampled for that row
    positions: npt.NDArray[np.int64]  # [T]
    out_slots: npt.NDArray[np.int64]  # [T] slot in the primary group that each new token is written to
    rows: npt.NDArray[np.int32]  # [S] req_to_token row of each sequence
    q_lens: npt.NDArray[np.int32]  # [S] new tokens of each sequence in this step, 1 for decode
    seq_lens: npt.NDArray[np.int32]  # [S] context length after this step, new tokens included
    page_table: npt.NDArray[np.int32]  # [S, max_pages] page ids, 0-padded
    sampled: npt.NDArray[np.int32]  # [N] indices into S: the sequences to sample after their last token
    sampling: SamplingRows  # N
    window: WindowPages | None = None  # set if the model has a window group
    state: StateSlots | None = None  # set if the model has a state group
    scored: tuple[ScoredPrompt, ...] = ()
    pooled: tuple[PooledPrompt, ...] = ()

    def starts(self) -> npt.NDArray[np.int64]:
        """[S + 1]: the new tokens of sequence i are at [starts[i], starts[i + 1]) of the pack."""
        starts = np.zeros(len(self.q_lens) + 1, dtype=np.int64)
        np.cumsum(self.q_lens, out=starts[1:])
        return starts

    def sampled_places(self) -> npt.NDArray[np.int64]:
        """[N]: where in the pack the last new tokens of the sampled sequences are."""
        return self.starts()[1:][self.sampled] - 1

    def read_lens(self) -> npt.NDArray[np.int32]:
        """[S]: of how many last new tokens of each sequence the hidden states are read: 0, 1 or all. Of the
        others only whether they are finite is looked at."""
        lens = np.zeros(len(self.q_lens), np.int32)
        lens[self.sampled] = 1
        whole = [one.sequence for one in self.scored] + [one.sequence for one in self.pooled]
        lens[whole] = self.q_lens[whole]
        return lens

    def read_rows(self) -> ReadRows | None:
        """Where the new tokens are whose hidden states are read; None: all are. A step with one new token for
        each sequence counts as all: it is a decode step, of which nothing but padding is not read."""
        if len(self.q_lens) == len(self.positions):
            return None
        lens, ends = self.read_lens(), self.starts()[1:]
        starts = np.zeros(len(lens) + 1, np.int64)
        np.cumsum(lens, out=starts[1:])
        count = int(starts[-1])
        if count == len(self.positions):
            return None
        return ReadRows(np.repeat(ends - starts[1:], lens) + np.arange(count), starts)

    def only(self, reads: ReadRows) -> ForwardBatch:
        """The batch of the new tokens at `reads.rows`, of which there is one at least, when their keys and
        values are in their pages. It has no state, and nothing is scored or pooled."""
        lens = np.diff(reads.starts).astype(np.int32)
        some, rows, window = np.flatnonzero(lens), reads.rows, self.window
        return ForwardBatch(
            input_ids=self.input_ids[rows],
            positions=self.positions[rows],
            out_slots=self.out_slots[rows],
            rows=self.rows[some],
            q_lens=lens[some],
            seq_lens=self.seq_lens[some],
            page_table=self.page_table[some],
            sampled=np.searchsorted(some, self.sampled).astype(np.int32),
            sampling=self.sampling,
            window=window and WindowPages(window.page_table[some], window.out_slots[rows]),
        )

    def for_window(self) -> ForwardBatch:
        """This batch with the page table and the slots of the window group."""
        assert self.window is not None, "the batch was built without window pages"
        return replace(self, page_table=self.window.page_table, out_slots=self.window.out_slots)


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What one forward sampled, in the order of `ForwardBatch.sampled`.

    `failures`: sequence of the batch (an index into S) -> why that sequence has no result. What the forward
    wrote for it is not valid KV, and its entry in `tokens` is not used. The other sequences are valid.
    `refusals`: the same for sequences that would fail everywhere, because of what their requests ask for.
    `scored`: sequence -> the log-probabilities of its ScoredPrompt's targets.
    `pooled`: sequence -> [hidden], the sum of what the last layer says, after its norm, of the tokens of its
    PooledPrompt.
    """

    tokens: npt.NDArray[np.int64]  # [N]
    logprobs: list[TokenLogprobs | None]  # [N], None where the request asked for none
    failures: Mapping[int, str] = field(default_factory=dict)
    refusals: Mapping[int, str] = field(default_factory=dict)
    scored: Mapping[int, list[TokenLogprobs]] = field(default_factory=dict)
    pooled: Mapping[int, npt.NDArray[np.float32]] = field(default_factory=dict)


class Pending(Protocol):
    """A launched forward."""

    def result(self, timeout_s: float) -> BatchResult:
        """Wait until the device has done all of the forward. Raises EngineError if the forward failed, and
        DeviceLost if it takes longer than `timeout_s`. Before this returns, or raises an EngineError that is
        no DeviceLost, the forward may still read and write every page of its batch."""
        ...


class Engine(Protocol):
    """Runs forwards in the order in which they are launched."""

    spec: ModelSpec

    @property
    def grammars(self) -> GrammarCompiler | None:
        """None: requests with a grammar cannot be computed."""
        ...

    def launch(self, batch: ForwardBatch) -> Pending:
        """Queue one forward behind those launched before. Never waits for a result."""
        ...

    def close(self) -> None:
        """Finish the launched forwards and end the engine's threads. Idempotent."""
        ...


@runtime_checkable
class NoticesLoss(Protocol):
    """An Engine that may lose a part of itself between two forwards."""

    def check(self) -> None:
        """Raises DeviceLost if no later forward will run. From any thread."""
        ...
