"""The new tokens of a step with which an entry of compressed attention ends."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import ForwardBatch
from engine.device_copies import pinned, upload
from engine.paged_layers import Compression


class ClosingTokens:
    """Of `count` entries, int64 on the device: `source_pages` and `source_offsets`, [count, span], where the
    rows of the tokens are of which an entry is made; `pages` and `rows`, [count], where it is written to;
    `firsts`, [count], the first of the tokens that it stands for. All layers of one Compression use them.

    Of a sequence's first entry the span begins before the sequence: these sources are its first token.
    """

    def __init__(
        self, compression: Compression, page_size: int, device: torch.device, fixed: int | None = None
    ) -> None:
        """`fixed`: of so many decode rows in each step, at addresses that do not change. Each row makes an
        entry, and those of rows with which none ends are written to the scratch page."""
        self._compression = compression
        self._page_size = page_size
        self._device = device
        self._is_fixed = fixed is not None
        self.count = fixed or 0
        self._show(torch.zeros(self.count * (2 * compression.span + 3), dtype=torch.int64, device=device))

    def fill(self, batch: ForwardBatch, sources_table: npt.NDArray[np.int32]) -> None:
        """Those of the next step. `sources_table`: the page table of the rows that entries are made of."""
        tokens, span = self._compression.tokens, self._compression.span
        closes = (batch.positions + 1) % tokens == 0
        chosen = np.arange(len(closes)) if self._is_fixed else np.flatnonzero(closes)
        owners = np.repeat(np.arange(len(batch.q_lens)), batch.q_lens)[chosen]
        lasts = batch.positions[chosen]
        sources = np.maximum(lasts[:, None] - span + 1 + np.arange(span), 0)
        pages = np.where(closes[chosen], batch.page_table[owners, lasts // self._page_size], 0)
        whole = np.concatenate(
            (
                sources_table[owners[:, None], sources // self._page_size].ravel(),
                (sources % self._page_size).ravel(),
                pages,
                lasts % self._page_size // tokens,
                lasts - tokens + 1,
            )
        ).astype(np.int64)
        self._put(whole, len(chosen))

    def _put(self, values: npt.NDArray[np.int64], count: int) -> None:
        if self._is_fixed:
            assert count == self.count, "a recorded step has another number of rows"
            self._values.copy_(pinned(values, self._device), non_blocking=True)
            return
        self.count = count
        self._show(upload(values, self._device))

    def _show(self, values: torch.Tensor) -> None:
        count, span = self.count, self._compression.span
        self._values = values
        self.source_pages, self.source_offsets = values[: 2 * count * span].view(2, count, span)
        self.pages, self.rows, self.firsts = values[2 * count * span :].view(3, count)
