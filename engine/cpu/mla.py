"""The CPU latent attention backend. One C++ call per layer writes new rows and attends over pages."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from engine.cpu.batch_arrays import BatchArrays
from engine.cpu.op import FORMATS, STORAGE, KernelsUnavailable, kernels

if TYPE_CHECKING:
    from engine.batch import ForwardBatch
    from kvcache.layout import LatentGroupSpec
    from kvcache.pool import MLAKVCache

MAX_RANK, MAX_ROW = 512, 640
"""kMaxRank and kMaxRow in mla.h."""


class MlaCall(ctypes.Structure):
    """`baton::mla::Call` in mla.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q_latent", "q_rope", "latent_new", "rope_new")),
        *((name, ctypes.c_void_p) for name in ("out", "rows", "sinks")),
        *((name, ctypes.c_void_p) for name in ("page_table", "starts", "seq_lens", "slots")),
        *((name, ctypes.c_int64) for name in ("table_stride", "page_bytes", "row_bytes")),
        *((name, ctypes.c_int64) for name in ("q_latent_token", "q_latent_head")),
        *((name, ctypes.c_int64) for name in ("q_rope_token", "q_rope_head")),
        *((name, ctypes.c_int64) for name in ("latent_token", "rope_token", "out_token")),
        *((name, ctypes.c_int32) for name in ("seqs", "heads", "rank", "rope_dim", "page_size")),
        *((name, ctypes.c_int32) for name in ("storage", "format", "activations")),
        ("scale", ctypes.c_float),
        ("threads", ctypes.c_int32),
    )


def check_supported(spec: LatentGroupSpec) -> None:
    """Raises KernelsUnavailable, with the reason, if the C++ op cannot serve this latent group."""
    if spec.dtype not in STORAGE:
        raise KernelsUnavailable(
            f"the CPU latent attention op attends in float32 or bfloat16, not {spec.dtype}"
        )
    if spec.kv_lora_rank > MAX_RANK or spec.key_dim > MAX_ROW:
        raise KernelsUnavailable(
            f"the CPU latent attention op takes latents of up to {MAX_RANK} values and rows of {MAX_ROW}, "
            f"not {spec.kv_lora_rank} and {spec.key_dim}"
        )
    if kernels().baton_mla_call_bytes() != ctypes.sizeof(MlaCall):
        raise KernelsUnavailable("mla.py and the compiled kernels disagree about MlaCall")


class CpuLatentAttention:
    """A LatentBackend (engine/paged_layers.py) over one pool, quantised or not.

    Sums are float32. A query's result does not depend on the batch or on the number of threads.
    """

    def __init__(self, pool: MLAKVCache, heads: int, scale: float) -> None:
        """Raises KernelsUnavailable if the op cannot serve `pool`."""
        spec = pool.spec
        check_supported(spec)
        self._run = kernels().baton_mla
        self._run.restype = None
        self._run.argtypes = [ctypes.POINTER(MlaCall)]
        self._pool = pool.data  # keeps the memory alive behind the pointers
        self._dtype = spec.dtype
        self._layer_bytes = pool.page_bytes // len(spec.layer_ids)
        self._arrays = BatchArrays()
        self._call = MlaCall(
            heads=heads,
            rank=spec.kv_lora_rank,
            rope_dim=spec.rope_dim,
            page_size=pool.page_size,
            page_bytes=pool.page_bytes,
            row_bytes=self._layer_bytes // pool.page_size,
            storage=STORAGE[spec.dtype],
            format=FORMATS[spec.stored],
            activations=STORAGE[spec.dtype],
            scale=scale,
        )

    def prepare(self, batch: ForwardBatch) -> None:
        self._arrays.fill(self._call, batch)

    def forward(
        self,
        place: int,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        latent_new: torch.Tensor,
        rope_new: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        assert {x.dtype for x in (q_latent, q_rope, latent_new, rope_new, out)} == {self._dtype}
        assert all(x.stride(-1) == 1 for x in (q_latent, q_rope, latent_new, rope_new))
        call = self._call
        call.q_latent, call.q_rope = q_latent.data_ptr(), q_rope.data_ptr()
        call.q_latent_token, call.q_latent_head = q_latent.stride(0), q_latent.stride(1)
        call.q_rope_token, call.q_rope_head = q_rope.stride(0), q_rope.stride(1)
        call.latent_new, call.latent_token = latent_new.data_ptr(), latent_new.stride(0)
        call.rope_new, call.rope_token = rope_new.data_ptr(), rope_new.stride(0)
        call.out, call.out_token = out.data_ptr(), out.stride(0)
        assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous())
        call.sinks = None if sinks is None else sinks.data_ptr()
        call.rows = self._pool.data_ptr() + place * self._layer_bytes
        self._run(ctypes.byref(call))
