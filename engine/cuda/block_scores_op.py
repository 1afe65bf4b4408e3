"""Scores of block-sparse attention's indexer: on CUDA a Triton kernel, elsewhere its definition, with which
tests compare the kernel and run models on a CPU."""

from __future__ import annotations

from typing import Any

import torch


@torch.library.custom_op("baton::block_scores", mutates_args=("out",))
def block_scores(
    q: torch.Tensor,
    keys: torch.Tensor,
    page_table: torch.Tensor,
    sequences: torch.Tensor,
    visible: torch.Tensor,
    out: torch.Tensor,
    tokens: int,
) -> None:
    """Score the blocks of each query's context: of each head the highest q . k of the tokens that it sees.

    q [n, heads, dim], contiguous; keys [pages, page size, dim] of one layer, strided, the last dimension
    contiguous. page_table int32 [S, P], contiguous, has the page ids of each sequence; `sequences` int32 [n]
    says which one a query is of, `visible` int32 [n] how many of its tokens the query sees. A block has so
    many `tokens`, in whole pages. out float32 [n, heads, blocks], contiguous: -inf for blocks of which it
    sees no token.
    """
    from engine.cuda.block_scores_kernel import launch

    launch(q, keys, page_table, sequences, visible, out, tokens)


@block_scores.register_fake
def _nothing(*_: Any) -> None:
    return None


@block_scores.register_kernel("cpu")
def _reference(
    q: torch.Tensor,
    keys: torch.Tensor,
    page_table: torch.Tensor,
    sequences: torch.Tensor,
    visible: torch.Tensor,
    out: torch.Tensor,
    tokens: int,
) -> None:
    """By its definition."""
    out.fill_(-torch.inf)
    for query, (sequence, seen) in enumerate(zip(sequences.tolist(), visible.tolist(), strict=True)):
        context = keys[page_table[sequence].long()].flatten(0, 1)[:seen].float()
        scores = q[query].float() @ context.T
        for block, part in enumerate(torch.split(scores, tokens, dim=1)):
            out[query, :, block] = part.amax(1)
