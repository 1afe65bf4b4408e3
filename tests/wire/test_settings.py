"""What holds when several processes know different things."""

from __future__ import annotations

import functools
import itertools

import msgspec
import pytest

from common.errors import WireError
from wire.codec import decode, encode
from wire.messages import View
from wire.settings import NO_SETTINGS, ModelWeights, Settings


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
    assert said(1).with_told(flood) == said(1)


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0])
def test_what_is_no_weight_is_not_decoded(weight: float) -> None:
    view = View(0, 0, [], settings=said(1, a=1.0))
    assert decode(encode(view)) == view
    with pytest.raises(WireError):
        decode(encode(View(0, 0, [], settings=said(1, a=weight))))
