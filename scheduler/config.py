"""SchedulerConfig: the settings of one scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from common.errors import ConfigError


class Phase(StrEnum):
    """What requests may do on a worker. Without DECODE, every prefilled request must be handed off."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class SchedulerConfig:
    """Sizes are in tokens unless said. Raises ConfigError for a value that cannot work."""

    model: str  # served name: the namespace of every request's prefix
    max_running_requests: int = 64  # in prefill or in the decode batch at once
    chunked_prefill_size: int | None = 512  # prefill tokens of one step; None: prompts are never cut
    max_prefill_tokens: int = 8192  # prefill tokens of one step over all requests, even when not cut
    last_chunk_tokens: int = 0  # > 0: a cut prompt ends with a chunk of at most that many (rounded to pages)
    decode_reserve_tokens: int = 512  # growth kept free per request at admission: min(still to come, this)
    overlap_depth: int = 0  # 1: a step is launched before the last one's result is taken
    phases: frozenset[Phase] = frozenset(Phase)
    result_timeout_s: float = 120.0  # step() raises after that; see Rates.bound_s

    def __post_init__(self) -> None:
        positive = {
            "max_running_requests": self.max_running_requests,
            "max_prefill_tokens": self.max_prefill_tokens,
            "chunked_prefill_size": 1 if self.chunked_prefill_size is None else self.chunked_prefill_size,
        }
        for key, value in positive.items():
            if value < 1:
                raise ConfigError(key, f"{value} schedules nothing", "use 1 or more")
        if self.overlap_depth not in (0, 1):
            raise ConfigError("overlap_depth", f"{self.overlap_depth} is not supported", "use 0 or 1")
        if min(self.last_chunk_tokens, self.decode_reserve_tokens) < 0:
            raise ConfigError("decode_reserve_tokens", "a size is negative", "use 0 or more")
        if Phase.PREFILL not in self.phases:
            raise ConfigError(
                "phases", "prefill is missing", "admit it: retracted requests are prefilled again"
            )

    def step_tokens(self, page_size: int) -> int:
        """Prefill tokens of one step; at least a page, because prompts are cut on page borders."""
        chunk = self.chunked_prefill_size or self.max_prefill_tokens
        return max(min(chunk, self.max_prefill_tokens), page_size)

    @property
    def cuts_prompts(self) -> bool:
        """Whether a prompt may be prefilled in more than one step."""
        return self.chunked_prefill_size is not None
