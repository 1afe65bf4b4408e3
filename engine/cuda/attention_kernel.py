"""A Triton kernel of paged attention for decode steps: norms and rotary embedding of q and k, the write of
the new token's K and V, attention, and the sum over splits of the context, in one launch.

From compute capability 9.0 on it starts while the kernel before it runs ("programmatic dependent launch" in
CUDA's manual). It loads the first tile of the context, which earlier steps wrote, and then waits for q, k, v.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.cuda.triton_kernels import early_launch

LOG2_E = tl.constexpr(1.4426950408889634)


def launch(
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
    """As attention_op.py: decode_attention."""
    rows, kv_heads, dim = k.shape
    splits = parts.shape[2]
    decode_attention_kernel[(splits, kv_heads, rows)](
        q, k, v, q_norm, k_norm, rotary, positions, pool, pages, starts, lengths, parts, peaks, counts, out,
        sinks, q.stride(0), k.stride(0), v.stride(0), pool.stride(0), scale, eps, softcap or 0.0,
        KV_HEADS=kv_heads, GROUP=q.shape[1] // kv_heads, DIM=dim, PAGE=pool.shape[3], SPLITS=splits,
        NORM=q_norm is not None, ROTARY=rotary is not None, SINKS=sinks is not None, WINDOW=window or 0,
        CAPPED=softcap is not None, **tile_options(dim, splits), **early_launch(q.device),
    )  # fmt: skip


def tile_options(dim: int, splits: int) -> dict[str, int]:
    """The tokens of a tile, its warps, and the tiles being loaded. Many rows need few warps each: on an H200
    64 rows of 512 tokens with 8 KV heads of 128 take 36 us with 2 warps and 48 with 4, one row 7.1 with 4.
    Two tiles of K and V are in a GPU's 99 KiB at least, for heads of 512 with 16 tokens, and 8 warps have
    registers for them."""
    if dim > 256:
        return {"TOKENS": 16, "num_warps": 8, "num_stages": 2}
    if dim > 128:
        return {"TOKENS": 32, "num_warps": 4, "num_stages": 2}
    return {"TOKENS": 64, "num_warps": 4 if splits > 1 else 2, "num_stages": 2}


@triton.jit
def decode_attention_kernel(
    q, k, v, q_norm, k_norm, rotary, positions, pool, pages, starts, lengths, parts, peaks, counts, out,
    sinks, q_stride, k_stride, v_stride, page_stride, scale, eps, softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    SPLITS: tl.constexpr, TOKENS: tl.constexpr, NORM: tl.constexpr, ROTARY: tl.constexpr, EARLY: tl.constexpr,
    SINKS: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """As attention_op.py: decode_attention. A program computes the query heads of one KV head over one
    split of a row's tokens. The last program of a row's KV head to be done joins its splits."""
    HALF: tl.constexpr = DIM // 2
    SIDE: tl.constexpr = KV_HEADS * PAGE * DIM  # from K to V of a page
    HEADS: tl.constexpr = 16  # of the tensor cores' tiles; those from GROUP on are not used
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2)
    length = tl.load(lengths + row)
    last = length - 1
    per_split = tl.cdiv(tl.cdiv(length, TOKENS), SPLITS) * TOKENS
    splits = tl.cdiv(length, per_split)
    if split >= splits:
        return
    begin = split * per_split
    end = tl.minimum(begin + per_split, length)
    half = tl.arange(0, HALF)
    of_dim = tl.arange(0, DIM)
    head = tl.arange(0, HEADS)
    is_head = head < GROUP
    pages += tl.load(starts + row)
    of_head = pool + kv_head * PAGE * DIM
    token = begin + tl.arange(0, TOKENS)
    if EARLY:
        gdc_launch_dependents()
    low, high, value = tile_of(of_head, pages, token, last, page_stride, SIDE, PAGE, DIM)
    if NORM:
        q_gain_low = tl.load(q_norm + half).to(tl.float32)[None, :]
        q_gain_high = tl.load(q_norm + HALF + half).to(tl.float32)[None, :]
        k_gain_low = tl.load(k_norm + half).to(tl.float32)
        k_gain_high = tl.load(k_norm + HALF + half).to(tl.float32)
    if ROTARY:
        angle = rotary + tl.load(positions + row) * DIM
        cos = tl.load(angle + half)
        sin = tl.load(angle + HALF + half)
    if EARLY:
        gdc_wait()
    of_query = q + row * q_stride + (kv_head * GROUP + head)[:, None] * DIM + half[None, :]
    q_low = tl.load(of_query, mask=is_head[:, None], other=0.0).to(tl.float32)
    q_high = tl.load(of_query + HALF, mask=is_head[:, None], other=0.0).to(tl.float32)
    of_key = k + row * k_stride + kv_head * DIM + half
    k_low = tl.load(of_key).to(tl.float32)
    k_high = tl.load(of_key + HALF).to(tl.float32)
    new_v = tl.load(v + row * v_stride + kv_head * DIM + of_dim)
    if NORM:
        factor = tl.rsqrt((tl.sum(q_low * q_low, 1) + tl.sum(q_high * q_high, 1)) / DIM + eps)[:, None]
        q_low *= factor * q_gain_low
        q_high *= factor * q_gain_high
        factor_k = tl.rsqrt((tl.sum(k_low * k_low, 0) + tl.sum(k_high * k_high, 0)) / DIM + eps)
        k_low *= factor_k * k_gain_low
        k_high *= factor_k * k_gain_high
    if ROTARY:
        q_low, q_high = turned(q_low, q_high, cos[None, :], sin[None, :])
        k_low, k_high = turned(k_low, k_high, cos, sin)
    element = pool.dtype.element_ty
    q_low, q_high = q_low.to(element), q_high.to(element)
    k_low, k_high = k_low.to(element), k_high.to(element)
    if split == splits - 1:
        new = of_head + tl.load(pages + last // PAGE).to(tl.int64) * page_stride + last % PAGE * DIM
        tl.store(new + half, k_low)
        tl.store(new + HALF + half, k_high)
        tl.store(new + SIDE + of_dim, new_v)
        tl.debug_barrier()  # the loop below reads them again
    # The first tile was loaded before the new token was there.
    is_new = (token == last)[:, None]
    low = tl.where(is_new, k_low[None, :], low)
    high = tl.where(is_new, k_high[None, :], high)
    value = tl.where(is_new, new_v[None, :], value)
    peak = tl.full((HEADS,), -1e30, tl.float32)  # not infinite: nothing of a tile may be in the window
    total = tl.zeros((HEADS,), tl.float32)
    sums = tl.zeros((HEADS, DIM), tl.float32)
    peak, total, sums = attended(
        q_low, q_high, low, high, value, token, length, scale, softcap, peak, total, sums, WINDOW, CAPPED
    )
    for first in range(begin + TOKENS, end, TOKENS):
        token = first + tl.arange(0, TOKENS)
        low, high, value = tile_of(of_head, pages, token, length, page_stride, SIDE, PAGE, DIM)
        peak, total, sums = attended(
            q_low, q_high, low, high, value, token, length, scale, softcap, peak, total, sums, WINDOW, CAPPED
        )
    finish(
        peak, total, sums, row * KV_HEADS + kv_head, kv_head, split, splits, parts, peaks, counts, out, sinks,
        GROUP, DIM, SPLITS, SINKS, HEADS,
    )  # fmt: skip


@triton.jit
def finish(
    peak, total, sums, group, kv_head, split, splits, parts, peaks, counts, out, sinks,
    GROUP: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Store the result of a row's KV head, the `group`-th of the batch, or that of its split. The last
    program to store its split joins them."""
    of_dim = tl.arange(0, DIM)
    head = tl.arange(0, HEADS)
    is_head = head < GROUP
    target = out + group * GROUP * DIM
    if splits == 1:
        if SINKS:
            sink = tl.load(sinks + kv_head * GROUP + head, mask=is_head, other=0.0)
            total += tl.exp2(sink.to(tl.float32) * LOG2_E - peak)  # infinite if nothing else counts
        whole = target + head[:, None] * DIM + of_dim[None, :]
        tl.store(whole, (sums / total[:, None]).to(out.dtype.element_ty), mask=is_head[:, None])
    else:
        base = group * GROUP  # query heads before these
        of_split = (base + head) * SPLITS + split
        tl.store(parts + of_split[:, None] * DIM + of_dim[None, :], sums, mask=is_head[:, None])
        tl.store(peaks + of_split * 2, peak, mask=is_head)
        tl.store(peaks + of_split * 2 + 1, total, mask=is_head)
        tl.debug_barrier()  # all threads have stored before one of them counts
        if tl.atomic_add(counts + group, 1, sem="acq_rel") == splits - 1:
            tl.store(counts + group, 0)  # for the next layer
            join(parts, peaks, target, base, splits, sinks, kv_head * GROUP, GROUP, DIM, SPLITS, SINKS)


@triton.jit
def tile_of(
    of_head, pages, token, end, page_stride, SIDE: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    """(lower halves of K, upper halves, V) of a head's tokens before `end`, in a pool [pages, K or V, heads,
    PAGE, DIM]."""
    HALF: tl.constexpr = DIM // 2
    half = tl.arange(0, HALF)[None, :]
    page = tl.load(pages + token // PAGE, mask=token < end, other=0).to(tl.int64)
    at = of_head + page[:, None] * page_stride + (token % PAGE * DIM)[:, None]
    known = (token < end)[:, None]
    low = tl.load(at + half, mask=known, other=0.0)
    high = tl.load(at + HALF + half, mask=known, other=0.0)
    value = tl.load(at + SIDE + tl.arange(0, DIM)[None, :], mask=known, other=0.0)
    return low, high, value


@triton.jit
def turned(low, high, cos, sin):
    """The halves of heads after rotary embedding."""
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def join(
    parts, peaks, target, base, splits, sinks, first_head, GROUP: tl.constexpr, DIM: tl.constexpr,
    SPLITS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Join what the splits of a KV head's context have summed, for each of its query heads. The first one is
    `first_head` of its row, and `base` of all rows."""
    of_dim = tl.arange(0, DIM)
    each = tl.arange(0, SPLITS)
    used = each < splits
    for one in tl.static_range(GROUP):
        places = (base + one) * SPLITS + each
        peak_of = tl.load(peaks + places * 2, mask=used, other=float("-inf"), cache_modifier=".cg")
        total_of = tl.load(peaks + places * 2 + 1, mask=used, other=0.0, cache_modifier=".cg")
        sums_at = parts + places[:, None] * DIM + of_dim[None, :]
        sums_of = tl.load(sums_at, mask=used[:, None], other=0.0, cache_modifier=".cg")
        peak = tl.max(peak_of, 0)
        share = tl.exp2(peak_of - peak)
        total = tl.sum(total_of * share, 0)
        if SINKS:
            total += tl.exp2(tl.load(sinks + first_head + one).to(tl.float32) * LOG2_E - peak)
        joined = tl.sum(sums_of * share[:, None], 0) / total
        tl.store(target + one * DIM + of_dim, joined.to(target.dtype.element_ty))


@triton.jit
def attended(
    q_low, q_high, low, high, value, token, length, scale, softcap, peak, total, sums,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """The running softmax with a tile of tokens more: peaks [heads], to base 2, totals, and sums [heads,
    DIM]."""
    scores = tl.dot(q_high, tl.trans(high), tl.dot(q_low, tl.trans(low)))
    if CAPPED:  # softcap tanh(s / softcap), where tanh(x) is 1 - 2 / (e^2x + 1)
        scores = softcap * (1 - 2 / (tl.exp2(scores * (scale / softcap * 2 * LOG2_E)) + 1)) * LOG2_E
    else:
        scores *= scale * LOG2_E
    is_seen = token < length
    if WINDOW > 0:
        is_seen &= token >= length - WINDOW
    scores = tl.where(is_seen[None, :], scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrunk = tl.exp2(peak - higher)
    total = total * shrunk + tl.sum(weights, 1)
    sums = tl.dot(weights.to(value.dtype), value, sums * shrunk[:, None])
    return higher, total, sums
