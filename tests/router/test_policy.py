from __future__ import annotations

import pytest

from router.books import Books, Entry
from router.options import PolicyWeights
from router.policy import POLICIES, Candidate, make_policy
from tests.router.test_directory import record
from wire.errors import ConfigError
from wire.records import Role, WorkerLoad

WEIGHTS = PolicyWeights.model_validate({})


def candidate(name: str, hit: int = 0, queued: int = 0, requests: int = 0) -> Candidate:
    return Candidate(record(name), hit, queued, requests)


def test_prefill_left_is_weighed_against_the_queue() -> None:
    policy = make_policy("kv", WEIGHTS, 16)
    d = [candidate("d")]
    choice = policy.choose(1000, [candidate("warm", hit=800, queued=500), candidate("cold")], d)
    assert choice is not None
    assert choice.prefill is not None
    assert choice.prefill.record.id == "warm"
    assert choice.costs["prefill warm"] == 700
    choice = policy.choose(1000, [candidate("warm", hit=800, queued=900), candidate("cold")], d)
    assert choice is not None
    assert choice.prefill is not None
    assert choice.prefill.record.id == "cold"


def test_decode_takes_load_and_its_own_hits() -> None:
    policy = make_policy("kv", WEIGHTS, 0)
    p = [candidate("p")]
    choice = policy.choose(1000, p, [candidate("a", requests=1), candidate("b", hit=900, requests=3)])
    assert choice is not None
    assert choice.decode.record.id == "b"  # 96 + 10 against 32 + 100
    choice = policy.choose(1000, p, [candidate("a", requests=1), candidate("b", hit=900, requests=9)])
    assert choice is not None
    assert choice.decode.record.id == "a"


def test_decode_alone_when_little_is_left_or_there_is_no_prefill() -> None:
    policy = make_policy("kv", WEIGHTS, 16)
    choice = policy.choose(100, [candidate("p")], [candidate("d", hit=96), candidate("e")])
    assert choice is not None
    assert choice.prefill is None
    assert choice.decode.record.id == "d"
    choice = policy.choose(100, [], [candidate("d")])
    assert choice is not None
    assert choice.prefill is None
    assert policy.choose(100, [candidate("p")], []) is None


@pytest.mark.parametrize("name", POLICIES)
def test_equals_take_turns(name: str) -> None:
    policy = make_policy(name, WEIGHTS, 0)
    seen = set()
    for _ in range(40):
        choice = policy.choose(100, [candidate("p"), candidate("q")], [candidate("d"), candidate("e")])
        assert choice is not None
        assert choice.prefill is not None
        seen |= {choice.prefill.record.id, choice.decode.record.id}
    assert seen == {"p", "q", "d", "e"}


def test_least_loaded_takes_the_least_loaded() -> None:
    choice = make_policy("least-loaded", WEIGHTS, 0).choose(
        100,
        [candidate("p", queued=5), candidate("q")],
        [candidate("d", requests=2), candidate("e", requests=1)],
    )
    assert choice is not None
    assert choice.prefill is not None
    assert (choice.prefill.record.id, choice.decode.record.id) == ("q", "e")


def test_an_unknown_policy_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"policy: 'best'.*kv, round-robin, least-loaded, random"):
        make_policy("best", WEIGHTS, 0)


def test_books_count_what_reports_do_not_know_yet() -> None:
    books = Books()
    load = WorkerLoad(headroom_tokens=100, headroom_rows=2)
    p, d = record("p"), record("d", role=Role.DECODE, load=load)
    books.update([p, d])
    entry = Entry("d", "p", 60)
    assert books.fits("d", 100)
    books.place(entry, 80)
    assert not books.fits("d", 30)
    assert books.candidates(Role.PREFILL, {"p": 2}, 16) == [Candidate(p, 32, 60, 1)]
    entry = books.prefilled(books.prefilled(entry))
    assert books.candidates(Role.PREFILL, {}, 16) == [Candidate(p, 0, 0, 0)]
    assert books.candidates(Role.DECODE, {}, 16) == [Candidate(d, 0, 0, 1)]
    books.update([p, record("d", role=Role.DECODE, load=WorkerLoad(headroom_tokens=90, headroom_rows=1))])
    assert books.fits("d", 90)  # the new report has what was promised
    books.close(entry)
    assert books.candidates(Role.DECODE, {}, 16)[0].requests == 0


def test_a_draining_worker_is_no_candidate() -> None:
    books = Books()
    books.update([record("p", draining=True)])
    assert books.candidates(Role.PREFILL, {}, 16) == []
