"""A Triton kernel that draws a token of each row of scores: temperature, top-k, top-p, min-p, noise, argmax.

A program draws from one row and reads its scores in blocks, up to four times. Nothing is sorted: top-p's
border is found by bisection over the bits of a score's distance to the best one, which order like the
distances, among the candidates that are likely enough to stay.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

BLOCK = 4096
_WARPS = 8


def launch(
    scores: torch.Tensor,
    temperatures: torch.Tensor,
    kth: torch.Tensor | None,
    top_k: torch.Tensor | None,
    may_drop: torch.Tensor | None,
    lowest: torch.Tensor | None,
    is_drawn: torch.Tensor,
    streams: torch.Tensor,
    positions: torch.Tensor,
    tokens: torch.Tensor,
    is_valid: torch.Tensor,
) -> None:
    """As draw.py: draw, into `tokens` and `is_valid`."""
    rows, vocab = scores.shape
    has_k, has_p, has_min = kth is not None, may_drop is not None, lowest is not None
    candidates = torch.empty(rows, vocab if has_p else 0, device=scores.device)
    # What is not given is not read. It has the type that it would have: there is one kernel to compile.
    kth = scores if kth is None else kth
    top_k = streams if top_k is None else top_k
    may_drop = candidates.new_empty(0, dtype=torch.float64) if may_drop is None else may_drop
    lowest = temperatures if lowest is None else lowest
    draw_kernel[(rows,)](
        scores, temperatures, kth, top_k, may_drop, lowest, is_drawn, streams, positions, candidates, tokens,
        is_valid, vocab, scores.stride(0), int(has_k), int(has_p), int(has_min), **tile_options(),
    )  # fmt: skip


def tile_options() -> dict[str, int]:
    """The scores of a block, and the warps that read it."""
    return {"BLOCK": BLOCK, "num_warps": _WARPS}


@triton.jit(do_not_specialize=["has_k", "has_p", "has_min"])
def draw_kernel(
    scores, temperatures, kth, top_k, may_drop, lowest, is_drawn, streams, positions, candidates, tokens,
    is_valid, vocab, stride, has_k, has_p, has_min, BLOCK: tl.constexpr,
):  # fmt: skip
    """The distance of a score is (best - score) / temperature: 0 or more, and its bits as an integer are in
    the order of distances. Tokens stay whose bits are below `limit`, and all but the first `skipped` of those
    with just these bits."""
    row = tl.program_id(0)
    scores += row.to(tl.int64) * stride
    each = tl.arange(0, BLOCK)
    high = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, vocab, BLOCK):
        score = tl.load(scores + first + each, mask=first + each < vocab, other=float("-inf")).to(tl.float32)
        high = tl.maximum(high, tl.where(score == score, score, float("inf")))  # NaN is no best score either
    best = tl.max(high, 0)
    tl.store(is_valid + row, (best > float("-inf")) & (best < float("inf")))
    temperature = tl.load(temperatures + row)
    farthest = float("inf")
    if has_k != 0:
        least = tl.div_rn(best - tl.load(kth + row).to(tl.float32), temperature)
        farthest = tl.where(tl.load(top_k + row) > 0, least, farthest)
    limit = 0x7F800000  # infinity
    skipped = 0
    if has_p != 0:
        may = tl.load(may_drop + row)
        if may > 0:  # some rows of a batch have no top-p
            candidates += row.to(tl.int64) * vocab
            limit, skipped = nucleus(scores, candidates, may, best, temperature, farthest, vocab, BLOCK)
    if has_min != 0:
        bits_of_lowest = (-tl.load(lowest + row)).to(tl.int32, bitcast=True)
        if bits_of_lowest < limit:
            limit = bits_of_lowest
            skipped = 0
    key = noise_key(tl.load(streams + row), tl.load(positions + row))
    drawn = tl.load(is_drawn + row)
    top = float("-inf")
    token = 0
    passed = 0  # ties at the limit
    for first in range(0, vocab, BLOCK):
        place = first + each
        distance = distances(scores, place, vocab, best, temperature)
        bits = distance.to(tl.int32, bitcast=True)
        stays = (place < vocab) & (distance <= farthest) & (bits <= limit)
        if skipped > passed:
            is_tie = (stays & (bits == limit)).to(tl.int32)
            stays &= tl.where(bits == limit, passed + tl.cumsum(is_tie, 0), skipped + 1) > skipped
            passed += tl.sum(is_tie, 0)
        if tl.max(stays.to(tl.int32), 0) > 0:  # of most blocks nothing stays
            value = tl.where(stays, gumbel(key, place) * drawn - distance, float("-inf"))
            value_top = tl.max(value, 0)
            if value_top > top:
                top = value_top
                token = first + tl.argmax(value, 0)
    tl.store(tokens + row, tl.cast(token, tl.int64))


@triton.jit
def nucleus(scores, candidates, may_drop, best, temperature, farthest, vocab, BLOCK: tl.constexpr):
    """(limit, skipped) of top-p: the least likely tokens whose probabilities add up to at most `may_drop` are
    dropped, of equal ones those with the smaller ids. Sums of probabilities are float64."""
    each = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, vocab, BLOCK):
        distance = distances(scores, first + each, vocab, best, temperature)
        sums += tl.where(distance <= farthest, tl.exp(-distance), 0.0).to(tl.float64)
    total = tl.sum(sums, 0)
    # A token this unlikely never stays: as many as there are add up to less than may_drop.
    unlikely = may_drop / vocab * (1 - 1e-4) * total
    count = 0
    sums = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, vocab, BLOCK):
        distance = distances(scores, first + each, vocab, best, temperature)
        weight = tl.exp(-distance)
        is_likely = (distance <= farthest) & (weight.to(tl.float64) >= unlikely) & (first + each < vocab)
        found = tl.sum(is_likely.to(tl.int32), 0)
        if found > 0:
            place = count + tl.cumsum(is_likely.to(tl.int32), 0) - 1
            tl.store(candidates + place, distance, mask=is_likely)
            sums += tl.where(is_likely, weight, 0.0).to(tl.float64)
            count += found
    tl.debug_barrier()  # the candidates are read by all threads
    spare = tl.maximum(may_drop * total - (total - tl.sum(sums, 0)), 0.0)
    below = -1  # the greatest bits with more than `spare` beyond them
    for bit in range(31):
        middle = below + (1 << (30 - bit))
        mass, _ = beyond(candidates, count, middle, BLOCK)
        if mass > spare:
            below = middle
    limit = below + 1
    mass, ties = beyond(candidates, count, limit, BLOCK)
    weight = tl.exp(-tl.cast(limit, tl.float32, bitcast=True)).to(tl.float64)
    skipped = tl.minimum(((spare - mass) / weight).to(tl.int32), ties - 1)
    return limit, tl.maximum(skipped, 0)


@triton.jit
def beyond(candidates, count, limit, BLOCK: tl.constexpr):
    """The probabilities of candidates with greater bits than `limit`, and how many have just these."""
    each = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float64)
    ties = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, count, BLOCK):
        some = first + each < count
        distance = tl.load(candidates + first + each, mask=some, other=0.0)
        bits = distance.to(tl.int32, bitcast=True)
        sums += tl.where(some & (bits > limit), tl.exp(-distance), 0.0).to(tl.float64)
        ties += (some & (bits == limit)).to(tl.int32)
    return tl.sum(sums, 0), tl.sum(ties, 0)


@triton.jit
def distances(scores, place, vocab, best, temperature):
    """float32; infinite outside the vocabulary."""
    score = tl.load(scores + place, mask=place < vocab, other=float("-inf")).to(tl.float32)
    return tl.div_rn(best - score, temperature)


# The same numbers as engine/noise.py's.


@triton.jit
def noise_key(stream, position):
    """splitmix64 of one output position of a stream."""
    key = (stream ^ position).to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9
    key = (key ^ (key >> 27)) * 0x94D049BB133111EB
    return key ^ (key >> 31)


@triton.jit
def mixed(bits):
    """One round of a multiply-xorshift finaliser, uint32."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def gumbel(key, token):
    """float32 standard Gumbel noise of these token ids."""
    bits = mixed(token.to(tl.uint32, bitcast=True) ^ key.to(tl.uint32))
    bits = mixed(bits ^ (key >> 32).to(tl.uint32))
    uniform = (bits.to(tl.int32, bitcast=True).to(tl.float32) + 0.5) * 2.0**-32
    uniform = tl.minimum(tl.where(uniform < 0, uniform + 1, uniform), 1 - 2.0**-24)
    return -libdevice.log(-libdevice.log1p(-uniform))
