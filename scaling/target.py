"""The number of workers for a mean load."""

from __future__ import annotations

import math
from collections.abc import Collection


def workers_for_load(loads: Collection[float], target_load: float) -> int:
    """As many workers as bring the mean load to `target_load`, and at least 1."""
    # Rounded first: 0.7 + 0.7 over 0.7 must be 2 workers, not 3.
    return max(1, math.ceil(round(sum(loads) / target_load, 6)))
