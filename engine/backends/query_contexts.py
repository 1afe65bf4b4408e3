"""Which tokens each query of a step may see, on the device."""

from __future__ import annotations

import numpy as np
import torch

from engine.batch import ForwardBatch
from engine.device_copies import pinned, upload


class QueryContexts:
    """int32: the page table of S sequences, [S, pages]; of T queries, which sequence each is of and how many
    of its tokens it sees, [T] each. All layers of a step use them."""

    def __init__(self, device: torch.device, fixed: tuple[int, int] | None = None) -> None:
        """`fixed`: so many sequences with one query each in each step, and at most so many pages each, at
        addresses that do not change."""
        self._device = device
        self._is_fixed = fixed is not None
        sequences, pages = fixed or (0, 0)
        self.page_table = torch.zeros(sequences, pages, dtype=torch.int32, device=device)
        self.sequences = torch.arange(sequences, dtype=torch.int32, device=device)
        self.visible = torch.zeros(sequences, dtype=torch.int32, device=device)

    def fill(self, batch: ForwardBatch) -> None:
        """Those of the next step."""
        visible = (batch.positions + 1).astype(np.int32)
        if self._is_fixed:
            table = self.page_table[:, : batch.page_table.shape[1]]
            table.copy_(pinned(batch.page_table, self._device), non_blocking=True)
            self.visible.copy_(pinned(visible, self._device), non_blocking=True)
            return
        sequences = np.repeat(np.arange(len(batch.q_lens), dtype=np.int32), batch.q_lens)
        self.page_table = upload(batch.page_table, self._device)
        self.sequences = upload(sequences, self._device)
        self.visible = upload(visible, self._device)
