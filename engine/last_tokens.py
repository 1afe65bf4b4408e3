"""The last token sampled per req_to_token row: what UNKNOWN_TOKEN in a batch stands for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from engine.batch import UNKNOWN_TOKEN, ForwardBatch

_STAND_IN = 0


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

    @contextmanager
    def owed(self, batch: ForwardBatch) -> Iterator[None]:
        """Around a forward: if it fails, a stand-in is recorded for every token that it owes.

        The next forward may have been launched already, with rows of the failed requests next to others'.
        Nobody reads what it samples for those rows, but it must not trip over the gap and take the others
        down with it. (Leaving the failed rows out would change a batch that the scheduler has on its books.)
        """
        try:
            yield
        except Exception:
            for row in batch.sampling:
                row.state.rewind(row.position)
                row.state.record(_STAND_IN)
            self.record(batch, np.full(len(batch.sampled), _STAND_IN, dtype=np.int64))
            raise

    def _grow(self, row: int) -> None:
        if row >= len(self._tokens):
            more = np.full(max(row + 1 - len(self._tokens), len(self._tokens)), UNKNOWN_TOKEN, dtype=np.int64)
            self._tokens = np.concatenate([self._tokens, more])
