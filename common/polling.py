"""Waiting with a bound for what can only be asked: CUDA's events, for one, have no wait with a bound."""

from __future__ import annotations

import time
from collections.abc import Callable

_FIRST_S = 1e-5
_LONGEST_S = 1e-3
_LATENESS = 1 / 64


def poll(is_over: Callable[[], bool], timeout_s: float) -> bool:
    """Ask until it is over. False: it was not, within `timeout_s` seconds.

    It is asked at least once. The pauses grow with the time that has passed, so that the answer is late by no
    more than a small part of it, and long waits cost little.
    """
    started = time.monotonic()
    while not is_over():
        passed = time.monotonic() - started
        if passed >= timeout_s:
            return False
        time.sleep(min(max(passed * _LATENESS, _FIRST_S), _LONGEST_S, timeout_s - passed))
    return True
