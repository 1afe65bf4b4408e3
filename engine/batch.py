"""One forward pass: what goes in, what comes out, and who computes it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from engine.spec import ModelSpec
from wire.messages import TokenLogprobs

if TYPE_CHECKING:
    from engine.sampling_state import SamplingState

UNKNOWN_TOKEN = -1
"""In `input_ids`: the token that the row's last sampling gave, not known yet when the batch was built."""


@dataclass(slots=True)
class SamplingRow:
    """One sampled sequence. The request owns `state`; the sampler updates it when it samples."""

    state: SamplingState
    position: int  # output position being sampled, 0 for the first output token


@dataclass(frozen=True, slots=True)
class WindowPages:
    """The page table of the sliding-window group, indexed like the batch's own by logical page.

    Pages that no query of this step sees may be 0: they may have been given away.
    """

    page_table: npt.NDArray[np.int32]  # [S, max_pages]
    out_slots: npt.NDArray[np.int64]  # [T]


@dataclass(frozen=True, slots=True)
class StateSlots:
    """Slots of the state group. A forward reads the state before its first new token from one slot and leaves
    the state after its last in another; they may be the same. A slot that is only read is never written:
    that is how a cached state is picked up without a copy.
    """

    reads: npt.NDArray[np.int32]  # [S]; 0: the sequence starts here, from no state
    writes: npt.NDArray[np.int32]  # [S]; 0 for a padding sequence


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """S sequences with T new tokens in all, packed one after the other; N of them are sampled.

    A padding sequence is row 0 with page table 0 and out_slots in page 0: it computes nothing anyone reads.
    """

    input_ids: npt.NDArray[np.int64]  # [T]; UNKNOWN_TOKEN: the last token sampled for that row
    positions: npt.NDArray[np.int64]  # [T]
    out_slots: npt.NDArray[np.int64]  # [T] slot of the primary group that every new token is written to
    rows: npt.NDArray[np.int32]  # [S] req_to_token row of each sequence
    q_lens: npt.NDArray[np.int32]  # [S] new tokens of each sequence in this step, 1 for decode
    seq_lens: npt.NDArray[np.int32]  # [S] context length after this step, new tokens included
    page_table: npt.NDArray[np.int32]  # [S, max_pages] page ids, 0-padded
    sampled: npt.NDArray[np.int32]  # [N] indices into S: whose last token's logits are sampled
    sampling: list[SamplingRow]  # N
    window: WindowPages | None = None  # where the model has a window group
    state: StateSlots | None = None  # where the model has a state group

    def starts(self) -> npt.NDArray[np.int64]:
        """[S + 1]: sequence i's new tokens are packed at [starts[i], starts[i + 1])."""
        starts = np.zeros(len(self.q_lens) + 1, dtype=np.int64)
        np.cumsum(self.q_lens, out=starts[1:])
        return starts

    def for_window(self) -> ForwardBatch:
        """This batch as the window group's attention sees it."""
        assert self.window is not None, "the batch was built without window pages"
        return replace(self, page_table=self.window.page_table, out_slots=self.window.out_slots)


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What one forward sampled, in the order of `ForwardBatch.sampled`."""

    tokens: npt.NDArray[np.int64]  # [N]
    logprobs: list[TokenLogprobs | None]  # [N], None where the request asked for none


class Pending(Protocol):
    """A launched forward."""

    def result(self, timeout_s: float) -> BatchResult:
        """Wait for it. Raises EngineError when the forward failed or takes longer than `timeout_s`."""
        ...


class Engine(Protocol):
    """Runs forwards in the order of their launches."""

    spec: ModelSpec

    def launch(self, batch: ForwardBatch) -> Pending:
        """Queue one forward behind those launched before; never waits for a result."""
        ...

    def close(self) -> None:
        """Finish what is launched and free the engine's threads. Idempotent."""
        ...
