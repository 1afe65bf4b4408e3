"""A batch's page table in the form that FlashInfer reads: offsets of each sequence, and one list of pages."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import ForwardBatch

Int32s = npt.NDArray[np.int32]


class PageIndices(NamedTuple):
    """int32 arrays over S sequences. Pages that no query of a sequence sees are left out."""

    q_starts: Int32s  # [S + 1] in the packed new tokens
    kv_starts: Int32s  # [S + 1] in `pages`
    pages: Int32s  # page ids
    last_page_lens: Int32s  # [S] tokens in each sequence's last page
    kv_lens: Int32s  # [S] tokens on the pages of each sequence


class FixedIndices(NamedTuple):
    """Device memory at fixed addresses, int32, to which FlashInfer copies what a recorded step reads."""

    q_starts: torch.Tensor  # [S + 1]
    kv_starts: torch.Tensor  # [S + 1]
    pages: torch.Tensor  # as many as S sequences can have
    lengths: torch.Tensor  # [S] tokens in each sequence's last page, or on all of its pages

    @classmethod
    def allocate(cls, sequences: int, context_pages: int, device: torch.device) -> FixedIndices:
        """For `sequences` rows with at most `context_pages` pages each."""
        counts = (sequences + 1, sequences + 1, sequences * context_pages, sequences)
        return cls(*(torch.zeros(count, dtype=torch.int32, device=device) for count in counts))


def page_indices(batch: ForwardBatch, page_size: int, window: int | None = None) -> PageIndices:
    """The pages that each sequence's new tokens see.

    With a window, earlier pages may be freed already. Without them the context is shorter and begins on a
    page border. FlashInfer counts its window from the end of the context, so it needs no correction.
    """
    ends = -(-batch.seq_lens // page_size)  # [S] pages
    firsts = np.zeros_like(ends)
    if window is not None:
        unseen = batch.seq_lens - batch.q_lens + 1 - window
        firsts = np.maximum(unseen, 0) // page_size
    kv_starts = np.zeros(len(ends) + 1, dtype=np.int32)
    np.cumsum(ends - firsts, out=kv_starts[1:])
    logical = np.arange(batch.page_table.shape[1])
    in_use = (logical >= firsts[:, None]) & (logical < ends[:, None])
    return PageIndices(
        batch.starts().astype(np.int32),
        kv_starts,
        batch.page_table[in_use],
        ((batch.seq_lens - 1) % page_size + 1).astype(np.int32),
        (batch.seq_lens - firsts * page_size).astype(np.int32),
    )
