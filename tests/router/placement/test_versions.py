"""Versions of models: which workers belong together, and which version a new stream gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from router.index.global_index import GlobalIndex, as_hashes
from router.placement.admission import Admission
from router.placement.broken_pairs import BrokenPairs
from router.placement.load_estimate import AssignedLoad
from router.placement.models import Models, ModelVersions
from router.placement.placer import Placer
from router.placement.policies import make_policy
from router.placement.policy import PlacementRequest
from router.placement.version import ModelVersion
from router.placement_options import AdmissionOptions, PolicyWeights
from tests.router.directory.test_directory import record
from wire.records import Role, WorkerRecord

NOBODY: frozenset[str] = frozenset()


def models(**weights: Mapping[str, float]) -> Models:
    index = GlobalIndex()

    def make(broken_pairs: BrokenPairs) -> tuple[Placer, Admission]:
        placer = Placer(index, make_policy("kv", PolicyWeights(), 0), 10.0, broken_pairs=broken_pairs)
        return placer, Admission(AdmissionOptions(), placer)

    return Models(weights, make)


def decode(worker: str, **changes: Any) -> WorkerRecord:
    return record(worker, role=Role.DECODE, **changes)


def names(versions: ModelVersions) -> list[tuple[str, str | None]]:
    return [(one.name, one.fingerprint) for one in versions.all]


def divided(versions: ModelVersions, keys: int = 4000) -> dict[str, float]:
    """The part of many keys that each version gets, by version name."""
    drawn = Counter(versions.choose(b"key %d" % number).name for number in range(keys))
    return {name: count / keys for name, count in drawn.items()}


def workers_of(version: ModelVersion) -> set[str]:
    return {one.record.id for one in version.placer.fleet.estimates()}


def test_workers_of_other_models_names_or_fingerprints_never_meet() -> None:
    both = models(m={}, n={})
    records = [
        record("p-old", fingerprint="old"), decode("d-old", fingerprint="old"),
        record("p-new", fingerprint="new"), decode("d-new", fingerprint="new"),
        decode("d-canary", fingerprint="new", version="canary"),
        record("p-n", model="n", fingerprint="old"), decode("d-n", model="n", fingerprint="old"),
    ]  # fmt: skip
    both.update(records, 0.0)
    assert names(both.by_name["m"]) == [("", "old"), ("", "new"), ("canary", "new")]
    found = [workers_of(one) for one in both.versions()]
    assert found == [{"p-old", "d-old"}, {"p-new", "d-new"}, {"d-canary"}, {"p-n", "d-n"}]
    for version in both.versions():
        choice = version.placer.choose(PlacementRequest(64, as_hashes([]), 4.0), 0.0)
        assert choice is not None
        chosen = {choice.decode_worker.record.id}
        if choice.prefill_worker is not None:
            chosen.add(choice.prefill_worker.record.id)
        assert chosen <= workers_of(version)
    assert {one.record.id for one in both.estimates()} == {one.id for one in records}


def test_the_first_version_to_come_takes_over_the_rooms_that_wait_for_any() -> None:
    both = models(m={})
    versions = both.by_name["m"]
    waiting = versions.choose(b"k")
    assert waiting.fingerprint is None
    assert versions.context_limit is None
    both.update([decode("d", fingerprint="f", max_context_tokens=70), decode("e", fingerprint="g")], 0.0)
    assert versions.all[0] is waiting
    assert names(versions) == [("", "f"), ("", "g")]
    assert versions.context_limit == 70, "of all versions: a stream may go to either"


def test_a_version_is_forgotten_with_its_last_worker_and_room_but_for_the_last_version() -> None:
    both = models(m={})
    versions = both.by_name["m"]
    both.update([decode("d", fingerprint="old"), decode("e", fingerprint="new")], 0.0)
    old, new = versions.all
    old.rooms = 1
    both.update([decode("e", fingerprint="new")], 1.0)
    assert versions.all == [old, new], "a room of it waits for a worker"
    old.rooms = 0
    before = both.changes
    both.update([], 2.0)
    assert len(versions.all) == 1
    assert both.changes > before


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        ({}, {"a": 0.75, "b": 0.25}),  # by capacity: 300 and 100 tokens
        ({"a": 95.0, "b": 5.0}, {"a": 0.95, "b": 0.05}),
        ({"a": 0.0, "b": 1.0}, {"b": 1.0}),
        ({"b": 3.0}, {"b": 1.0}),  # a version that is not named gets nothing
        ({"c": 1.0}, {"a": 0.75, "b": 0.25}),  # nobody serves what the weights name
    ],
)
def test_new_streams_are_divided_by_weight(weights: dict[str, float], wanted: dict[str, float]) -> None:
    both = models(m=weights)
    both.update(
        [
            decode("a1", version="a", fingerprint="f", total_tokens=200),
            decode("a2", version="a", fingerprint="f", total_tokens=100),
            decode("b1", version="b", fingerprint="g", total_tokens=100),
            record("b2", version="b", fingerprint="g", total_tokens=9000),
        ],
        0.0,
    )
    assert divided(both.by_name["m"]) == pytest.approx(wanted, abs=0.025)
    shares = {one.name: share for one, share in both.by_name["m"].shares()}
    assert {name: share for name, share in shares.items() if share} == pytest.approx(wanted)


def test_two_fingerprints_of_one_name_share_its_weight_by_capacity() -> None:
    both = models(m={"a": 1.0, "b": 1.0})
    both.update(
        [
            decode("old", version="a", fingerprint="f", total_tokens=300),
            decode("new", version="a", fingerprint="g", total_tokens=100),
            decode("b", version="b", fingerprint="h", total_tokens=100),
        ],
        0.0,
    )
    shares = [share for _, share in both.by_name["m"].shares()]
    assert shares == pytest.approx([0.375, 0.125, 0.5])


def test_a_conversation_stays_and_a_change_moves_only_what_it_must() -> None:
    keys = [b"conversation %d" % number for number in range(1000)]

    def where(weight: float) -> list[str]:
        both = models(m={"a": 1.0 - weight, "b": weight})
        both.update(
            [decode("a", version="a", fingerprint="f"), decode("b", version="b", fingerprint="g")], 0.0
        )
        return [both.by_name["m"].choose(key).name for key in keys]

    few, more = where(0.1), where(0.3)
    assert where(0.1) == few, "another router decides alike"
    moved = [(one, other) for one, other in zip(few, more, strict=True) if one != other]
    assert set(moved) == {("a", "b")}
    assert len(moved) == pytest.approx(200, abs=50)


def test_a_version_without_a_decode_worker_that_takes_work_gets_no_stream() -> None:
    both = models(m={"a": 1.0, "b": 1.0})
    a, b = decode("a", version="a", fingerprint="f"), decode("b", version="b", fingerprint="g")
    prefill = record("p", version="c", fingerprint="h")
    both.update([a, b, prefill], 0.0)
    versions = both.by_name["m"]
    assert set(divided(versions, 100)) == {"a", "b"}
    both.suspect(frozenset({"a"}))
    assert set(divided(versions, 100)) == {"b"}
    assert versions.another_serves(versions.all[0])
    both.suspect(NOBODY)
    assert set(divided(versions, 100)) == {"a", "b"}
    both.suspect(frozenset({"late"}))
    both.update([a, decode("late", version="d", fingerprint="i")], 1.0)
    late = next(one for one in versions.all if one.name == "d")
    assert not late.serving, "a version that comes later knows who is suspected"


def test_a_tag_names_a_version() -> None:
    both = models(m={})
    versions = both.by_name["m"]
    nobody = versions.all[0].tag
    assert versions.tagged(nobody) is None
    both.update([decode("d", fingerprint="old"), decode("e", fingerprint="new")], 0.0)
    old, new = versions.all
    assert len({nobody, old.tag, new.tag}) == 3
    assert (versions.tagged(old.tag), versions.tagged(new.tag)) == (old, new)


def test_a_worker_that_comes_back_with_other_weights_changes_its_version() -> None:
    both = models(m={})
    both.update([decode("d", fingerprint="old"), decode("e", fingerprint="old")], 0.0)
    both.update([decode("d", incarnation=2, fingerprint="new"), decode("e", fingerprint="old")], 1.0)
    assert [workers_of(one) for one in both.versions()] == [{"e"}, {"d"}]


def test_what_other_routers_have_assigned_reaches_the_worker_whatever_its_version() -> None:
    both = models(m={}, n={})
    both.update([decode("d"), decode("e", model="n")], 0.0)
    for worker in ("d", "e"):
        estimate = both.estimate(worker)
        assert estimate is not None
        load = AssignedLoad(requests=5)
        both.set_peers(estimate, load)
        assert estimate.requests() == 5
    assert both.estimate("x") is None
