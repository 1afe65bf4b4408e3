"""What block-sparse attention (MiniMax-M3) adds to a group of keys and values: which blocks a query sees."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch


class BlockInputs(NamedTuple):
    """What an indexer says of T new tokens. The score of a token of the context is q_h . k in each of the
    indexer's heads h, and that of a block is the highest of the tokens in it that the query sees. What head h
    chooses holds for query heads h, h + 1, ... in order: as many as there are for each."""

    q: torch.Tensor  # [T, index heads, index_dim]
    k: torch.Tensor  # [T, index_dim]


class BlockChoice(NamedTuple):
    """A context is divided into blocks of so many `tokens`. For each of the `heads` of an indexer a query
    sees `top` blocks of those up to its own: the `local` last ones, its own included, and else those that
    score highest. Of its own it sees the tokens up to itself."""

    heads: int
    tokens: int
    top: int
    local: int

    def holds(self, context: int) -> bool:
        """Whether queries see all of so many tokens."""
        return context <= self.top * self.tokens

    def tokens_seen(self, positions: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
        """How many tokens the queries at these positions see, if they always see their own block."""
        assert self.local > 0
        blocks = np.minimum(positions // self.tokens + 1, self.top)
        seen: npt.NDArray[np.int32] = (blocks - 1) * self.tokens + positions % self.tokens + 1
        return seen.astype(np.int32)

    def choose(self, scores: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """The blocks that each of n queries sees, in order: int64 [n, heads, at most top].

        scores: float32 [n, heads, blocks], -inf for blocks of which a query sees no token; they are changed.
        own: int64 [n], the block of each query. Where a query sees fewer blocks than others, the last entries
        are the number of all blocks. Of equal scores any may be chosen.
        """
        _, heads, blocks = scores.shape
        last = (own[:, None] - torch.arange(self.local, device=own.device)).clamp(min=0)
        scores.scatter_(-1, last[:, None].expand(-1, heads, -1), torch.inf)
        best = scores.topk(min(self.top, blocks))
        return best.indices.masked_fill(best.values == -torch.inf, blocks).sort(-1).values


@runtime_checkable
class AttendsBlocks(Protocol):
    """An AttentionBackend over a group with index keys (kvcache/indexed_layout.py)."""

    def attend_blocks(
        self,
        place: int,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        out: torch.Tensor,
        index: BlockInputs,
    ) -> None:
        """As forward() of AttentionBackend, but write the new tokens' index keys, too, and attend to the
        blocks that the index chooses."""
        ...
