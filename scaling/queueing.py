"""How long requests wait in a queue before `workers` equal workers.

Sakasegawa's approximation for M/M/c ("An approximation formula Lq = alpha rho^beta / (1 - rho)", 1977): the
share of requests that wait is rho^(sqrt(2 (c + 1)) - 1). Those that wait do so for an exponentially
distributed time of mean service / (c (1 - rho)). Unlike Erlang's formula it takes any c, so the number of
workers that is needed can be bisected.
"""

from __future__ import annotations

import math
from collections.abc import Callable

_PRECISION = 0.01  # of a number of workers
_MOST = 1e5


def wait_quantile(workers: float, busy: float, service_s: float, share: float) -> float:
    """The wait in seconds that this share of requests does not exceed; infinite when the workers are too few.

    `busy` is the arriving work in workers: arrivals per second times `service_s`, the mean service.
    """
    rho = busy / workers
    if rho >= 1:
        return math.inf
    waits = rho ** (math.sqrt(2 * (workers + 1)) - 1)
    return max(0.0, math.log(waits / (1 - share))) * service_s / (workers * (1 - rho)) if waits > 0 else 0.0


def fewest(enough: Callable[[float], bool]) -> float:
    """The smallest number of workers that is enough, in hundredths. More than enough workers are enough."""
    low, high = 0.0, 1.0
    while not enough(high) and high < _MOST:
        low, high = high, 2 * high
    while high - low > _PRECISION:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
