"""The last token sampled per req_to_token row: what UNKNOWN_TOKEN in a batch stands for."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.batch import UNKNOWN_TOKEN, ForwardBatch


class LastTokens:
    """Row -> its last sampled token. Lives on the thread that runs forwards, so FIFO order makes it exact."""

    def __init__(self) -> None:
        self._tokens = np.full(64, UNKNOWN_TOKEN, dtype=np.int64)

    def resolve(self, batch: ForwardBatch) -> npt.NDArray[np.int64]:
        """`batch.input_ids` with every UNKNOWN_TOKEN replaced. A row that was never sampled is a bug."""
        unknown = np.flatnonzero(batch.input_ids == UNKNOWN_TOKEN)
        if not unknown.size:
            return batch.input_ids
        self._grow(int(batch.rows.max()))
        owner = np.searchsorted(batch.starts(), unknown, side="right") - 1
        tokens = self._tokens[batch.rows[owner]]
        assert (tokens != UNKNOWN_TOKEN).all(), "a token is awaited for a row that nothing was sampled for"
        resolved = batch.input_ids.copy()
        resolved[unknown] = tokens
        return resolved

    def record(self, batch: ForwardBatch, tokens: npt.NDArray[np.int64]) -> None:
        """`tokens` [N] were sampled for `batch.sampled`."""
        if tokens.size:
            self._grow(int(batch.rows.max()))
            self._tokens[batch.rows[batch.sampled]] = tokens

    def _grow(self, row: int) -> None:
        if row >= len(self._tokens):
            more = np.full(max(row + 1 - len(self._tokens), len(self._tokens)), UNKNOWN_TOKEN, dtype=np.int64)
            self._tokens = np.concatenate([self._tokens, more])
