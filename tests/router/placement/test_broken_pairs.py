"""Broken pairs: how long two workers are kept apart."""

from __future__ import annotations

from router.placement.broken_pairs import BrokenPairs


def test_a_pair_is_broken_for_five_seconds_after_it_was_last_found() -> None:
    pairs = BrokenPairs()
    pairs.add("p", "d", 0.0)
    pairs.add("p", "d", 3.0)
    assert [(one.prefill, one.decode) for one in pairs.history] == [("p", "d")]
    assert pairs.broken("p", "d", 7.9)
    assert not pairs.broken("p", "e", 7.9)
    assert not pairs.broken("q", "d", 7.9)
    assert pairs.history[0].cleared_at_unix is None
    assert not pairs.broken("p", "d", 8.0)
    assert pairs.history[0].cleared_at_unix is not None


def test_it_ends_when_the_pair_works_or_one_of_the_two_is_gone() -> None:
    pairs = BrokenPairs()
    for prefill, decode in (("p", "d"), ("p", "e"), ("q", "d"), ("q", "e")):
        pairs.add(prefill, decode, 0.0)
    pairs.works("p", "d")
    pairs.gone("q")
    assert [(p, d) for p in "pq" for d in "de" if pairs.broken(p, d, 1.0)] == [("p", "e")]
    pairs.gone("e")
    assert all(one.cleared_at_unix is not None for one in pairs.history)
