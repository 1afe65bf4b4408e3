"""A Llama-shaped decoder whose forward is C++ (decoder_item.h), but for mixtures of experts.

Python computes the embedding look-up and the rotary angles. With transformers modules, the Python code of 28
layers takes milliseconds per step. A model with gated MLPs is one call. Any other MLP is computed outside: a
mixture, router and experts, stays transformers'. There the call returns, and the next one goes on after it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from common.freed_memory import return_freed_memory
from engine.cpu.attention import MAX_HEAD_DIM, CpuAttention
from engine.cpu.decoder_call import PARTS, DecoderCall, LayerWeights
from engine.cpu.linear import GROUP, Matrix, Packer, Weights
from engine.cpu.op import kernels
from engine.decoder_parts import (
    DECODERS,
    INTERLEAVED,
    ROTATED_IN_PART,
    SHARING_DECODERS,
    Place,
    Rope,
    attention_parts,
    embedding,
    embedding_scale,
    gate_and_up,
    is_gated,
    is_mixture,
    layer_mlp,
    layer_norms,
    layer_scale,
    mlp_outputs,
    norm_eps,
    norm_weight,
    places,
    residual_scale,
    ropes,
)
from engine.kv_sharing import own_layers
from engine.layer_inputs import layer_input_parts, layer_inputs
from engine.paged_layers import DecoderOutput, PagedLayers
from engine.parallel.sums import is_divided

ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}
"""Its name in config.json -> baton::Activation in decoder.h."""


def fusible(model: Any) -> bool:
    """Whether FusedDecoder computes the same as this transformers decoder."""
    config: Any = model.config
    return (
        type(model).__name__ in (*DECODERS, *SHARING_DECODERS)
        and not is_divided(model)
        and all(p.dtype == torch.bfloat16 and p.device.type == "cpu" for p in _parameters(model))
        and config.hidden_size % 32 == 0
        and all(
            config.num_attention_heads * dim % 32 == 0 and dim % 16 == 0 and dim <= MAX_HEAD_DIM
            for dim in {layer.self_attn.head_dim for layer in model.layers}
        )
        and _is_rotated(model)
        and getattr(model, "hidden_size_per_layer_input", 0) % 32 == 0
        and (own_layers(config) == config.num_hidden_layers or _is_inside(model))
    )


def _is_inside(model: Any) -> bool:
    """Whether no MLP is computed outside. Of a decoder with layers that share keys and values none may be."""
    return all(_gated_width(layer_mlp(layer), model.config) is not None for layer in model.layers)


def _parameters(model: Any) -> Iterator[nn.Parameter]:
    """All but those of mixtures, whose routers may be float32."""
    mixtures = filter(is_mixture, map(layer_mlp, model.layers))
    apart = {id(parameter) for mixture in mixtures for parameter in mixture.parameters()}
    return (parameter for parameter in model.parameters() if id(parameter) not in apart)


def _activation(config: Any) -> str:
    return getattr(config, "hidden_activation", None) or str(config.hidden_act)


def _gated_width(mlp: Any, config: Any) -> int | None:
    """The width of a gated MLP that is computed here. None: it is computed outside."""
    if not is_gated(mlp) or _activation(config) not in ACTIVATIONS:
        return None
    width = len(gate_and_up(mlp)[0])
    return width if width % 32 == 0 else None


def _is_rotated(model: Any) -> bool:
    """Whether all values of a head are rotated, or the first ones, where transformers does that, too."""
    widths = [2 * len(rope.frequencies) for rope in ropes(model).values()]
    if type(model).__name__ in ROTATED_IN_PART:
        return len(set(widths)) == 1
    return all(
        place.rope is None or widths[place.rope] == layer.self_attn.head_dim
        for place, layer in zip(places(model), model.layers, strict=True)
    )


def _of_one_width(found: Iterable[Rope]) -> list[Rope]:
    """Rotary embeddings whose tables can be stacked: narrower ones are filled up."""
    every = list(found)
    width = max(len(rope.frequencies) for rope in every)
    return [Rope(pad(rope.frequencies, (0, width - len(rope.frequencies))), rope.scale) for rope in every]


class FusedDecoder(nn.Module):
    """Replaces a `fusible` model. Keeps its embedding, rotary frequencies and those of its MLPs that are
    computed outside, and packs its other weights."""

    def __init__(self, model: Any, packer: Packer) -> None:
        super().__init__()
        self._packer = packer
        self.embed_tokens: Any = embedding(model)
        self._embedding_scale = embedding_scale(model)
        self._ropes = _of_one_width(ropes(model).values())
        self._kept: list[Any] = []  # packs and float32 vectors to which the pointers below point
        self._library = kernels()
        assert self._library.baton_decoder_call_bytes() == ctypes.sizeof(DecoderCall)
        assert self._library.baton_layer_weights_bytes() == ctypes.sizeof(LayerWeights)
        self.layer_inputs = layer_inputs(model)
        self.outside = nn.ModuleDict()
        self._layers = (LayerWeights * len(model.layers))()
        for i, place in enumerate(places(model)):
            layer = model.layers[i]
            self._fill(self._layers[i], layer, place)
            width = _gated_width(layer_mlp(layer), model.config)
            if width is not None:
                self._fill_mlp(self._layers[i], layer_mlp(layer), width)
            else:
                self.outside[str(i)] = layer_mlp(layer)
            del layer
            model.layers[i] = nn.Identity()  # frees the original weights, which are packed now
            return_freed_memory()
        self._call = DecoderCall(
            layers=ctypes.addressof(self._layers),
            final_norm=self._vector(norm_weight(model.norm)),
            layer_count=len(self._layers),
            tail=next((i for i, layer in enumerate(self._layers) if layer.shares), len(self._layers) - 1),
            hidden=model.config.hidden_size,
            layer_input_width=0 if self.layer_inputs is None else self.layer_inputs.width,
            ropes=len(self._ropes),
            rotary=2 * len(self._ropes[0].frequencies),
            interleaved=type(model).__name__ in INTERLEAVED,
            activation=ACTIVATIONS.get(_activation(model.config), 0),  # 0: no MLP is computed here
            residual_scale=residual_scale(model),
            eps=norm_eps(model.norm),
        )
        self._groups = {layer.group for layer in self._layers}
        self._parts = (ctypes.c_double * len(PARTS))()
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, paged: PagedLayers, **_: Any
    ) -> DecoderOutput:
        """input_ids, position_ids [1, T] -> last_hidden_state bfloat16 [1, T, hidden], normalised.

        Of tokens that are not read (PagedLayers.reads) it is 0, or has a NaN where a K or V is not finite.
        """
        residual = self.embed_tokens(input_ids[0]).float()
        if self._embedding_scale != 1.0:
            residual *= self._embedding_scale
        cos, sin = self._rotation(position_ids[0])
        result = torch.empty(residual.shape, dtype=torch.bfloat16)
        call = self._call
        call.tokens = len(residual)
        call.residual, call.result = residual.data_ptr(), result.data_ptr()
        call.cos, call.sin = cos.data_ptr(), sin.data_ptr()
        if self.layer_inputs is not None:
            inputs = self.layer_inputs(input_ids[0], residual.bfloat16())
            assert inputs.is_contiguous()
            assert inputs.dtype == torch.bfloat16
            call.layer_inputs = inputs.data_ptr()
        for number in self._groups:
            attention = (paged.full, paged.window)[number]
            assert isinstance(attention, CpuAttention), "a fused decoder needs the CPU attention backend"
            group = call.groups[number]
            group.attention = ctypes.pointer(attention.call)
            group.tiles, group.layer_bytes, group.v_bytes = attention.tiles
        call.read_count = call.tokens
        if paged.reads is not None:
            rows, starts = paged.reads
            call.reads, call.read_starts, call.read_count = rows.ctypes.data, starts.ctypes.data, len(rows)
        needed = self._library.baton_decoder_scratch_bytes(ctypes.byref(call))
        if needed + 64 > len(self._scratch):
            self._scratch = torch.empty(needed + 64, dtype=torch.uint8)
        call.scratch = -(-self._scratch.data_ptr() // 64) * 64
        self._run(call, residual.shape)
        return DecoderOutput(result[None])

    def _run(self, call: DecoderCall, shape: torch.Size) -> None:
        """`shape`: of hidden states, [T, hidden]."""
        address = ctypes.byref(call)
        inputs = torch.empty(shape if self.outside else (0,), dtype=torch.bfloat16)
        call.mlp.inputs = inputs.data_ptr()
        layer = self._library.baton_decoder(address, -1)
        while layer < call.layer_count:
            outputs = mlp_outputs(self.outside[str(layer)], inputs[: call.mlp.rows]).contiguous()
            assert outputs.dtype == torch.bfloat16
            call.mlp.outputs = outputs.data_ptr()
            layer = self._library.baton_decoder(address, layer)

    def start_profile(self) -> None:
        """Start to measure the time of each part of a step, from zero."""
        self._parts = (ctypes.c_double * len(PARTS))()
        self._call.part_seconds = ctypes.addressof(self._parts)

    def take_profile(self) -> list[float]:
        """Stop measuring. Returns the seconds spent in each of PARTS since start_profile."""
        self._call.part_seconds = None
        return list(self._parts)

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [T] -> cosines and sines, each float32 [ropes, T, rotary / 2]."""
        angles = [positions.float()[:, None] * rope.frequencies for rope in self._ropes]
        pairs = zip(angles, self._ropes, strict=True)
        tables = [(angle.cos() * rope.scale, angle.sin() * rope.scale) for angle, rope in pairs]
        if len(tables) == 1:
            return tables[0]
        cosines, sines = zip(*tables, strict=True)
        return torch.stack(cosines), torch.stack(sines)

    def _fill(self, into: LayerWeights, layer: Any, place: Place) -> None:
        attention, norms = attention_parts(layer.self_attn), layer_norms(layer)
        into.qkv = self._pack_rows(attention.qkv)
        into.out = self._pack_rows([layer.self_attn.o_proj.weight])
        into.input_norm, into.out_norm = self._norm(norms.before_attention), self._norm(norms.after_attention)
        into.mlp_norm, into.down_norm = self._norm(norms.before_mlp), self._norm(norms.after_mlp)
        into.q_norm, into.k_norm = self._norm(attention.q_norm), self._norm(attention.k_norm)
        if attention.qkv_bias is not None:
            into.qkv_bias = self._vector(torch.cat(attention.qkv_bias))
        if layer.self_attn.o_proj.bias is not None:
            into.out_bias = self._vector(layer.self_attn.o_proj.bias)
        if attention.sinks is not None:
            into.sinks = self._vector(attention.sinks)
        if attention.v_norm is not None:
            into.v_norm = self._vector(attention.v_norm)
        if (inputs := layer_input_parts(layer)) is not None:
            into.input_gate, into.input_out = self._pack_rows([inputs.gate]), self._pack_rows([inputs.out])
            into.input_out_norm = self._norm(inputs.norm)
        into.scale = layer_scale(layer)
        into.group, into.place, into.shares = place.group, place.place, place.shares
        into.rope = -1 if place.rope is None else place.rope

    def _fill_mlp(self, into: LayerWeights, mlp: Any, width: int) -> None:
        into.intermediate = width
        into.gate_up = self._pack_alternating(*gate_and_up(mlp))
        into.down = self._pack_rows([mlp.down_proj.weight])

    def _norm(self, norm: Any) -> int | None:
        return None if norm is None else self._vector(norm_weight(norm))

    def _vector(self, values: torch.Tensor) -> int:
        kept = values.detach().float().contiguous()
        self._kept.append(kept)
        return kept.data_ptr()

    def _pack_rows(self, weights: Sequence[torch.Tensor]) -> Weights:
        """One weight after the other."""
        matrices, group = [], 0
        for weight in weights:
            matrices.append(Matrix(weight, group))
            group += len(weight) // GROUP
        return self._pack(matrices)

    def _pack_alternating(self, gate: torch.Tensor, up: torch.Tensor) -> Weights:
        """Groups of both in turns."""
        halves = enumerate((gate, up))
        return self._pack([Matrix(half, i, 2) for i, half in halves])

    def _pack(self, matrices: list[Matrix]) -> Weights:
        rows = sum(len(matrix.weight) for matrix in matrices)
        pack = self._packer.pack(rows, matrices[0].weight.shape[1], matrices)
        self._kept.append(pack)
        return pack.weights()
