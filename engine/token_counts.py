"""TokenCounts: how often each token has occurred in the sequences that have penalties."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling_state import SamplingState

ToDevice = Callable[[npt.NDArray[np.generic]], torch.Tensor]


class TokenCounts:
    """A slot of [vocab] counts for each penalised sequence of the batch, changed in place as it is sampled.

    A sequence keeps its slot while it is in the batch. It is counted anew from its prompt and outputs when it
    joins, and whenever it does not go on at the position after its last one.
    """

    def __init__(self, vocab_size: int, device: torch.device, to_device: ToDevice) -> None:
        self._vocab_size = vocab_size
        self._to_device = to_device
        # Grown as slots are needed: most batches have no penalties, and a slot takes 5 bytes a token.
        self.seen = torch.zeros(
            0, vocab_size, dtype=torch.bool, device=device
        )  # in the prompt or the outputs
        self.outputs = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._slots: dict[SamplingState, int] = {}
        self._free: list[int] = []
        self._order: list[SamplingState] = []
        self._places = np.empty(0, dtype=np.int64)  # of `_order` in the batch
        self._expected = np.empty(0, dtype=np.int64)  # the output positions that they sample next
        self._place_index = self._slot_starts = torch.empty(0, dtype=torch.int64, device=device)

    def join(self, states: Sequence[SamplingState]) -> None:
        """These sequences are sampled from now on. Those of them that are penalised have slots. If the device
        has no memory for these it raises, and may be called again."""
        expected = dict(zip(self._order, self._expected.tolist(), strict=True))
        self._order, self._expected = [], np.empty(0, dtype=np.int64)
        places = [i for i, state in enumerate(states) if state.is_penalised]
        order = [states[i] for i in places]
        for state in self._slots.keys() - set(order):
            self._free.append(self._slots.pop(state))
        for state in order:
            if state not in self._slots:
                self._slots[state] = self._take_slot()
        self._order, self._places = order, np.array(places, dtype=np.int64)
        self._expected = np.array([expected.get(state, -1) for state in order], dtype=np.int64)
        if order:
            self._place_index = self._to_device(self._places)
            self._slot_starts = self._to_device(self.slots(order) * self._vocab_size)

    def slots(self, states: Sequence[SamplingState]) -> npt.NDArray[np.int64]:
        """int64 [n]: the slots of penalised sequences of the batch."""
        return np.array([self._slots[state] for state in states], dtype=np.int64)

    def follow(self, positions: npt.NDArray[np.int64]) -> None:
        """The sequences are about to be sampled at these output positions [N]."""
        if not self._order:
            return
        positions = positions[self._places]
        for i in np.flatnonzero(positions != self._expected).tolist():
            self._recount(self._order[i], int(positions[i]))
        self._expected = positions + 1

    def add(self, tokens: torch.Tensor) -> None:
        """The batch's sequences have sampled these tokens, int64 [N]."""
        if not self._order:
            return
        places = self._slot_starts + tokens.index_select(0, self._place_index)
        self.outputs.view(-1).index_add_(0, places, torch.ones_like(places, dtype=torch.int32))
        self.seen.view(-1).index_fill_(0, places, True)

    def _recount(self, state: SamplingState, position: int) -> None:
        slot, outputs = self._slots[state], np.array(state.outputs[:position], dtype=np.int64)
        ids = self._to_device(outputs)
        self.outputs[slot].zero_().index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        seen = np.concatenate([state.prompt_ids, outputs]).astype(np.int64)
        self.seen[slot].zero_().index_fill_(0, self._to_device(seen), True)

    def _take_slot(self) -> int:
        if not self._free:
            have, more = len(self.seen), max(len(self.seen), 4)
            seen = torch.cat([self.seen, self.seen.new_zeros(more, self._vocab_size)])
            self.outputs = torch.cat([self.outputs, self.outputs.new_zeros(more, self._vocab_size)])
            self.seen = seen
            self._free.extend(range(have, have + more))
        return self._free.pop()
