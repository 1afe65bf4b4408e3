"""Gated delta nets, Kimi's delta attention and Mamba-2 on a GPU: decode steps with the states in their slots.

transformers' modules take a layer's step in forty operators on gathered states, five of which go through the
whole state, and gathering and scattering are two more. Here a step is three kernels between the projections,
and a state is read and written once. Prompts stay transformers' own: their parallel form is products, which
is what a GPU is good at.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.cuda.state_ops import conv_step, delta_step, gated_norm, mamba2_step
from engine.delta_forms import HeadsPlace, delta_form
from engine.mamba2_forms import gated_norm as norm_of
from engine.mamba2_forms import projected
from engine.states import CONV, RECURRENT, through_mixer

MOST_TAPS, MOST_DIM = 8, 256
"""Inputs of a convolution, and the sides of a head's state."""

Slots = dict[str, torch.Tensor]


def _float(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().float().contiguous()


class _StateLayer(nn.Module):
    """Replaces a mixer. Its `run` is a RunInSlots (engine/states.py)."""

    def __init__(self, mixer: Any) -> None:
        super().__init__()
        self.mixer = mixer
        bias = mixer.conv1d.bias
        self._conv = _float(mixer.conv1d.weight.squeeze(1)), None if bias is None else _float(bias)

    def run(
        self, hidden: torch.Tensor, states: Slots, reads: torch.Tensor | None, writes: torch.Tensor
    ) -> torch.Tensor:
        """L tokens of each of B rows, [B x L, hidden] -> the same shape."""
        if reads is not None and len(hidden) == len(writes):
            return self._step(hidden, states, reads, writes)
        return through_mixer(self._whole, self.mixer.conv_kernel_size, hidden, states, reads, writes)

    def _whole(self, hidden: torch.Tensor, cache: Any) -> torch.Tensor:
        out: torch.Tensor = self.mixer(hidden_states=hidden, cache_params=cache)
        return out

    def _step(
        self, hidden: torch.Tensor, states: Slots, reads: torch.Tensor, writes: torch.Tensor
    ) -> torch.Tensor:
        raise NotImplementedError

    def _convolved(
        self, inputs: torch.Tensor, states: Slots, reads: torch.Tensor, writes: torch.Tensor
    ) -> torch.Tensor:
        out = torch.empty(inputs.shape, dtype=torch.float32, device=inputs.device)
        conv_step(inputs, states[CONV], *self._conv, reads, writes, out)
        return out


class DeltaSteps(_StateLayer):
    """Of a gated delta net, or of Kimi's delta attention."""

    def __init__(self, mixer: Any) -> None:
        super().__init__(mixer)
        self._form = form = delta_form(mixer)
        self._rate, self._dt_bias = -_float(form.a_log).exp(), _float(form.dt_bias)
        self._norm = _float(form.norm.weight)
        self._values = values = form.ratio * form.value_dim  # of a key head
        widths = {"q": form.key_dim, "k": form.key_dim, "v": values, "z": values, "b": form.ratio}
        widths["a"] = form.ratio * form.decays
        self._parts = tuple((form.places[name], width) for name, width in widths.items())

    def _step(
        self, hidden: torch.Tensor, states: Slots, reads: torch.Tensor, writes: torch.Tensor
    ) -> torch.Tensor:
        form = self._form
        outputs = form.project(hidden)
        q, k, v, z, b, a = (self._heads(outputs, *part) for part in self._parts)
        mixed = torch.cat([part.flatten(1) for part in (q, k, v)], dim=1)
        convolved = self._convolved(mixed, states, reads, writes)
        results = convolved.new_empty(len(hidden), form.key_heads * self._values)
        delta_step(
            convolved, b, a, states[RECURRENT], self._rate, self._dt_bias, reads, writes, results,
            form.bound, form.rates,
        )  # fmt: skip
        out = hidden.new_empty(results.shape)
        is_silu, eps = form.norm.activation == "silu", form.norm.variance_epsilon
        gated_norm(results, z, self._norm, out, form.value_dim, is_silu, False, eps)
        result: torch.Tensor = form.out(out)
        return result

    def _heads(self, outputs: list[torch.Tensor], place: HeadsPlace, width: int) -> torch.Tensor:
        """[B, key heads, width] of one input: a view."""
        output = outputs[place.projection]
        last = place.first + (self._form.key_heads - 1) * place.head + width
        return output[:, place.first : last].unfold(1, width, place.head)


class Mamba2Steps(_StateLayer):
    """Of a Mamba-2 layer."""

    def __init__(self, mixer: Any) -> None:
        super().__init__(mixer)
        self._rate, self._dt_bias = -_float(mixer.A_log).exp(), _float(mixer.dt_bias)
        self._skip, self._gated = _float(mixer.D), norm_of(mixer)
        self._norm = None if self._gated.weight is None else _float(self._gated.weight)

    def _step(
        self, hidden: torch.Tensor, states: Slots, reads: torch.Tensor, writes: torch.Tensor
    ) -> torch.Tensor:
        mixer, norm = self.mixer, self._gated
        width, channels = mixer.intermediate_size, mixer.conv_dim
        parts = [width, channels, mixer.num_heads]
        gates, inputs, steps = torch.split(projected(mixer, hidden), parts, dim=1)
        convolved = self._convolved(inputs, states, reads, writes)
        results = convolved.new_empty(len(hidden), width)
        mamba2_step(
            convolved, steps, states[RECURRENT], self._rate, self._dt_bias, self._skip, reads, writes,
            results, mixer.n_groups,
        )  # fmt: skip
        out = hidden.new_empty(results.shape)
        gated_norm(results, gates[:, None], self._norm, out, norm.group, True, norm.gates_first, norm.eps)
        result: torch.Tensor = mixer.out_proj(out)
        return result


def delta_steps(mixer: Any) -> nn.Module | None:
    """What computes a delta net's steps; None if the kernels do not."""
    form = delta_form(mixer)
    is_computed = (
        _is_convolved(mixer)
        and form.norm.activation in ("silu", "sigmoid")
        and len(form.a_log) == form.key_heads * form.ratio
        and max(form.key_dim, form.value_dim) <= MOST_DIM
    )
    return DeltaSteps(mixer) if is_computed else None


def mamba2_steps(mixer: Any) -> nn.Module | None:
    """The same of a Mamba-2 layer."""
    is_computed = _is_convolved(mixer) and max(mixer.head_dim, mixer.ssm_state_size) <= MOST_DIM
    return Mamba2Steps(mixer) if is_computed else None


def _is_convolved(mixer: Any) -> bool:
    is_computed: bool = mixer.activation == "silu" and mixer.conv_kernel_size <= MOST_TAPS
    return is_computed
