"""Sums of a prompt's hidden states, for requests that ask for its vector (/v1/embeddings).

They are summed in float32, whatever the model computes in.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import ForwardBatch


def pool_prompts(batch: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor:
    """[pooled sequences, hidden] in float32, on the device. `hidden` [T, hidden] is what the last layer says
    of each new token, after its norm. Nothing waits for the device."""
    starts = batch.starts()
    sums = [
        hidden[int(starts[one.sequence]) + one.skip : int(starts[one.sequence + 1])].float().sum(0)
        for one in batch.pooled
    ]
    return torch.stack(sums)


def by_sequence(batch: ForwardBatch, sums: npt.NDArray[np.float32]) -> dict[int, npt.NDArray[np.float32]]:
    """The same by sequence of the batch."""
    return {one.sequence: row for one, row in zip(batch.pooled, sums, strict=True)}
