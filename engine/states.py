"""The seam to layers that keep a state: linear attention, Mamba-2 and short convolutions.

A transformers mixer of this kind takes a batch of equally long sequences and a cache; our forward is a pack
of sequences of any length. So each mixer is wrapped, after loading, in a PackedMixer that cuts the pack: all
sequences with one new token run as one batch, every longer chunk by itself. The mixer inside is transformers'
own, called as `generate` calls it, and SequenceStates is the cache it meets.

A forward reads a state from one slot of the pool and leaves the new one in another (or the same). Decode
kernels update states in place, hence they are given a gathered copy, and a slot that is only read stays as it
was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from kvcache.pool import MambaPool

if TYPE_CHECKING:
    from engine.batch import ForwardBatch

CONV, RECURRENT = "conv", "recurrent"
"""Names of a layer's tensors in the state group. A short convolution has only the first."""


class SequenceStates:
    """What a mixer asks of a transformers Cache, for the sequences of one call and for one layer.

    `tensors` by name, empty before the first token: CONV [B, channels, kernel], the last inputs of the
    convolution with zeros for those before the start; RECURRENT [B, ...]. The mixer may write into them.
    """

    def __init__(self, kernel: int, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self._kernel = kernel

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The inputs before these tokens; None at the start of a sequence."""
        del layer_idx, state_idx
        return self.tensors.get(CONV)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The state before these tokens; None at the start of a sequence."""
        del layer_idx, state_idx
        return self.tensors.get(RECURRENT)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Recording is for undoing tokens, which a slot per checkpoint does here."""
        del layer_idx
        return False

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> torch.Tensor:
        """Append inputs [B, channels, L]. Returns what the convolution needs for those L outputs."""
        del layer_idx
        if CONV in self.tensors:
            seen = torch.cat([self.tensors[CONV], conv_states], dim=-1)
        else:
            missing = max(0, self._kernel - conv_states.shape[-1])
            seen = nn.functional.pad(conv_states, (missing, 0))
        self.tensors[CONV] = seen[..., -self._kernel :]
        return seen

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> torch.Tensor:
        """Replace the state."""
        del layer_idx
        self.tensors[RECURRENT] = recurrent_states
        return recurrent_states


class _Call(NamedTuple):
    """Sequences of equal length that go through a mixer together."""

    tokens: slice | torch.Tensor  # of the pack: B x L of them
    length: int  # L
    reads: torch.Tensor | None  # [B] slots; None: the sequences start here
    writes: torch.Tensor  # [B] slots


Mixer = Callable[[torch.Tensor, SequenceStates], torch.Tensor]
"""[B, L, hidden] and the states before it -> [B, L, hidden], the states after it left in the cache."""


class PackedStates:
    """The state group of a model: its pool, and how the step at hand is cut. Used from one thread."""

    def __init__(self, pool: MambaPool) -> None:
        self._pool = pool
        self._kernels = {t.layer: t.shape[-1] for t in pool.spec.tensors if t.name == CONV}
        self._names = {
            layer: tuple(t.name for t in pool.spec.tensors if t.layer == layer)
            for layer in pool.spec.layer_ids
        }
        self._calls: list[_Call] = []

    def prepare(self, batch: ForwardBatch) -> None:
        """Once per step, before the first layer."""
        assert batch.state is not None, "the batch was built without state slots"
        starts, reads, writes = batch.starts(), batch.state.reads, batch.state.writes
        single, fresh = batch.q_lens == 1, reads == 0
        self._calls = []
        for rows in (np.flatnonzero(single & ~fresh), np.flatnonzero(single & fresh)):
            if len(rows):
                everything = len(rows) == len(batch.q_lens)
                tokens = slice(None) if everything else self._indices(starts[rows])
                self._calls.append(self._call(tokens, 1, reads[rows], writes[rows]))
        for row in np.flatnonzero(~single).tolist():
            tokens = slice(int(starts[row]), int(starts[row + 1]))
            length = int(batch.q_lens[row])
            self._calls.append(self._call(tokens, length, reads[row : row + 1], writes[row : row + 1]))

    def run(self, layer: int, mixer: Mixer, hidden: torch.Tensor) -> torch.Tensor:
        """One layer over the whole pack: hidden [1, T, hidden] -> the same shape."""
        if len(self._calls) == 1:
            return self._run(layer, mixer, hidden[0], self._calls[0])[None]
        out = torch.empty_like(hidden)
        for call in self._calls:
            out[0, call.tokens] = self._run(layer, mixer, hidden[0, call.tokens], call)
        return out

    def _run(self, layer: int, mixer: Mixer, hidden: torch.Tensor, call: _Call) -> torch.Tensor:
        """hidden [B x L, hidden] -> the same shape; the new states are in the pool."""
        pool, gathered = self._pool, {}
        if call.reads is not None:
            gathered = {name: pool.tensor(layer, name)[call.reads] for name in self._names[layer]}
        states = SequenceStates(self._kernels[layer], gathered)
        out = mixer(hidden.view(-1, call.length, hidden.shape[-1]), states)
        for name in self._names[layer]:
            pool.tensor(layer, name)[call.writes] = states.tensors[name]
        return out.reshape(hidden.shape)

    def _call(
        self,
        tokens: slice | torch.Tensor,
        length: int,
        reads: npt.NDArray[np.int32],
        writes: npt.NDArray[np.int32],
    ) -> _Call:
        return _Call(tokens, length, self._indices(reads) if reads[0] else None, self._indices(writes))

    def _indices(self, values: npt.NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._pool.device)


class PackedMixer(nn.Module):
    """Stands where a transformers mixer stood, and takes a pack in its place.

    `cache_name` is the keyword under which the mixer is handed its cache. The decoder hands over our
    PagedCache under that name, and it knows the states of the step.
    """

    def __init__(self, mixer: nn.Module, cache_name: str) -> None:
        super().__init__()
        self.mixer = mixer
        self._layer: int = mixer.layer_idx  # type: ignore[assignment]
        self._cache_name = cache_name

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """[1, T, hidden] -> the same shape."""
        assert attention_mask is None  # of padding, and a pack has none
        states: PackedStates | None = kwargs[self._cache_name].states
        assert states is not None, "the runner was given no pool of states"
        return states.run(self._layer, self._mix, hidden_states)

    def _mix(self, hidden: torch.Tensor, states: SequenceStates) -> torch.Tensor:
        out: torch.Tensor = self.mixer(hidden_states=hidden, **{self._cache_name: states})
        return out
