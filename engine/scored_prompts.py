"""Log-probabilities of a prompt's own tokens, for requests that ask for them.

Every position of a chunk goes through the head, and not the last alone. A chunk of 2,048 tokens and a
vocabulary of 150,000 would need 1.2 GB of logits, so few positions at a time do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import ForwardBatch
from engine.token_counts import ToDevice
from wire.request import TokenLogprobs
from wire.sampling_ranges import MOST_TOP_LOGPROBS

_AT_ONCE = 64  # positions

Head = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states [n, hidden] to logits [n, vocab]."""


def score_prompts(
    batch: ForwardBatch, hidden: torch.Tensor, head: Head, to_device: ToDevice
) -> torch.Tensor | None:
    """What `read_scores` reads, flat int32 on the device; None if no sequence of the batch is scored.

    `hidden` [T, hidden] is what the last layer says of each new token. Nothing waits for the device.
    """
    starts = batch.starts()
    parts: list[torch.Tensor] = []
    for scored in batch.scored:
        first = int(starts[scored.sequence])
        targets = to_device(scored.targets)
        for at, end in _blocks(len(scored.targets)):
            logprobs = head(hidden[first + at : first + end]).float().log_softmax(-1)
            chosen = logprobs.gather(1, targets[at:end, None])
            parts.append(chosen.contiguous().view(torch.int32).flatten())
            if scored.best:
                values, ids = logprobs.topk(min(MOST_TOP_LOGPROBS, logprobs.shape[-1]))
                parts += [values.view(torch.int32).flatten(), ids.to(torch.int32).flatten()]
    return torch.cat(parts) if parts else None


def scored_tokens(batch: ForwardBatch) -> list[npt.NDArray[np.int64]]:
    """The tokens of the pack that `score_prompts` gives to the head, call by call."""
    starts = batch.starts()
    return [
        np.arange(starts[scored.sequence] + at, starts[scored.sequence] + end, dtype=np.int64)
        for scored in batch.scored
        for at, end in _blocks(len(scored.targets))
    ]


def read_scores(
    batch: ForwardBatch, packed: npt.NDArray[np.int32], vocab_size: int
) -> dict[int, list[TokenLogprobs]]:
    """By sequence of the batch: the log-probabilities of its targets."""
    read: dict[int, list[TokenLogprobs]] = {}
    best = min(MOST_TOP_LOGPROBS, vocab_size)
    for scored in batch.scored:
        found = read[scored.sequence] = []
        for at, end in _blocks(len(scored.targets)):
            n = end - at
            chosen, packed = packed[:n].view(np.float32).tolist(), packed[n:]
            if not scored.best:
                found += [TokenLogprobs(one) for one in chosen]
                continue
            values = packed[: n * best].view(np.float32).reshape(n, best)[:, : scored.best].tolist()
            ids = packed[n * best : 2 * n * best].reshape(n, best)[:, : scored.best].tolist()
            packed = packed[2 * n * best :]
            found += [
                TokenLogprobs(one, list(zip(names, of, strict=True)))
                for one, names, of in zip(chosen, ids, values, strict=True)
            ]
    return read


def _blocks(n: int) -> Iterator[tuple[int, int]]:
    return ((at, min(at + _AT_ONCE, n)) for at in range(0, n, _AT_ONCE))
