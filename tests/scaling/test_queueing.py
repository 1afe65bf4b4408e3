"""Queueing: against Erlang's formula, which is exact for M/M/c."""

from __future__ import annotations

import math

import pytest

from scaling.queueing import fewest, wait_quantile


def erlang_wait(workers: int, busy: float, service_s: float, share: float) -> float:
    """The wait that this share of requests does not exceed, in M/M/c."""
    blocked = 1.0
    for count in range(1, workers + 1):
        blocked = busy * blocked / (count + busy * blocked)
    waits = blocked / (1 - busy / workers * (1 - blocked))
    return max(0.0, math.log(waits / (1 - share))) * service_s / (workers - busy)


@pytest.mark.parametrize("workers", [1, 2, 5, 16, 64])
@pytest.mark.parametrize("rho", [0.6, 0.8, 0.95])
def test_it_is_close_to_erlangs_formula(workers: int, rho: float) -> None:
    ours = wait_quantile(workers, rho * workers, 0.5, 0.95)
    exact = erlang_wait(workers, rho * workers, 0.5, 0.95)
    assert ours == pytest.approx(exact, rel=0.15, abs=0.05), "within 15%, or a tenth of a service"


def test_too_few_workers_never_catch_up() -> None:
    assert wait_quantile(2.0, 2.0, 0.5, 0.95) == math.inf


def test_fewest_is_within_a_hundredth() -> None:
    assert fewest(lambda workers: workers >= 7.3) == pytest.approx(7.3, abs=0.011)
    assert fewest(lambda workers: workers >= 0.4) == pytest.approx(0.4, abs=0.011)
