"""Attention of recorded decode steps: on CUDA a Triton kernel, elsewhere its definition, with which tests
compare the kernel and run models on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import rms_norm

_PROGRAMS_WANTED = 256  # about two for each multiprocessor
_MOST_SPLITS = 32


def splits_of(rows: int, kv_heads: int) -> int:
    """Into how many programs the context of each row and KV head is split, a power of two. It does not depend
    on the context, because a recorded step's grid does not."""
    splits = 1
    while splits < _MOST_SPLITS and 2 * splits * rows * kv_heads <= _PROGRAMS_WANTED:
        splits *= 2
    return splits


@torch.library.custom_op("baton::decode_attention", mutates_args=("pool", "parts", "peaks", "counts", "out"))
def decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    rotary: torch.Tensor | None,
    positions: torch.Tensor | None,
    pool: torch.Tensor,
    pages: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    parts: torch.Tensor,
    peaks: torch.Tensor,
    counts: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    eps: float,
    window: int | None,
    softcap: float | None,
) -> None:
    """Normalise and turn q and k, write K and V of each row's new token, and attend to the row's pages.

    q [rows, query heads, dim], k and v [rows, KV heads, dim], the heads of a row contiguous. `q_norm` and
    `k_norm` [dim]: RMSNorm of each head. `rotary` float32 [positions, dim]: cosines, then sines of each
    position, for halves of a head; the row's position is `positions` [rows], int64. pool [pages, 2, KV heads,
    page size, dim]: one layer's, strided by page.

    `pages` int32 has the page ids of row i from starts[i] on, int32; `lengths` int32 [rows]: tokens on them,
    the new one included. Of these a row sees the last `window`, or all. A scaled score s becomes softcap
    tanh(s / softcap), unless that is None. `sinks` [query heads]: logits that join each softmax and carry no
    value. `out` [rows, query heads, dim], contiguous. `parts` [rows, query heads, splits, dim] and
    `peaks` [rows, query heads, splits, 2], float32, keep what the splits sum (splits_of). `counts` int32
    [rows, KV heads] are zeros before and after.
    """
    from engine.cuda.attention_kernel import launch

    launch(
        q, k, v, q_norm, k_norm, rotary, positions, pool, pages, starts, lengths, parts, peaks, counts, out,
        sinks, scale, eps, window, softcap,
    )  # fmt: skip


@decode_attention.register_fake
def _nothing(*_: Any) -> None:
    return None


@decode_attention.register_kernel("cpu")
def _reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    rotary: torch.Tensor | None,
    positions: torch.Tensor | None,
    pool: torch.Tensor,
    pages: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    parts: torch.Tensor,
    peaks: torch.Tensor,
    counts: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    eps: float,
    window: int | None,
    softcap: float | None,
) -> None:
    """By its definition."""
    del parts, peaks, counts
    page_size, group = pool.shape[3], q.shape[1] // k.shape[1]
    for row in range(len(q)):
        turned = []
        for heads, norm in ((q[row].float(), q_norm), (k[row].float(), k_norm)):
            if norm is not None:
                heads = rms_norm(heads, heads.shape[-1:], norm.float(), eps)
            if rotary is not None and positions is not None:
                cos, sin = rotary[positions[row]].chunk(2)
                low, high = heads.chunk(2, dim=-1)
                heads = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
            turned.append(heads.to(pool.dtype))
        length, start = int(lengths[row]), int(starts[row])
        ids = pages[start : start + -(-length // page_size)].long()
        pool[ids[-1], 0, :, (length - 1) % page_size] = turned[1]
        pool[ids[-1], 1, :, (length - 1) % page_size] = v[row].to(pool.dtype)
        keys, values = (pool[ids, side].transpose(1, 2).flatten(0, 1)[:length].float() for side in (0, 1))
        for head in range(q.shape[1]):
            scores = keys[:, head // group] @ turned[0][head].float() * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            scores[: 0 if window is None else max(length - window, 0)] = -torch.inf
            if sinks is not None:
                scores = torch.cat((scores, sinks[head, None].float()))
            out[row, head] = (scores.softmax(0)[:length] @ values[:, head // group]).to(out.dtype)
