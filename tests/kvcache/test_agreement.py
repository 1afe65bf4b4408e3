"""What the ranks agree on for a prefetch, whoever reports first and whoever gathers the reports."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvcache.tiers.agreement import RankReport, agree

GROUPS = ("full", "state")
WIDTH = 12


@st.composite
def report(draw: st.DrawFn) -> RankReport:
    """One rank's. Of full attention the first pages are there, states anywhere; a rank that stopped before it
    asked says nothing of any group."""
    if draw(st.integers(0, 9)) == 0:
        return RankReport({}, 0, is_over=True)
    hit, states = draw(st.integers(0, WIDTH)), draw(st.lists(st.booleans(), min_size=WIDTH, max_size=WIDTH))
    there = {"full": np.arange(WIDTH) < hit, "state": np.array(states)}
    return RankReport(there, draw(st.integers(0, hit)), draw(st.booleans()))


def plain(of: RankReport) -> tuple[Any, ...]:
    """For comparing."""
    return {group: pages.tolist() for group, pages in of.there.items()}, of.read, of.is_over


def hit_length(of: RankReport) -> int:
    """Pages of full attention from the first one on."""
    missing = np.flatnonzero(~of.there["full"]) if "full" in of.there else [0]
    return int(missing[0]) if len(missing) else WIDTH


reports = st.lists(report(), min_size=1, max_size=5)


@given(reports, st.randoms(use_true_random=False))
def test_the_order_of_the_ranks_does_not_matter(ranks: list[RankReport], draw: Any) -> None:
    other = ranks.copy()
    draw.shuffle(other)
    assert plain(agree(other)) == plain(agree(ranks))


@given(reports)
def test_hit_lengths_are_the_minimum_and_termination_the_maximum(ranks: list[RankReport]) -> None:
    agreed = agree(ranks)
    assert hit_length(agreed) == min(map(hit_length, ranks))
    assert agreed.read == min(rank.read for rank in ranks)
    assert agreed.is_over == max(rank.is_over for rank in ranks)


@given(reports)
def test_nothing_is_agreed_that_a_rank_lacks(ranks: list[RankReport]) -> None:
    agreed = agree(ranks)
    for rank in ranks:
        assert agreed.read <= rank.read
        assert agreed.is_over or not rank.is_over
        for group, pages in agreed.there.items():
            assert not (pages & ~rank.there[group]).any()


@given(reports)
def test_what_all_ranks_have_is_agreed(ranks: list[RankReport]) -> None:
    agreed = agree(ranks)
    for group in GROUPS:
        if all(group in rank.there for rank in ranks):
            common = np.all([rank.there[group] for rank in ranks], axis=0)
            assert agreed.there[group].tolist() == common.tolist()


@given(reports)
def test_an_agreement_is_a_report(ranks: list[RankReport]) -> None:
    once = plain(agree(ranks))
    assert plain(agree([agree(ranks)])) == once
    assert plain(agree([*ranks, agree(ranks)])) == once


@given(reports, reports, reports)
def test_who_gathers_does_not_matter(a: list[RankReport], b: list[RankReport], c: list[RankReport]) -> None:
    together = plain(agree([*a, *b, *c]))
    assert plain(agree([agree([agree(a), agree(b)]), agree(c)])) == together
    assert plain(agree([agree(a), agree([agree(b), agree(c)])])) == together
