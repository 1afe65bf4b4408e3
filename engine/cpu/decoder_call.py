"""The arguments of the fused decoder's C++ call (decoder.h)."""

from __future__ import annotations

import ctypes

from engine.cpu.linear import Weights
from engine.cpu.op import AttentionCall

PARTS = ("qkv", "rope", "attention", "out", "gate_up", "down", "norm")
"""The parts of a step, in the order in which the C++ call counts their time (decoder.h: Part)."""


class LayerWeights(ctypes.Structure):
    """`baton::LayerWeights` in decoder.h."""

    _fields_ = (
        *((name, Weights) for name in ("qkv", "out", "gate_up", "down", "input_gate", "input_out")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "mlp_norm", "out_norm", "down_norm")),
        *((name, ctypes.c_void_p) for name in ("input_out_norm", "q_norm", "k_norm", "v_norm")),
        *((name, ctypes.c_void_p) for name in ("qkv_bias", "out_bias", "sinks")),
        *((name, ctypes.c_int32) for name in ("group", "place", "rope", "shares", "intermediate")),
        ("scale", ctypes.c_float),
    )


class LayerGroup(ctypes.Structure):
    """`baton::LayerGroup` in decoder.h."""

    _fields_ = (
        ("attention", ctypes.POINTER(AttentionCall)),
        ("layer_bytes", ctypes.c_int64),
        ("v_bytes", ctypes.c_int64),
        ("tiles", ctypes.c_void_p),
    )


class OutsideMlp(ctypes.Structure):
    """`baton::OutsideMlp` in decoder.h."""

    _fields_ = (("inputs", ctypes.c_void_p), ("outputs", ctypes.c_void_p), ("rows", ctypes.c_int64))


class DecoderCall(ctypes.Structure):
    """`baton::DecoderCall` in decoder.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "final_norm", "residual", "result", "cos", "sin")),
        ("scratch", ctypes.c_void_p),
        ("groups", LayerGroup * 2),
        ("layer_inputs", ctypes.c_void_p),
        ("mlp", OutsideMlp),
        ("reads", ctypes.c_void_p),
        ("read_starts", ctypes.c_void_p),
        ("read_count", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("layer_count", "tail", "hidden", "layer_input_width")),
        *((name, ctypes.c_int32) for name in ("ropes", "rotary", "interleaved", "activation")),
        *((name, ctypes.c_float) for name in ("residual_scale", "eps")),
        ("part_seconds", ctypes.c_void_p),
    )
