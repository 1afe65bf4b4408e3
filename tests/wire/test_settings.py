"""What holds when several processes know different things."""

from __future__ import annotations

import functools
import itertools

import msgspec
import pytest

from common.errors import WireError
from wire.codec import decode, encode
from wire.messages.directory import View
from wire.settings import MOST_SETTINGS, NO_SETTINGS, ModelWeights, Settings, TenantGeneration


def said(revision: int, **weights: float) -> Settings:
    return Settings({"m": ModelWeights(revision, weights, {})})


def test_the_last_word_holds_in_whatever_order_words_come() -> None:
    words = [said(1, a=1.0), said(2, a=3.0), said(2, b=1.0), said(2, a=2.0, b=1.0)]
    ends = {
        msgspec.msgpack.encode(
            functools.reduce(Settings.with_told, order, NO_SETTINGS), order="deterministic"
        )
        for order in itertools.permutations(words)
    }
    assert len(ends) == 1, "words of one revision have an order, too"
    assert functools.reduce(Settings.with_told, words, NO_SETTINGS).weights["m"].revision == 2


def test_models_are_apart_and_what_is_known_changes_nothing() -> None:
    known = Settings({"m": ModelWeights(3, {"a": 1.0}, {}), "n": ModelWeights(1, {}, {})})
    assert known.with_told(said(2, a=9.0)) is known
    assert known.with_told(Settings({"m": ModelWeights(3, {"a": 1.0}, {})})) is known
    assert known.with_told(Settings({"o": ModelWeights(1, {}, {})})).weights.keys() == {"m", "n", "o"}


def test_a_peer_cannot_fill_the_memory() -> None:
    flood = Settings({f"m{number}": ModelWeights(1, {}, {}) for number in range(1001)})
    known = said(1).with_told(flood)
    assert len(known.weights) == MOST_SETTINGS
    assert known.weights["m"] == said(1).weights["m"], "nothing that is known gives way"
    assert known.with_told(Settings(dict(reversed(flood.weights.items())))) is known


def test_processes_that_are_full_take_the_later_word_of_what_they_know() -> None:
    def forgotten(name: str, revision: int) -> Settings:
        return Settings(tenants={name: TenantGeneration(revision, [0])})

    base = Settings(tenants={f"t{number}": TenantGeneration(1, [0]) for number in range(MOST_SETTINGS - 1)})
    one, other = base.with_told(forgotten("x", 5)), base.with_told(forgotten("y", 5))
    directory = base.with_told(one).with_told(other)
    assert directory.tenants.keys() == one.tenants.keys(), "there was one place"
    directory = directory.with_told(other.with_told(forgotten("t0", 9)))
    directory = directory.with_told(one.with_told(forgotten("t1", 9)))
    for process in (one.with_told(directory), other.with_told(directory)):
        assert (process.tenants["t0"].revision, process.tenants["t1"].revision) == (9, 9)
        assert len(process.tenants) == MOST_SETTINGS
    assert other.with_told(directory).tenants["y"].revision == 5


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0])
def test_what_is_no_weight_is_not_decoded(weight: float) -> None:
    view = View(0, 0, [], settings=said(1, a=1.0))
    assert decode(encode(view)) == view
    with pytest.raises(WireError):
        decode(encode(View(0, 0, [], settings=said(1, a=weight))))
