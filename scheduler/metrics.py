"""What a scheduler has counted since its start."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any


class Histogram:
    """Counts per bucket: `counts[i]` values in (bounds[i-1], bounds[i]]; the last count is of larger ones."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass
class SchedulerMetrics:
    """Totals since the start, tokens and requests."""

    steps: int = 0
    prompts: int = 0  # admitted for prefill, once more after each retraction
    prefill_tokens: int = 0  # computed by prefill chunks
    decode_tokens: int = 0  # computed by decode rows
    prompt_tokens: int = 0  # of admitted and reserved prompts, each counted once
    cached_tokens: int = 0  # of those, found in the tree
    cached_from: Counter[str] = field(default_factory=Counter)  # those, by where their KV came from
    output_tokens: int = 0  # reported by on_tokens
    surplus_tokens: int = 0  # sampled for requests that were over by then
    finished: int = 0
    failed: int = 0
    aborted: int = 0
    retracted: int = 0
    cut_forwards: int = 0  # chunks that ended early because the cache wants a state there
    bad_hand_offs: int = 0  # received with a page that differed from what was sent
    fetches: Counter[str] = field(
        default_factory=Counter
    )  # of pages from other workers, by what came of them
    fetched_tokens: int = 0  # of prompts, not computed here because of them
    fetched_bytes: int = 0
    lent_pages: int = 0  # of the primary group, that other workers fetched
    lent_bytes: int = 0
    checkpoints: int = 0  # states that decoding requests set aside
    forward_seconds: Histogram = field(  # from launch to result, without overlap
        default_factory=lambda: Histogram((0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5))
    )
    fetch_seconds: Histogram = field(
        default_factory=lambda: Histogram((0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10))
    )
    batch_sequences: Histogram = field(default_factory=lambda: Histogram((1, 2, 4, 8, 16, 32, 64, 128, 256)))
    batch_tokens: Histogram = field(
        default_factory=lambda: Histogram((1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192))
    )

    def launched(self, decoded: int, chunks: list[int]) -> None:
        """Count a step with so many decode rows, and chunks of so many tokens each."""
        prefilled = sum(chunks)
        self.steps += 1
        self.decode_tokens += decoded
        self.prefill_tokens += prefilled
        self.batch_sequences.add(decoded + len(chunks))
        self.batch_tokens.add(decoded + prefilled)

    def report(self) -> dict[str, Any]:
        """The fields as plain values; a histogram as its bounds, counts and total."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: vars(value) if isinstance(value, Histogram) else value for name, value in values.items()
        }
