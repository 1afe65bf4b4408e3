"""The CPU attention backend. One C++ call per layer writes new K/V and attends over pages."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from engine.cpu.batch_arrays import BatchArrays
from engine.cpu.op import FORMATS, STORAGE, AttentionCall, KernelsUnavailable, kernels

if TYPE_CHECKING:
    from engine.batch import ForwardBatch
    from kvcache.layout import KVGroupSpec
    from kvcache.pool import MHAKVCache

MAX_HEAD_DIM = 512


def check_supported(spec: KVGroupSpec) -> None:
    """Raises KernelsUnavailable, with the reason, if the C++ op cannot serve this KV group."""
    if spec.dtype not in STORAGE:
        raise KernelsUnavailable(f"the CPU attention op attends in float32 or bfloat16, not {spec.dtype}")
    if spec.head_dim % 16 or spec.head_dim > MAX_HEAD_DIM or spec.v_head_dim not in (None, spec.head_dim):
        raise KernelsUnavailable(
            f"the CPU attention op takes head widths that are multiples of 16 up to {MAX_HEAD_DIM}, and V as "
            f"wide as K, not {spec.head_dim} and {spec.v_head_dim}"
        )
    if spec.tile_order != "plain":
        raise KernelsUnavailable(f"the CPU attention op reads plain tiles, not {spec.tile_order!r}")
    kernels()


class CpuAttention:
    """An AttentionBackend (engine/paged_layers.py) over one pool of `plain` tiles, quantised or not.

    Sums are float32. The result of a decode row does not depend on the batch or on the number of threads, nor
    do those of a chunk in float32. In bfloat16 the items of a chunk of 8 tokens or more follow the threads,
    and, without AMX, the order of a row's sums follows the items.
    """

    def __init__(
        self, pool: MHAKVCache, query_heads: int, scale: float, softcap: float | None = None
    ) -> None:
        """Raises KernelsUnavailable if the op cannot serve `pool`."""
        spec = pool.spec
        check_supported(spec)
        self._library = kernels()
        self._pool = pool.data  # keeps the memory alive behind the pointers
        _, _, _, kv_heads, page_size, row = pool.data.shape
        assert pool.data.stride()[-2:] == (row, 1), "tiles must be contiguous"
        self._base = pool.data.data_ptr()
        self._layer_bytes = pool.data.stride(1) * pool.data.element_size()
        self._v_bytes = pool.data.stride(2) * pool.data.element_size()
        self._arrays = BatchArrays()
        self._call = AttentionCall(
            heads=query_heads,
            kv_heads=kv_heads,
            head_dim=spec.head_dim,
            page_size=page_size,
            page_stride=pool.data.stride(0),
            tile_stride=pool.data.stride(3),
            storage=STORAGE[spec.dtype],
            format=FORMATS[spec.stored],
            window=spec.window or 0,
            scale=scale,
            softcap=softcap or 0.0,
        )

    @property
    def call(self) -> AttentionCall:
        """The prepared batch and the pool's shape, without a layer. A fused decoder starts from it."""
        return self._call

    @property
    def tiles(self) -> tuple[int, int, int]:
        """The address of page 0's first K tile, the bytes between two layers, the bytes from K to V tiles."""
        return self._base, self._layer_bytes, self._v_bytes

    def prepare(self, batch: ForwardBatch) -> None:
        self._arrays.fill(self._call, batch)

    def forward(
        self,
        place: int,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        call = self._call
        assert q.shape[1] == call.heads, "as the layers' modules say"
        joined = None if sinks is None else sinks.float().contiguous()  # kept alive until the call returns
        call.sinks = None if joined is None else joined.data_ptr()
        call.q, call.q_token, call.q_head = q.data_ptr(), q.stride(0), q.stride(1)
        call.k_new, call.k_token, call.k_head = k_new.data_ptr(), k_new.stride(0), k_new.stride(1)
        call.v_new, call.v_token, call.v_head = v_new.data_ptr(), v_new.stride(0), v_new.stride(1)
        call.out, call.out_token = out.data_ptr(), out.stride(0)
        call.k = self._base + place * self._layer_bytes
        call.v = call.k + self._v_bytes
        self._library.baton_attention(ctypes.byref(call))
