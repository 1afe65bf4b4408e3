"""ReportedLogprobs: the log-probabilities of rows that ask for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
        self._named = [state.params.logprob_token_ids for state in states]
        self._most_named = max(map(len, self._named), default=0)
        self._named_index: torch.Tensor | None = None
        if self._most_named:
            index = np.zeros((len(states), self._most_named), dtype=np.int64)
            for row, named in zip(index, self._named, strict=True):
                row[: len(named)] = named
            self._named_index = to_device(index)

    def compute(self, logits: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
        """Of a batch's logits [N, vocab] and tokens int64 [N]: int32 parts for `read`, flat."""
        logprobs = logits.index_select(0, self._index).float().log_softmax(-1)
        chosen = logprobs.gather(1, tokens.index_select(0, self._index)[:, None])
        parts = [chosen.view(torch.int32).flatten()]
        if self._best:
            values, ids = logprobs.topk(self._best)
            parts += [values.view(torch.int32).flatten(), ids.to(torch.int32).flatten()]
        if self._named_index is not None:
            parts.append(logprobs.gather(1, self._named_index).view(torch.int32).flatten())
        return parts

    def read(self, packed: npt.NDArray[np.int32], into: list[TokenLogprobs | None]) -> npt.NDArray[np.int32]:
        """Set what the head of `packed` says of the rows. Returns the rest."""
        n, best, most_named = len(self._rows), self._best, self._most_named
        ends = np.cumsum([n, n * best, n * best, n * most_named])
        chosen, values, ids, of_named, rest = np.split(packed, ends)
        tops = self._tops(values.view(np.float32).reshape(n, best), ids.reshape(n, best))
        named = of_named.view(np.float32).reshape(n, most_named).tolist()
        rows = zip(self._rows, chosen.view(np.float32).tolist(), tops, self._named, named, strict=True)
        for row, logprob, top, of, logprobs in rows:
            of_names = zip(of, logprobs, strict=False)  # what is left is padding
            into[row] = TokenLogprobs(logprob, [*top, *of_names])
        return rest

    def _tops(
        self, values: npt.NDArray[np.float32], ids: npt.NDArray[np.int32]
    ) -> Iterator[list[tuple[int, float]]]:
        """Of each row as many of the best as it asks for."""
        for count, top, of in zip(self._counts, ids.tolist(), values.tolist(), strict=True):
            yield list(zip(top[:count], of[:count], strict=True))
