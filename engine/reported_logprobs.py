"""ReportedLogprobs: the log-probabilities of rows that ask for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling_state import SamplingState
from engine.token_counts import ToDevice
from wire.request import TokenLogprobs
from wire.sampling_ranges import MOST_TOP_LOGPROBS


class ReportedLogprobs:
    """R rows of a batch. They are those of the model before bias and penalties, as in OpenAI's API."""

    def __init__(
        self, rows: Sequence[int], states: Sequence[SamplingState], vocab_size: int, to_device: ToDevice
    ) -> None:
        self._rows = list(rows)
        self._index = to_device(np.array(self._rows, dtype=np.int64))
        self._counts = [state.params.top_logprobs or 0 for state in states]
        # As many for every batch: which of equal ones are among the best depends on how many are sought.
        self._best = min(MOST_TOP_LOGPROBS, vocab_size) if any(self._counts) else 0

    def compute(self, logits: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
        """Of a batch's logits [N, vocab] and tokens int64 [N]: int32 parts for `read`, flat."""
        logprobs = logits.index_select(0, self._index).float().log_softmax(-1)
        chosen = logprobs.gather(1, tokens.index_select(0, self._index)[:, None])
        parts = [chosen.view(torch.int32).flatten()]
        if self._best:
            values, ids = logprobs.topk(self._best)
            parts += [values.view(torch.int32).flatten(), ids.to(torch.int32).flatten()]
        return parts

    def read(self, packed: npt.NDArray[np.int32], into: list[TokenLogprobs | None]) -> npt.NDArray[np.int32]:
        """Set what the head of `packed` says of the rows. Returns the rest."""
        n, best = len(self._rows), self._best
        chosen = packed[:n].view(np.float32).tolist()
        packed = packed[n:]
        if not best:
            for row, logprob in zip(self._rows, chosen, strict=True):
                into[row] = TokenLogprobs(logprob, [])
            return packed
        values = packed[: n * best].view(np.float32).reshape(n, best).tolist()
        ids = packed[n * best : 2 * n * best].reshape(n, best).tolist()
        for row, logprob, count, top, of in zip(self._rows, chosen, self._counts, ids, values, strict=True):
            into[row] = TokenLogprobs(logprob, list(zip(top[:count], of[:count], strict=True)))
        return packed[2 * n * best :]
