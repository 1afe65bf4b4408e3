"""bench.side_channel's statistics find a difference that is there, and none that is not."""

from __future__ import annotations

import numpy as np
import pytest

from bench.world_statistics import Observed, auc, classify, holm, permutation_ps

PROBES = 400


def drawn(shift: float, share: float) -> tuple[list[Observed], np.ndarray]:
    """Probes of two worlds. In one of them a time is shorter by `shift` deviations and a header is "hit" more
    often by `share`; each has an id of its own, and a constant."""
    draw = np.random.default_rng(7)
    worlds = draw.permutation(np.arange(PROBES) % 2 == 0)
    seen = []
    for number, world in enumerate(worlds):
        hit = draw.random() < 0.3 + share * world
        seen.append(
            Observed(
                {"time": float(draw.normal(-shift * world)), "constant": 3.0},
                {"cache": "hit" if hit else "miss", "id": f"id {number}", "server": "one"},
            )
        )
    return seen, worlds


def test_what_differs_is_found_and_named() -> None:
    seen, worlds = drawn(shift=1.0, share=0.0)
    found = permutation_ps(seen, worlds, 2000, np.random.default_rng(1))
    assert found["time"] == pytest.approx(1 / 2001)
    assert found["constant"] == found["id"] == found["server"] == 1.0
    assert found["cache"] > 0.01
    by_header, worlds = drawn(shift=0.0, share=0.4)
    found = permutation_ps(by_header, worlds, 2000, np.random.default_rng(1))
    assert found["cache"] == pytest.approx(1 / 2001)
    assert found["time"] > 0.01


def test_holms_correction() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}) == pytest.approx(
        {"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06}
    )
    assert holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0}


def test_the_area_under_the_curve() -> None:
    worlds = np.array([True, False, True, False])
    assert auc(np.array([4.0, 1.0, 3.0, 2.0]), worlds) == 1.0
    assert auc(np.array([1.0, 4.0, 2.0, 3.0]), worlds) == 0.0
    assert auc(np.array([1.0, 1.0, 1.0, 1.0]), worlds) == 0.5
    assert auc(np.array([1.0, 1.0, 2.0, 0.0]), worlds) == 0.875
    assert auc(np.array([1.0, 2.0]), np.array([True, True])) == 0.5


def test_a_classifier_is_as_good_as_its_features() -> None:
    blind = classify(*drawn(shift=0.0, share=0.0), 300, np.random.default_rng(2))
    assert 0.4 < blind.auc < 0.6
    assert blind.auc + 0.03 < blind.upper < blind.auc + 0.1
    by_time = classify(*drawn(shift=1.0, share=0.0), 300, np.random.default_rng(2))
    assert by_time.auc == pytest.approx(0.76, abs=0.05)  # of two normal variables a deviation apart
    by_header = classify(*drawn(shift=0.0, share=0.6), 300, np.random.default_rng(2))
    assert by_header.auc == pytest.approx(0.8, abs=0.06)
