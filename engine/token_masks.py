"""TokenMasks: which tokens may come next in a batch's sequences by their grammars, the limits of their
thoughts and their bad words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.completion import Completion
from engine.device_copies import FetchedTensor
from engine.errors import NothingAllowed
from engine.grammar import keep_only, mask_words, take_out
from engine.sampling_state import SamplingState
from engine.token_counts import ToDevice

_WAIT_S = 120.0  # for the forward before this one; its own result is waited for as long
_ALL = 0  # the slot in which every token is allowed


class TokenMasks:
    """A slot of bits [vocab] for each sequence of the batch that is masked, filled in every step in which it
    depends on the tokens before; else it allows all.

    A step is launched before the host knows the tokens of the one before. Those were copied to the host
    without waiting for them, and are read here after this step's forward is queued: the device computes it
    while the host fills the masks.
    """

    def __init__(self, vocab_size: int, to_device: ToDevice, completion: Callable[[], Completion]) -> None:
        """`completion` marks the end of what is queued on the device."""
        self._words = mask_words(vocab_size)
        self._to_device = to_device
        self._completion = completion
        self._rows = np.full((1, self._words), -1, dtype=np.int32)
        self._order: list[SamplingState] = []
        self._places: list[int] = []  # of `_order` in the batch
        self._filled: set[int] = set()  # the slots in which not every token may be allowed
        self._newest: _Sampled | None = None  # what the last step sampled in masked sequences
        self.bits = torch.empty(0, dtype=torch.uint8)  # [1 + masked sequences, 4 * words]
        self.refusals: dict[int, str] = {}  # place in the batch -> why no token may be sampled there

    def join(self, states: Sequence[SamplingState]) -> None:
        """These sequences are sampled from now on."""
        self._places = [i for i, state in enumerate(states) if state.is_masked]
        self._order = [states[i] for i in self._places]
        self._free(self._filled)
        self._filled = set()
        if len(self._rows) <= len(self._order):
            self._rows = np.full((2 * len(self._order) + 1, self._words), -1, dtype=np.int32)
        if self._order:
            self._upload()

    def slots(self, states: Sequence[SamplingState]) -> npt.NDArray[np.int64]:
        """int64 [n]: the slots of sequences of the batch; of those without a mask one that allows all."""
        slot_of = {state: slot for slot, state in enumerate(self._order, start=1)}
        return np.array([slot_of.get(state, _ALL) for state in states], dtype=np.int64)

    def follow(self, positions: npt.NDArray[np.int64]) -> None:
        """The sequences are about to be sampled at these output positions [N]."""
        self.refusals = {}
        if not self._order:
            return
        masked = set()
        for slot, (place, state) in enumerate(zip(self._places, self._order, strict=True), start=1):
            position = int(positions[place])
            if not state.is_masked_at(position):
                continue
            masked.add(slot)
            why = self._fill(state, position, self._rows[slot])
            if why:
                self._free([slot])  # some token is sampled, and not used
                self.refusals[place] = why
        self._free(self._filled - masked)
        if masked or self._filled:
            self._upload()
        self._filled = masked

    def add(self, tokens: torch.Tensor, positions: npt.NDArray[np.int64]) -> None:
        """The batch's sequences sample these tokens, int64 [N], at these positions [N]."""
        self._newest = None
        places = {
            state: place
            for place, state in zip(self._places, self._order, strict=True)
            if state.is_masked_at(int(positions[place]) + 1)
        }
        if places:
            self._newest = _Sampled(places, positions, FetchedTensor(tokens), self._completion())

    def _upload(self) -> None:
        self.bits = self._to_device(self._rows[: len(self._order) + 1].view(np.uint8))

    def _free(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._rows[slot] = -1

    def _fill(self, state: SamplingState, position: int, row: npt.NDArray[np.int32]) -> str:
        """Fill a sequence's row. Returns why it cannot be."""
        grammar, thoughts, outputs = state.grammar, state.thoughts, state.outputs
        row[:] = -1
        try:
            newest = self._token_before(state, position)
            if grammar is not None:
                grammar.follow(outputs, position, newest)
                grammar.fill(row)
            if thoughts is not None and (token := thoughts.forced(outputs, position, newest)) is not None:
                keep_only(row, token)
            elif state.bad_words is not None:
                take_out(row, state.bad_words.banned(outputs, position, newest))
        except NothingAllowed as error:
            return str(error)
        return ""

    def _token_before(self, state: SamplingState, position: int) -> int | None:
        """What was sampled before this position, if its result has not been taken yet."""
        if len(state.outputs) >= position or self._newest is None:
            return None
        return self._newest.token(state, position - 1)


class _Sampled:
    """The tokens of one step, on their way to the host."""

    def __init__(
        self,
        places: dict[SamplingState, int],
        positions: npt.NDArray[np.int64],
        tokens: FetchedTensor,
        completion: Completion,
    ) -> None:
        self._places = places
        self._positions = positions
        self._tokens = tokens
        self._completion = completion

    def token(self, state: SamplingState, position: int) -> int | None:
        """What was sampled for a sequence, if it was sampled at this position. Waits for the step."""
        place = self._places.get(state)
        if place is None or self._positions[place] != position:
            return None
        self._completion.wait(_WAIT_S)
        return int(self._tokens.numpy()[place])
