"""Which tokens of a context a query of sparse attention sees."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch


class TokenChoice(NamedTuple):
    """A context is divided into k-pools of `kpool` tokens each: 1 in DeepSeek-V3.2, several in GLM-5.3.

    A query sees the tokens of those whole k-pools that an indexer scores highest, `top` tokens at most, and
    all of the one that is not whole yet."""

    top: int
    kpool: int = 1

    @property
    def most(self) -> int:
        """The most tokens that a query sees."""
        return self.top + self.kpool - 1

    def seen(self, positions: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
        """How many tokens the queries at these positions see."""
        whole, others = np.divmod(positions + 1, self.kpool)
        seen = np.minimum(whole, self.top // self.kpool) * self.kpool + others
        return seen.astype(np.int32, copy=False)

    def of_visible(self, visible: torch.Tensor) -> torch.Tensor:
        """The same of [n] queries that so many tokens are visible to, on the device."""
        whole = (visible // self.kpool).clamp(max=self.top // self.kpool)
        return whole * self.kpool + visible % self.kpool

    def kpools(self, tokens: int) -> int:
        """Of how many k-pools the best are taken, where a context has so many tokens."""
        return min(self.top // self.kpool, max(1, tokens // self.kpool))

    def tokens(self, kpools: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """Places in the context, int64 [n, k x kpool + kpool - 1]: first those that a query sees, and behind
        them any others.

        kpools: int64 [n, k], the best ones, those that are not whole for a query behind those that are.
        visible: [n], tokens up to each query.
        """
        if self.kpool == 1:
            return kpools
        k = kpools.shape[1]
        whole, others = (visible // self.kpool)[:, None], (visible % self.kpool)[:, None]
        at = torch.arange(k * self.kpool + self.kpool - 1, device=kpools.device)
        behind = (at - others).clamp(min=0)
        numbers = kpools.gather(1, (behind // self.kpool).clamp(max=k - 1))
        of_kpools = numbers * self.kpool + behind % self.kpool
        return torch.where(at < others, whole * self.kpool + at, of_kpools)
