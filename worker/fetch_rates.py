"""FetchRates: how fast pages have come from each source, and whether another fetch would be faster than
computing."""

from __future__ import annotations

from dataclasses import dataclass

_KEPT = 0.75  # weight of what was known before, per fetch
_TRY_AGAIN_S = 10.0  # a source that was too slow is tried again after that


@dataclass(slots=True)
class _Source:
    s_per_token: float
    at: float  # when it was last measured


class FetchRates:
    """By source. One thread; time is passed in."""

    def __init__(self) -> None:
        self._sources: dict[str, _Source] = {}

    def pays(self, source: str, tokens: int, compute_s: float | None, now: float) -> bool:
        """Whether fetching that many tokens should take less than `compute_s` (None: not known). A source of
        which nothing is known, or nothing new, is tried: else nothing would be learnt."""
        known = self._sources.get(source)
        if known is None or compute_s is None or now - known.at >= _TRY_AGAIN_S:
            return True
        return known.s_per_token * tokens < compute_s

    def fetched(self, source: str, tokens: int, seconds: float, now: float) -> None:
        """A fetch from `source` brought `tokens` tokens."""
        rate = seconds / max(tokens, 1)
        known = self._sources.get(source)
        if known is None:
            self._sources[source] = _Source(rate, now)
        else:
            known.s_per_token = _KEPT * known.s_per_token + (1 - _KEPT) * rate
            known.at = now

    def forget(self, source: str) -> None:
        """The source is gone."""
        self._sources.pop(source, None)
