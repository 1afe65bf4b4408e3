"""Where the new tokens of a step are written, on the device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.device_copies import pinned, upload


class NewSlots:
    """The page of each new token, and its place there: int64 [T] each. All layers of a step use them, so they
    are computed once, on the host."""

    def __init__(self, page_size: int, device: torch.device, fixed: int | None = None) -> None:
        """`fixed`: of so many tokens in each step, at addresses that do not change."""
        self._page_size = page_size
        self._device = device
        self._fixed = None if fixed is None else torch.zeros(2, fixed, dtype=torch.int64, device=device)
        self.pages, self.offsets = (
            torch.zeros(2, 0, dtype=torch.int64) if self._fixed is None else self._fixed
        )

    def fill(self, slots: npt.NDArray[np.int64]) -> None:
        """Those of the next step."""
        places = np.stack(np.divmod(slots, self._page_size))
        if self._fixed is None:
            self.pages, self.offsets = upload(places, self._device)
        else:
            self._fixed.copy_(pinned(places, self._device), non_blocking=True)
