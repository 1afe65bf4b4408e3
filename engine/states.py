"""Runs layers that keep a state: linear attention, Mamba-2 and short convolutions.

A transformers mixer of this kind takes a batch of equally long sequences and a cache. A forward here is a
pack of sequences of any length. So after loading each mixer is wrapped in a PackedMixer, which cuts the pack:
all sequences with one new token run as one batch, and every longer chunk runs by itself. The mixer inside is
transformers' own and is called as `generate` calls it, with a SequenceStates object as its cache.

A forward reads a state from one slot of the pool and writes the new state to another slot or the same one.
transformers' decode kernels update a state in place, so they get a gathered copy, and a slot that is only
read does not change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from engine.device_copies import flat, pinned, upload
from kvcache.pool import MambaPool

if TYPE_CHECKING:
    from engine.batch import ForwardBatch

CONV, RECURRENT = "conv", "recurrent"
"""Names of a layer's tensors in the state group. A short convolution has only CONV."""


class SequenceStates:
    """The methods of a transformers Cache that a mixer calls, for one layer and the sequences of one call.

    `tensors` holds the states by name and is empty before the first token. CONV is [B, channels, kernel]: the
    last inputs of the convolution, with zeros for those before the start. RECURRENT is [B, ...]. The mixer
    may write into them.
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
        """False. transformers records states in order to undo tokens; Baton keeps states in slots instead."""
        del layer_idx
        return False

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> torch.Tensor:
        """Append inputs [B, channels, L]. Returns the inputs that the convolution needs for L outputs."""
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
    """Sequences with equally many new tokens, which go through a mixer together."""

    tokens: slice | torch.Tensor  # the B x L tokens of the pack
    length: int  # L
    reads: torch.Tensor | None  # [B] slots; None: the sequences start here
    writes: torch.Tensor  # [B] slots


Mixer = Callable[[torch.Tensor, SequenceStates], torch.Tensor]
"""[B, L, hidden] and the states before it -> [B, L, hidden]. The states after it are in the cache."""

RunInSlots = Callable[
    [torch.Tensor, dict[str, torch.Tensor], torch.Tensor | None, torch.Tensor], torch.Tensor
]
"""L tokens of each of B sequences, with the states left in their slots: ([B x L, hidden], the layer's tensors
by name, each [slots, ...], slots to read [B], or None if the sequences start here, slots to write [B]) ->
[B x L, hidden]."""


def through_mixer(
    mixer: Mixer,
    kernel: int,
    hidden: torch.Tensor,
    slots: dict[str, torch.Tensor],
    reads: torch.Tensor | None,
    writes: torch.Tensor,
) -> torch.Tensor:
    """A RunInSlots for a mixer, whose convolution has so many inputs: with gathered states."""
    gathered = {} if reads is None else {name: tensor[reads] for name, tensor in slots.items()}
    states = SequenceStates(kernel, gathered)
    out = mixer(hidden.view(len(writes), -1, hidden.shape[-1]), states)
    for name, tensor in slots.items():
        tensor[writes] = states.tensors[name]
    return out.reshape(hidden.shape)


class PackedStates:
    """The state group's pool, and the calls into which the current step is cut. Used from one thread."""

    def __init__(self, pool: MambaPool) -> None:
        self._pool = pool
        self._kernels = {t.layer: t.shape[-1] for t in pool.spec.tensors if t.name == CONV}
        self._names = {
            layer: tuple(t.name for t in pool.spec.tensors if t.layer == layer)
            for layer in pool.spec.layer_ids
        }
        self._calls: list[_Call] = []

    def prepare(self, batch: ForwardBatch) -> None:
        """Cut the batch into calls. Called once per step, before the first layer."""
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

    def fixed(self, sequences: int) -> PackedStates:
        """The same for recorded steps of `sequences` decode rows: their slots are always at the same
        addresses on the device, to which prepare() copies them."""
        return _FixedStates(self._pool, sequences)

    def run(
        self, layer: int, mixer: Mixer, in_slots: RunInSlots | None, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Run one layer over the whole pack: hidden [1, T, hidden] -> the same shape. `in_slots`: what
        computes it instead of the mixer."""
        if len(self._calls) == 1:
            return self._run(layer, mixer, in_slots, hidden[0], self._calls[0])[None]
        out = torch.empty_like(hidden)
        for call in self._calls:
            out[0, call.tokens] = self._run(layer, mixer, in_slots, hidden[0, call.tokens], call)
        return out

    def _run(
        self, layer: int, mixer: Mixer, in_slots: RunInSlots | None, hidden: torch.Tensor, call: _Call
    ) -> torch.Tensor:
        """hidden [B x L, hidden] -> the same shape. Writes the new states to the pool."""
        slots = {name: self._pool.tensor(layer, name) for name in self._names[layer]}
        if in_slots is not None:
            return in_slots(hidden, slots, call.reads, call.writes)
        return through_mixer(mixer, self._kernels[layer], hidden, slots, call.reads, call.writes)

    def _call(
        self,
        tokens: slice | torch.Tensor,
        length: int,
        reads: npt.NDArray[np.int32],
        writes: npt.NDArray[np.int32],
    ) -> _Call:
        return _Call(tokens, length, self._indices(reads) if reads[0] else None, self._indices(writes))

    def _indices(self, values: npt.NDArray[np.integer]) -> torch.Tensor:
        return upload(values.astype(np.int64), self._pool.device)


class _FixedStates(PackedStates):
    """States of decode rows that all have one. Padding reads and writes slot 0."""

    def __init__(self, pool: MambaPool, sequences: int) -> None:
        super().__init__(pool)
        self._slots = torch.zeros(2 * sequences, dtype=torch.int64, device=pool.device)
        reads, writes = self._slots.view(2, sequences)
        self._calls = [_Call(slice(None), 1, reads, writes)]

    def prepare(self, batch: ForwardBatch) -> None:
        assert batch.state is not None, "the batch was built without state slots"
        host = pinned(flat(batch.state.reads, batch.state.writes), self._slots.device)
        self._slots.copy_(host, non_blocking=True)


class PackedMixer(nn.Module):
    """Replaces a transformers mixer with one that takes a pack.

    `cache_name` is the keyword argument in which the mixer expects its cache. The decoder passes the
    PagedCache in it, which holds the states of the step. A mixer that replaced transformers' own has a method
    `run`, which is a RunInSlots.
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
        assert attention_mask is None  # it would mask padding, and a pack has none
        states: PackedStates | None = kwargs[self._cache_name].states
        assert states is not None, "the runner has no pool for the state group"
        return states.run(self._layer, self._mix, getattr(self.mixer, "run", None), hidden_states)

    def _mix(self, hidden: torch.Tensor, states: SequenceStates) -> torch.Tensor:
        out: torch.Tensor = self.mixer(hidden_states=hidden, **{self._cache_name: states})
        return out
