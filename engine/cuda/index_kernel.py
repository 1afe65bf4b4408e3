"""A Triton kernel of the scores of sparse attention's indexer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def launch(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    page_table: torch.Tensor,
    sequences: torch.Tensor,
    visible: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """As index_op.py: index_scores."""
    n, heads, dim = q.shape
    context = out.shape[1]
    options = tile_options(heads)
    index_scores_kernel[(triton.cdiv(context, options["TOKENS"]), n)](
        q, weights, keys, page_table, sequences, visible, out, keys.stride(0), keys.stride(1),
        page_table.shape[1], context, HEADS=heads, DIM=dim, PAGE=keys.shape[1], **options,
    )  # fmt: skip


def tile_options(heads: int) -> dict[str, int]:
    """The tokens and heads of a tile, and its warps."""
    padded = max(16, triton.next_power_of_2(heads))  # what tensor cores multiply
    return {"TOKENS": 64, "HEADS_PADDED": padded, "num_warps": 4, "num_stages": 1}


# These differ from step to step. Compiled for their values, the kernel would be compiled while requests wait.
@triton.jit(do_not_specialize=["weights", "sequences", "visible", "pages", "context"])
def index_scores_kernel(
    q, weights, keys, page_table, sequences, visible, out, page_stride, token_stride, pages, context,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
):  # fmt: skip
    """As index_op.py: index_scores. A program scores one tile of the context for one query, and reads keys
    only if the query sees some of them."""
    query = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    seen = tl.load(visible + query)
    target = out + query * context + token
    if tl.program_id(0) * TOKENS >= seen:
        tl.store(target, tl.full((TOKENS,), float("-inf"), tl.float32), mask=token < context)
        return
    is_seen = token < seen
    head = tl.arange(0, HEADS_PADDED)
    is_head = head < HEADS
    of_dim = tl.arange(0, DIM)
    table = page_table + tl.load(sequences + query).to(tl.int64) * pages
    page = tl.load(table + token // PAGE, mask=is_seen, other=0).to(tl.int64)
    places = page * page_stride + token % PAGE * token_stride
    key = tl.load(keys + places[:, None] + of_dim[None, :], mask=is_seen[:, None], other=0.0)
    of_query = q + (query * HEADS + head)[:, None] * DIM + of_dim[None, :]
    heads = tl.load(of_query, mask=is_head[:, None], other=0.0)
    weight = tl.load(weights + query * HEADS + head, mask=is_head, other=0.0)
    products = tl.dot(heads, tl.trans(key))  # [heads, tokens]
    scores = tl.sum(tl.maximum(products, 0.0) * weight[:, None], 0)
    tl.store(target, tl.where(is_seen, scores, float("-inf")), mask=token < context)
