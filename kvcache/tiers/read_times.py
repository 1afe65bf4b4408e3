"""ReadTimes: how long reads from storage take, and whether another would be faster than computing."""

from __future__ import annotations

_KEPT = 7 / 8  # weight of earlier reads, per new read
_KNOWN = 4  # reads, with their weights: from then on a single one counts only as far as it is likely
_MOST_OF_EXPECTED = 8.0  # a read counts with at most so many times what it should have taken,
_LEAST_CUT_S = 0.05  # or with that if it is more
_TRY_AGAIN_S = 30.0  # a storage that was too slow is tried again after that
_TRY_AGAIN_SKIPS = 64  # and with every read of so many that would not pay
_FORGOTTEN = 1e-100  # pages, after thousands of reads without any: their squares would be 0
_SAME = 1e-9  # relative spread of sizes below which all reads had one size


class ReadTimes:
    """Seconds = latency + pages x seconds per page, fitted to the recent reads by least squares.

    Of small reads the latency decides, of large ones the rate. Pages are those of the primary group: what a
    read brings of the other groups counts with its seconds. One thread; time is passed in.
    """

    def __init__(self) -> None:
        self._reads = self._pages = self._seconds = 0.0  # sums, the newest with weight 1
        self._pages_squared = self._products = 0.0
        self._tried_at = 0.0
        self._skips = 0  # since the last try

    def measured(self, pages: int, seconds: float, now: float) -> None:
        """A read of `pages` pages, 0 if nothing was there, has taken `seconds`. A single one that took far
        longer than those before it says that the storage stood still, not that it has become slow."""
        expected = self.expected_s(pages)
        is_known = self._reads >= _KNOWN and (not pages or self._pages >= _FORGOTTEN)
        if expected is not None and is_known:
            seconds = min(seconds, max(_MOST_OF_EXPECTED * expected, _LEAST_CUT_S))
        self._reads = _KEPT * self._reads + 1
        self._pages = _KEPT * self._pages + pages
        self._seconds = _KEPT * self._seconds + seconds
        self._pages_squared = _KEPT * self._pages_squared + pages * pages
        self._products = _KEPT * self._products + pages * seconds
        self._tried_at = now

    def expected_s(self, pages: int) -> float | None:
        """Seconds that a read of so many pages should take; None before the first read. As long as none has
        brought pages, it is the latency alone: less than a read would take."""
        if not self._reads:
            return None
        latency, s_per_page = self._fit()
        return latency + pages * s_per_page

    def _fit(self) -> tuple[float, float]:
        """Latency and seconds per page, neither below 0."""
        if self._pages < _FORGOTTEN:
            return self._seconds / self._reads, 0.0
        spread = self._reads * self._pages_squared - self._pages**2
        if spread <= _SAME * self._reads * self._pages_squared:
            return 0.0, self._seconds / self._pages
        s_per_page = (self._reads * self._products - self._pages * self._seconds) / spread
        latency = (self._seconds - s_per_page * self._pages) / self._reads
        if s_per_page < 0:
            return self._seconds / self._reads, 0.0
        return (latency, s_per_page) if latency > 0 else (0.0, self._products / self._pages_squared)

    def pays(self, pages: int, compute_s: float | None) -> bool:
        """Whether reading so many pages should take less than `compute_s` (None: not known). When one of the
        two is not known it does: else nothing would be learnt."""
        expected = self.expected_s(pages)
        return expected is None or compute_s is None or expected < compute_s

    def try_again(self, now: float) -> bool:
        """Whether a read that does not pay is begun all the same, because the storage may be faster now."""
        self._skips += 1
        if self._skips < _TRY_AGAIN_SKIPS and now - self._tried_at < _TRY_AGAIN_S:
            return False
        self._skips, self._tried_at = 0, now
        return True
