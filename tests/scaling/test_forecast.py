"""Forecast: what it says of arrivals whose rate is known."""

from __future__ import annotations

import random

import pytest

from scaling.forecast import Forecast


def fed(rates: list[float], period_s: float = 5.0) -> Forecast:
    """Rates of periods, one after another."""
    forecast = Forecast()
    forecast.observe(0.0, 0.0)
    for number, rate in enumerate(rates, 1):
        forecast.observe(rate * period_s, number * period_s)
    return forecast


def test_it_knows_nothing_before_the_second_observation() -> None:
    forecast = Forecast()
    assert forecast.rate(60.0) == 0.0
    forecast.observe(1e9, 100.0)
    assert forecast.rate(60.0) == 0.0, "what came before the first observation has no duration"


def test_a_steady_rate_stays() -> None:
    assert fed([7.0] * 40).rate(60.0) == pytest.approx(7.0)


def test_a_rise_goes_on_and_a_fall_does_not() -> None:
    rising = fed([0.1 * number for number in range(40)])
    assert rising.rate(0.0) == pytest.approx(0.1 * 39.5)
    assert rising.rate(60.0) == pytest.approx(0.1 * (39.5 + 12))
    falling = fed([10.0 - 0.1 * number for number in range(40)])
    assert falling.rate(60.0) == falling.rate(0.0) == pytest.approx(10.0 - 0.1 * 39.5)


def test_noise_is_averaged() -> None:
    chance = random.Random(3)
    noisy = fed([10.0 + chance.gauss(0.0, 2.0) for _ in range(60)])
    assert noisy.rate(0.0) == pytest.approx(10.0, abs=1.0), "half of one observation's deviation"


def test_old_observations_are_forgotten() -> None:
    assert fed([1000.0] * 60 + [1.0] * 61).rate(60.0) == pytest.approx(1.0)
