"""Which tokens each query of a step may see, on the device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import ForwardBatch
from engine.device_copies import pinned, upload


class SequencePages:
    """The page ids of S sequences, int32 [S, pages]."""

    def __init__(self, device: torch.device, fixed: tuple[int, int] | None = None) -> None:
        """`fixed` is as in QueryContexts."""
        self._device = device
        self._is_fixed = fixed is not None
        self.ids = torch.zeros(fixed or (0, 0), dtype=torch.int32, device=device)

    def fill(self, ids: npt.NDArray[np.int32]) -> None:
        """Those of the next step."""
        if self._is_fixed:
            self.ids[:, : ids.shape[1]].copy_(pinned(ids, self._device), non_blocking=True)
        else:
            self.ids = upload(ids, self._device)


class QueryContexts:
    """int32: the page table of S sequences, [S, pages]; of T queries, which sequence each is of and how many
    of its tokens it sees, [T] each. All layers of a step use them."""

    def __init__(self, device: torch.device, fixed: tuple[int, int] | None = None) -> None:
        """`fixed`: so many sequences with one query each in each step, and at most so many pages each, at
        addresses that do not change."""
        self._device = device
        self._is_fixed = fixed is not None
        sequences = 0 if fixed is None else fixed[0]
        self._table = SequencePages(device, fixed)
        self.sequences = torch.arange(sequences, dtype=torch.int32, device=device)
        self.visible = torch.zeros(sequences, dtype=torch.int32, device=device)

    @property
    def page_table(self) -> torch.Tensor:
        """[S, pages]."""
        return self._table.ids

    def fill(self, batch: ForwardBatch) -> None:
        """Those of the next step."""
        self._table.fill(batch.page_table)
        visible = (batch.positions + 1).astype(np.int32)
        if self._is_fixed:
            self.visible.copy_(pinned(visible, self._device), non_blocking=True)
            return
        sequences = np.repeat(np.arange(len(batch.q_lens), dtype=np.int32), batch.q_lens)
        self.sequences = upload(sequences, self._device)
        self.visible = upload(visible, self._device)
