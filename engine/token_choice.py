"""Which tokens of a context a query of sparse attention sees."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch


class TokenChoice(NamedTuple):
    """A context is divided into pools of so many tokens, one each (DeepSeek-V3.2) or several (GLM-5.3-Flash).
    A query sees the tokens of those whole pools that an indexer scores highest, `top` tokens at most, and all
    of the pool that is not whole yet."""

    top: int
    pool: int = 1

    @property
    def most(self) -> int:
        """The most tokens that a query sees."""
        return self.top + self.pool - 1

    def seen(self, positions: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
        """How many tokens the queries at these positions see."""
        whole, others = np.divmod(positions + 1, self.pool)
        seen = np.minimum(whole, self.top // self.pool) * self.pool + others
        return seen.astype(np.int32, copy=False)

    def of_visible(self, visible: torch.Tensor) -> torch.Tensor:
        """The same of [n] queries that so many tokens are visible to, on the device."""
        whole = (visible // self.pool).clamp(max=self.top // self.pool)
        return whole * self.pool + visible % self.pool

    def pools(self, tokens: int) -> int:
        """Of how many pools the best are taken, where a context has so many tokens."""
        return min(self.top // self.pool, max(1, tokens // self.pool))

    def tokens(self, pools: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """Places in the context, int64 [n, k x pool + pool - 1]: first those that a query sees, and behind
        them any others.

        pools: int64 [n, k], the best ones, those that are not whole for a query behind those that are.
        visible: [n], tokens up to each query.
        """
        if self.pool == 1:
            return pools
        k = pools.shape[1]
        whole, others = (visible // self.pool)[:, None], (visible % self.pool)[:, None]
        at = torch.arange(k * self.pool + self.pool - 1, device=pools.device)
        behind = (at - others).clamp(min=0)
        of_pools = pools.gather(1, (behind // self.pool).clamp(max=k - 1)) * self.pool + behind % self.pool
        return torch.where(at < others, whole * self.pool + at, of_pools)
