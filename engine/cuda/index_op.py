"""Scores of sparse attention's indexer: on CUDA a Triton kernel, elsewhere its definition, with which tests
compare the kernel and run models on a CPU."""

from __future__ import annotations

from typing import Any

import torch


@torch.library.custom_op("baton::index_scores", mutates_args=("out",))
def index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    page_table: torch.Tensor,
    sequences: torch.Tensor,
    visible: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Score the context of each query (DeepSeek-V3.2-Exp, section 2.1): sum_h weights_h relu(q_h . k).

    q [n, heads, dim], contiguous; weights float32 [n, heads], contiguous; keys [pages, page size, dim] of one
    layer, strided, the last dimension contiguous. page_table int32 [S, P], contiguous, has the page ids of
    each sequence; `sequences` int32 [n] says which one a query is of, `visible` int32 [n] how many of its
    tokens the query sees. out float32 [n, P * page size], contiguous: -inf for tokens that it does not see.
    """
    from engine.cuda.index_kernel import launch

    launch(q, weights, keys, page_table, sequences, visible, out)


@index_scores.register_fake
def _nothing(*_: Any) -> None:
    return None


@index_scores.register_kernel("cpu")
def _reference(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    page_table: torch.Tensor,
    sequences: torch.Tensor,
    visible: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """By its definition."""
    out.fill_(-torch.inf)
    for query, (sequence, seen) in enumerate(zip(sequences.tolist(), visible.tolist(), strict=True)):
        context = keys[page_table[sequence].long()].flatten(0, 1)[:seen].float()
        out[query, :seen] = weights[query] @ (q[query].float() @ context.T).relu()
