"""A dense Llama-shaped decoder whose whole forward is one C++ call (decoder_item.h).

Python computes only the embedding look-up and the rotary angles. With transformers modules, the Python code
of 28 layers takes milliseconds per step.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import nn

from common.freed_memory import return_freed_memory
from engine.cpu.attention import MAX_HEAD_DIM, CpuAttention
from engine.cpu.linear import GROUP, Matrix, Packer, Weights
from engine.cpu.op import AttentionCall, kernels
from engine.paged_layers import DecoderOutput, PagedLayers
from engine.parallel.sums import is_divided

MODELS = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "SeedOssModel")
"""The transformers classes that FusedDecoder computes."""

PARTS = ("qkv", "rope", "attention", "out", "gate_up", "down", "norm")
"""The parts of a step, in the order in which the C++ call counts their time (decoder.h: Part)."""


class LayerWeights(ctypes.Structure):
    """`baton::LayerWeights` in decoder.h."""

    _fields_ = (
        *((name, Weights) for name in ("qkv", "out", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, ctypes.c_void_p) for name in ("qkv_bias", "out_bias")),
    )


class DecoderCall(ctypes.Structure):
    """`baton::DecoderCall` in decoder.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "final_norm", "residual", "result", "cos", "sin")),
        ("scratch", ctypes.c_void_p),
        ("attention", ctypes.POINTER(AttentionCall)),
        ("layer_bytes", ctypes.c_int64),
        ("v_bytes", ctypes.c_int64),
        ("tiles", ctypes.c_void_p),
        ("reads", ctypes.c_void_p),
        ("read_starts", ctypes.c_void_p),
        ("read_count", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("layer_count", "hidden", "intermediate")),
        ("eps", ctypes.c_float),
        ("part_seconds", ctypes.c_void_p),
    )


def fusible(model: Any) -> bool:
    """Whether FusedDecoder computes the same as this transformers decoder."""
    config: Any = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return (
        type(model).__name__ in MODELS
        and not is_divided(model)
        and config.hidden_act == "silu"
        and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        and getattr(config, "sliding_window", None) is None
        and not getattr(config, "mlp_bias", False)
        and all(p.dtype == torch.bfloat16 and p.device.type == "cpu" for p in model.parameters())
        and all(n % 32 == 0 for n in (config.hidden_size, config.intermediate_size))
        and config.num_attention_heads * head_dim % 32 == 0
        and head_dim % 16 == 0
        and head_dim <= MAX_HEAD_DIM
        and model.rotary_emb.inv_freq.numel() * 2 == head_dim  # all of a head is rotated
    )


class FusedDecoder(nn.Module):
    """Replaces a `fusible` model. Keeps its embedding and rotary frequencies, and packs its other weights."""

    def __init__(self, model: Any, packer: Packer) -> None:
        super().__init__()
        self._packer = packer
        self.embed_tokens = model.embed_tokens
        self._frequencies = model.rotary_emb.inv_freq.float()
        self._rotary_scale = float(model.rotary_emb.attention_scaling)
        self._kept: list[Any] = []  # packs and float32 vectors to which the pointers below point
        self._library = kernels()
        assert self._library.baton_decoder_call_bytes() == ctypes.sizeof(DecoderCall)
        assert self._library.baton_layer_weights_bytes() == ctypes.sizeof(LayerWeights)
        self._layers = (LayerWeights * len(model.layers))()
        for i in range(len(model.layers)):
            self._fill(self._layers[i], model.layers[i])
            model.layers[i] = nn.Identity()  # frees the original weights, which are packed now
            return_freed_memory()
        self._call = DecoderCall(
            layers=ctypes.addressof(self._layers),
            final_norm=self._vector(model.norm.weight),
            layer_count=len(self._layers),
            hidden=model.config.hidden_size,
            intermediate=model.config.intermediate_size,
            eps=model.norm.variance_epsilon,
        )
        self._parts = (ctypes.c_double * len(PARTS))()
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, paged: PagedLayers, **_: Any
    ) -> DecoderOutput:
        """input_ids, position_ids [1, T] -> last_hidden_state bfloat16 [1, T, hidden], normalised.

        Of tokens that are not read (PagedLayers.reads) it is 0, or has a NaN where a K or V is not finite.
        """
        residual = self.embed_tokens(input_ids[0]).float()
        angles = position_ids[0].float()[:, None] * self._frequencies
        cos, sin = angles.cos() * self._rotary_scale, angles.sin() * self._rotary_scale
        result = torch.empty(residual.shape, dtype=torch.bfloat16)
        call = self._call
        call.tokens = len(residual)
        call.residual, call.result = residual.data_ptr(), result.data_ptr()
        call.cos, call.sin = cos.data_ptr(), sin.data_ptr()
        attention = paged.full
        assert isinstance(attention, CpuAttention), "a fused decoder needs the CPU attention backend"
        call.attention = ctypes.pointer(attention.call)
        call.tiles, call.layer_bytes, call.v_bytes = attention.tiles
        call.read_count = call.tokens
        if paged.reads is not None:
            rows, starts = paged.reads
            call.reads, call.read_starts, call.read_count = rows.ctypes.data, starts.ctypes.data, len(rows)
        needed = self._library.baton_decoder_scratch_bytes(ctypes.byref(call))
        if needed + 64 > len(self._scratch):
            self._scratch = torch.empty(needed + 64, dtype=torch.uint8)
        call.scratch = -(-self._scratch.data_ptr() // 64) * 64
        self._library.baton_decoder(ctypes.byref(call))
        return DecoderOutput(result[None])

    def start_profile(self) -> None:
        """Start to measure the time of each part of a step, from zero."""
        self._parts = (ctypes.c_double * len(PARTS))()
        self._call.part_seconds = ctypes.addressof(self._parts)

    def take_profile(self) -> list[float]:
        """Stop measuring. Returns the seconds spent in each of PARTS since start_profile."""
        self._call.part_seconds = None
        return list(self._parts)

    def _fill(self, into: LayerWeights, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        into.qkv = self._pack_rows([part.weight for part in parts])
        into.out = self._pack_rows([attention.o_proj.weight])
        into.gate_up = self._pack_alternating(mlp.gate_proj.weight, mlp.up_proj.weight)
        into.down = self._pack_rows([mlp.down_proj.weight])
        into.input_norm = self._vector(layer.input_layernorm.weight)
        into.mlp_norm = self._vector(layer.post_attention_layernorm.weight)
        if hasattr(attention, "q_norm"):
            into.q_norm = self._vector(attention.q_norm.weight)
            into.k_norm = self._vector(attention.k_norm.weight)
        if attention.q_proj.bias is not None:
            into.qkv_bias = self._vector(torch.cat([part.bias for part in parts]))
        if attention.o_proj.bias is not None:
            into.out_bias = self._vector(attention.o_proj.bias)

    def _vector(self, values: torch.Tensor) -> int:
        kept = values.detach().float().contiguous()
        self._kept.append(kept)
        return kept.data_ptr()

    def _pack_rows(self, weights: list[torch.Tensor]) -> Weights:
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
