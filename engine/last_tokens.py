"""Keeps the last token sampled for each req_to_token row, to replace UNKNOWN_TOKEN in a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from engine.batch import UNKNOWN_TOKEN, ForwardBatch

_PLACEHOLDER = 0


class LastTokens:
    """Maps a row to its last sampled token.

    Only the thread that runs forwards uses it, so each forward sees the tokens of all forwards before it.
    """

    def __init__(self) -> None:
        self._tokens = np.full(64, UNKNOWN_TOKEN, dtype=np.int64)

    def resolve(self, batch: ForwardBatch) -> npt.NDArray[np.int64]:
        """`batch.input_ids` with every UNKNOWN_TOKEN replaced. Their rows must have been sampled before."""
        unknown = np.flatnonzero(batch.input_ids == UNKNOWN_TOKEN)
        if not unknown.size:
            return batch.input_ids
        self._grow(int(batch.rows.max()))
        owner = np.searchsorted(batch.starts(), unknown, side="right") - 1
        tokens = self._tokens[batch.rows[owner]]
        assert (tokens != UNKNOWN_TOKEN).all(), "UNKNOWN_TOKEN in a row for which no token was sampled"
        resolved = batch.input_ids.copy()
        resolved[unknown] = tokens
        return resolved

    def record(self, batch: ForwardBatch, tokens: npt.NDArray[np.int64]) -> None:
        """Record that `tokens` [N] were sampled for `batch.sampled`."""
        if tokens.size:
            self._grow(int(batch.rows.max()))
            self._tokens[batch.rows[batch.sampled]] = tokens

    @contextmanager
    def placeholders_on_failure(self, batch: ForwardBatch) -> Iterator[None]:
        """If the forward inside this context fails, record a placeholder for every token it should sample.

        The next forward may already be launched, with rows of the failed requests beside rows of others. Its
        results for the failed rows are not used, but a missing token must not make it fail, because that
        would fail the other requests too. (The failed rows cannot be left out: the scheduler has recorded
        the batch with them.)
        """
        try:
            yield
        except Exception:
            self.record(batch, np.full(len(batch.sampled), _PLACEHOLDER, dtype=np.int64))
            raise

    def _grow(self, row: int) -> None:
        if row >= len(self._tokens):
            more = np.full(max(row + 1 - len(self._tokens), len(self._tokens)), UNKNOWN_TOKEN, dtype=np.int64)
            self._tokens = np.concatenate([self._tokens, more])
