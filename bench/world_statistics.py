"""Can observations of two worlds be told apart? Permutation tests, Holm's correction, and a classifier.

Worlds are booleans, one for each probe; an observation has numbers and categories by name. Nothing here
assumes a distribution: a number is tested by its rank, a category by how often each of its values comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Worlds = npt.NDArray[np.bool_]

_RARE = 0.01  # share of the probes below which a category is one of "others" for the classifier
_RIDGE = 1.0  # added to the curvature of each weight
_NEWTON_STEPS = 25
_DIVISIONS = 10  # of the probes in halves; one alone may be lucky


@dataclass(frozen=True)
class Observed:
    """What one probe saw."""

    numbers: Mapping[str, float] = field(default_factory=dict)
    categories: Mapping[str, str] = field(default_factory=dict)


def permutation_ps(
    seen: Sequence[Observed], worlds: Worlds, rounds: int, draw: np.random.Generator
) -> dict[str, float]:
    """By feature, the share of `rounds` random orders of the worlds that set them at least as far apart.

    Numbers by the sum of ranks in one world, categories by chi-square over their values.
    """
    labels = np.array([worlds, *(draw.permutation(worlds) for _ in range(rounds))], np.float64)
    found: dict[str, float] = {}
    for name in sorted({name for one in seen for name in one.numbers}):
        ranks = _ranks(_numbers(seen, name))
        found[name] = _share_as_far(np.abs(labels @ (ranks - ranks.mean())))
    for name in sorted({name for one in seen for name in one.categories}):
        values = [one.categories.get(name, "") for one in seen]
        common = [value for value, count in Counter(values).items() if count > 1]
        is_value = np.array([[value == one for one in common] for value in values], np.float64)
        if not common:
            found[name] = 1.0
            continue
        expected = is_value.sum(axis=0) * worlds.mean()
        found[name] = _share_as_far(((labels @ is_value - expected) ** 2 / expected).sum(axis=1))
    return found


def holm(ps: Mapping[str, float]) -> dict[str, float]:
    """The same p values, corrected for how many there are."""
    corrected: dict[str, float] = {}
    largest = 0.0
    for place, (name, p) in enumerate(sorted(ps.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, p * (len(ps) - place)))
        corrected[name] = largest
    return corrected


def auc(scores: Floats, worlds: Worlds) -> float:
    """The chance that a probe of the first world (True) has a higher score than one of the other."""
    ours = int(worlds.sum())
    others = len(worlds) - ours
    if not ours or not others:
        return 0.5
    return float((_ranks(scores)[worlds].sum() - ours * (ours + 1) / 2) / (ours * others))


@dataclass(frozen=True)
class Guessed:
    """How well a classifier told two worlds apart on probes that it was not trained on."""

    auc: float
    upper: float  # 95% of all resamplings of the probes are below


def classify(seen: Sequence[Observed], worlds: Worlds, rounds: int, draw: np.random.Generator) -> Guessed:
    """Train on one half and test on the other, and the other way round, for several divisions: the mean."""
    tested = [one for _ in range(_DIVISIONS) for one in _both_ways(seen, worlds, draw)]
    everybody = np.arange(len(worlds))
    resampled = [_mean_auc(tested, worlds, draw.integers(0, len(worlds), len(worlds))) for _ in range(rounds)]
    return Guessed(_mean_auc(tested, worlds, everybody), float(np.quantile(resampled, 0.95)))


@dataclass(frozen=True)
class _Tested:
    """Scores of all probes by a classifier, and which of them are in the half that it was not trained on."""

    scores: Floats
    is_test: npt.NDArray[np.bool_]


def _both_ways(seen: Sequence[Observed], worlds: Worlds, draw: np.random.Generator) -> list[_Tested]:
    is_first = draw.permutation(len(worlds)) < len(worlds) // 2
    tested = []
    for is_test in (is_first, ~is_first):
        table = _table(seen, np.flatnonzero(~is_test))
        tested.append(_Tested(table @ _logistic(table[~is_test], worlds[~is_test]), is_test))
    return tested


def _mean_auc(tested: Sequence[_Tested], worlds: Worlds, probes: npt.NDArray[np.intp]) -> float:
    """Over those of `probes` that each classifier was not trained on."""
    areas = []
    for one in tested:
        chosen = probes[one.is_test[probes]]
        areas.append(auc(one.scores[chosen], worlds[chosen]))
    return float(np.mean(areas))


def _share_as_far(distances: Floats) -> float:
    """The first is the true order's."""
    return float(np.mean(distances >= distances[0] * (1 - 1e-9)))


def _ranks(values: Floats) -> Floats:
    """From 1; equal values have the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: Floats = (last - (counts - 1) / 2)[place]
    return ranks


def _numbers(seen: Sequence[Observed], name: str) -> Floats:
    return np.array([one.numbers.get(name, 0.0) for one in seen], np.float64)


def _table(seen: Sequence[Observed], train: npt.NDArray[np.intp]) -> Floats:
    """[probes, columns]: ones; each number, with mean 0 and variance 1 over `train`, and its size; and a
    column for each value of a category that is not rare there."""
    columns = [np.ones(len(seen))]
    for name in sorted({name for one in seen for name in one.numbers}):
        values = _numbers(seen, name)
        deviation = float(values[train].std())
        if deviation > 0:
            scaled = np.clip((values - values[train].mean()) / deviation, -5, 5)
            columns += [scaled, np.abs(scaled)]
    for name in sorted({name for one in seen for name in one.categories}):
        counts = Counter(seen[at].categories.get(name, "") for at in train)
        for value, count in sorted(counts.items()):
            if _RARE * len(train) < count < len(train):
                columns.append(np.array([one.categories.get(name, "") == value for one in seen], np.float64))
    return np.stack(columns, axis=1)


def _logistic(table: Floats, worlds: Worlds) -> Floats:
    """Weights of a logistic regression with a ridge, by Newton's method."""
    weights = np.zeros(table.shape[1])
    ridge = np.full(table.shape[1], _RIDGE)
    for _ in range(_NEWTON_STEPS):
        chance = 1 / (1 + np.exp(-np.clip(table @ weights, -30, 30)))
        slope = table.T @ (worlds - chance) - ridge * weights
        curvature = (table * (chance * (1 - chance))[:, None]).T @ table + np.diag(ridge)
        step = np.linalg.solve(curvature, slope)
        weights += step
        if float(np.abs(step).max()) < 1e-8:
            break
    return weights
