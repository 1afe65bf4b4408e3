"""Keeps the last token sampled for each req_to_token row, to replace UNKNOWN_TOKEN in a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import UNKNOWN_TOKEN, ForwardBatch
from engine.device_copies import upload

_PLACEHOLDER = 0


class LastTokens:
    """Maps a row to its last sampled token. The tokens are on the device of the forwards and stay there, so
    that a forward can be queued before the one whose tokens it continues is done.

    It is used while a forward is issued, one after the other, so each sees the tokens of all before it.
    """

    def __init__(self, device: torch.device | None = None, rows: int = 64) -> None:
        """There may be more than `rows` rows, unless recorded steps read them: the memory moves then."""
        self._device = device or torch.device("cpu")
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=self._device)
        self._is_known = np.zeros(rows, dtype=bool)

    def resolve(self, batch: ForwardBatch) -> torch.Tensor:
        """`batch.input_ids` on the device with every UNKNOWN_TOKEN replaced. Their rows must have been
        sampled before."""
        ids = upload(batch.input_ids, self._device)
        if not self.check(batch):
            return ids
        return self.fill(ids, upload(np.repeat(batch.rows, batch.q_lens).astype(np.int64), self._device))

    def check(self, batch: ForwardBatch) -> bool:
        """Whether the batch has unknown tokens. Their rows must have been sampled before."""
        unknown = np.flatnonzero(batch.input_ids == UNKNOWN_TOKEN)
        if not unknown.size:
            return False
        self._grow(int(batch.rows.max()))
        owner = np.searchsorted(batch.starts(), unknown, side="right") - 1
        known = self._is_known[batch.rows[owner]]
        assert known.all(), "UNKNOWN_TOKEN in a row for which no token was sampled"
        return True

    def fill(self, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """`ids` [T] with every UNKNOWN_TOKEN replaced; `rows` [T] are the tokens' rows. Both are on the
        device."""
        return torch.where(ids == UNKNOWN_TOKEN, self._tokens[rows], ids)

    def record(self, batch: ForwardBatch, tokens: torch.Tensor | npt.NDArray[np.int64]) -> None:
        """Record that `tokens` [N] were sampled for `batch.sampled`."""
        if not len(batch.sampled):
            return
        self.mark(batch)
        if not isinstance(tokens, torch.Tensor):
            tokens = upload(tokens, self._device)
        rows = batch.rows[batch.sampled].astype(np.int64)
        self.keep(upload(rows, self._device), tokens)

    def keep(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Keep the tokens [N] of `rows` [N], both on the device."""
        self._tokens.index_copy_(0, rows, tokens)

    def mark(self, batch: ForwardBatch) -> None:
        """Record that tokens of `batch.sampled` are kept."""
        self._grow(int(batch.rows.max()))
        self._is_known[batch.rows[batch.sampled]] = True

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
        more = row + 1 - len(self._is_known)
        if more > 0:
            more = max(more, len(self._is_known))
            self._is_known = np.pad(self._is_known, (0, more))
            self._tokens = torch.cat((self._tokens, self._tokens.new_zeros(more)))
