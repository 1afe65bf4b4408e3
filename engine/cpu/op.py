"""Loads the compiled kernels and mirrors their C structs.

`kernels()` returns the library, or raises KernelsUnavailable with the reason; the caller then uses plain
torch. BATON_CPU_ISA (base, avx2, avx512_vnni, avx512_bf16 or amx) makes the process use that instruction set.
"""

from __future__ import annotations

import ctypes
import functools
import os

import torch

from common.compile import BuildError
from common.errors import ConfigError
from engine.cpu.build import build
from kvcache.quant import KVFormat

ISA_NAMES = ("base", "avx2", "avx512_vnni", "avx512_bf16", "amx")
"""The instruction sets by their numbers in the kernels (isa.h: Isa). Each includes those before it."""
STORAGE = {torch.float32: 0, torch.bfloat16: 1}
"""The element types of the kernels, and their numbers there (attention.h: Storage)."""
FORMATS = {KVFormat.AUTO: 0, KVFormat.FP8_E4M3: 1, KVFormat.FP8_E5M2: 2, KVFormat.FP4_E2M1: 3}
"""The storage formats of a pool, and their numbers in the kernels (kv_format.h: Format)."""


class KernelsUnavailable(RuntimeError):
    """The compiled kernels cannot be used; the message gives the reason. Plain torch can be used instead."""


class AttentionCall(ctypes.Structure):
    """`baton::AttentionCall` in attention.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k_new", "v_new", "out", "k", "v")),
        *((name, ctypes.c_void_p) for name in ("page_table", "starts", "seq_lens", "slots", "sinks")),
        *((name, ctypes.c_int64) for name in ("table_stride", "page_stride", "tile_stride")),
        *((name, ctypes.c_int64) for name in ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head")),
        ("out_token", ctypes.c_int64),
        *(
            (name, ctypes.c_int32)
            for name in ("seqs", "heads", "kv_heads", "head_dim", "page_size", "storage", "format", "window")
        ),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("threads", ctypes.c_int32),
    )


@functools.cache
def kernels() -> ctypes.CDLL:
    """The kernels, which are compiled first if they are not in the cache. Calls into them release the GIL.

    Raises KernelsUnavailable, and ConfigError for a BATON_CPU_ISA that does not exist or that this machine
    does not have.
    """
    try:
        library = ctypes.CDLL(str(build()))
    except (BuildError, OSError) as error:
        raise KernelsUnavailable(str(error)) from error
    if library.baton_attention_call_bytes() != ctypes.sizeof(AttentionCall):
        raise KernelsUnavailable("op.py and the compiled kernels disagree about AttentionCall")
    library.baton_attention.argtypes = [ctypes.POINTER(AttentionCall)]
    library.baton_attention.restype = None
    library.baton_read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    library.baton_read.restype = ctypes.c_uint64
    address, size = ctypes.c_void_p, ctypes.c_int64
    library.baton_argmax.argtypes = [address, ctypes.c_int32, *(size,) * 3, address, address, ctypes.c_int]
    library.baton_argmax.restype = None
    if hasattr(library, "baton_linear"):
        _declare_packed(library)
    wanted = os.environ.get("BATON_CPU_ISA")
    if wanted is not None:
        library.baton_set_isa(_isa_number(wanted, _names(library)))
    return library


def _declare_packed(library: ctypes.CDLL) -> None:
    address, size, count = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.baton_pack.argtypes = [address, size, size, address, size, size, count]
    library.baton_pack.restype = None
    library.baton_pack_coded.argtypes = [address, size, size, address, size, size, count]
    library.baton_pack_coded.restype = count
    library.baton_pack_int8.argtypes = [address, size, size, address, address, size, size, count]
    library.baton_pack_int8.restype = None
    library.baton_unpack.argtypes = [address, size, address, size, address, count]
    library.baton_unpack.restype = None
    library.baton_pack_fp8.argtypes = [address, size, address, size, size, address, size, size, count]
    library.baton_pack_fp8.restype = count
    library.baton_pack_mxfp4.argtypes = [
        *(address, size, address, size, size, size, address, size, size, count)
    ]
    library.baton_pack_mxfp4.restype = count
    library.baton_pack_nvfp4.argtypes = [
        *(address, size, address, size, ctypes.c_float, size, size, address, size, size, count)
    ]
    library.baton_pack_nvfp4.restype = count
    library.baton_pack_int4.argtypes = [
        *(address, size, address, address, *(size,) * 3, address, size, size, count)
    ]
    library.baton_pack_int4.restype = count
    library.baton_group_bytes.argtypes = [count, size]
    library.baton_group_bytes.restype = size
    library.baton_linear.argtypes = [
        *(address, size, size, address, size, size, address, address, count, count)
    ]
    library.baton_linear.restype = None
    library.baton_decoder_scratch_bytes.argtypes = [address]
    library.baton_decoder_scratch_bytes.restype = size
    library.baton_decoder.argtypes = [address, ctypes.c_int]
    library.baton_decoder.restype = ctypes.c_int
    library.baton_experts.argtypes = [address]
    library.baton_experts.restype = None
    library.baton_delta_net.argtypes = [address]
    library.baton_delta_net.restype = None
    library.baton_mamba2.argtypes = [address]
    library.baton_mamba2.restype = None
    library.baton_norm.argtypes = [address]
    library.baton_norm.restype = None


def machine_isas() -> tuple[str, ...]:
    """The instruction sets of this machine, the best one last. Raises KernelsUnavailable."""
    return _names(kernels())


def current_isa() -> str:
    """The instruction set that this process uses. Raises KernelsUnavailable."""
    return ISA_NAMES[kernels().baton_current_isa()]


def set_isa(name: str) -> None:
    """Use instruction set `name` from now on. Raises ConfigError if this machine does not have it."""
    kernels().baton_set_isa(_isa_number(name, machine_isas()))


def _names(library: ctypes.CDLL) -> tuple[str, ...]:
    return ISA_NAMES[: library.baton_detected_isa() + 1]


def _isa_number(name: str, available: tuple[str, ...]) -> int:
    if name not in available:
        problem = "this machine does not have it" if name in ISA_NAMES else "it is unknown"
        raise ConfigError("BATON_CPU_ISA", f"{name!r}: {problem}", f"use one of {', '.join(available)}")
    return ISA_NAMES.index(name)
