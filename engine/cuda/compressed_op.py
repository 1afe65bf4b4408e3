"""Compressed attention: on CUDA a Triton kernel, elsewhere its definition, with which tests compare the
kernel and run models on a CPU."""

from __future__ import annotations

from typing import Any

import torch


@torch.library.custom_op("baton::compressed_attention", mutates_args=("out",))
def compressed_attention(
    q: torch.Tensor,
    rows: torch.Tensor,
    row_table: torch.Tensor,
    entries: torch.Tensor | None,
    entry_table: torch.Tensor,
    chosen: torch.Tensor | None,
    sequences: torch.Tensor,
    visible: torch.Tensor,
    sinks: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window: int,
    tokens: int,
    page_size: int,
) -> None:
    """Attend to the last `window` tokens that each query sees, and to entries of `tokens` tokens each.

    q [n, heads, dim], contiguous. rows [pages, page_size, width] and entries [pages, rows of a page, width]
    of one layer, strided, the last dimension contiguous: their first dim values are key and value. `entries`
    None: there are none, and `tokens` is 0. The page tables, int32 [S, P], contiguous, have the page ids of
    each sequence; `sequences` int32 [n] says which one a query is of, `visible` int32 [n] how many of its
    tokens the query sees, itself included. It sees the entries that end within these: all of them, or, with
    `chosen` int32 [n, k], contiguous, those of its k that it sees. sinks [heads]: logits that join each
    softmax and carry no value. out [n, heads, dim], contiguous.
    """
    from engine.cuda.compressed_kernel import launch

    launch(
        q, rows, row_table, entries, entry_table, chosen, sequences, visible, sinks, out, scale, window,
        tokens, page_size,
    )  # fmt: skip


@compressed_attention.register_fake
def _nothing(*_: Any) -> None:
    return None


@compressed_attention.register_kernel("cpu")
def _reference(
    q: torch.Tensor,
    rows: torch.Tensor,
    row_table: torch.Tensor,
    entries: torch.Tensor | None,
    entry_table: torch.Tensor,
    chosen: torch.Tensor | None,
    sequences: torch.Tensor,
    visible: torch.Tensor,
    sinks: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window: int,
    tokens: int,
    page_size: int,
) -> None:
    """By its definition."""
    dim = q.shape[-1]
    for query, (sequence, seen) in enumerate(zip(sequences.tolist(), visible.tolist(), strict=True)):
        at = torch.arange(max(0, seen - window), seen)
        attended = rows[row_table[sequence, at // page_size].long(), at % page_size, :dim]
        if entries is not None:
            numbers = torch.arange(seen // tokens) if chosen is None else chosen[query].long()
            last = (numbers[numbers < seen // tokens] + 1) * tokens - 1
            pages = entry_table[sequence, last // page_size].long()
            attended = torch.cat((attended, entries[pages, last % page_size // tokens, :dim]))
        scores = q[query].float() @ attended.float().T * scale
        weights = torch.cat((sinks.float()[:, None], scores), dim=1).softmax(1)[:, 1:]
        out[query] = (weights @ attended.float()).to(out.dtype)
