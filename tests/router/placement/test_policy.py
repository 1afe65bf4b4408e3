from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given

from common.errors import ConfigError
from router.index.global_index import GlobalIndex, as_hashes
from router.placement import kv_policy
from router.placement.placement import Placement
from router.placement.placer import Placer
from router.placement.policies import POLICIES, make_policy
from router.placement.policy import Choice, PlacementRequest, Policy
from router.placement_options import PolicyWeights
from tests.router.directory.test_directory import record
from wire.records import Role, WorkerLoad, WorkerRecord

# Not the defaults, which are tuned: figures that costs can be added up with by hand.
WEIGHTS = PolicyWeights.model_validate(
    {"prefill_left": 1.0, "queue_objective": 16_384.0, "decode_prefill": 2.0}
)
DEFAULTS = PolicyWeights.model_validate({})
PAGE = 16


def ask(pages: int, output: float = 16) -> PlacementRequest:
    return PlacementRequest(pages * PAGE, as_hashes(range(pages)), output)


class IndexedPlacer(Placer):
    """A placer whose index a test can write to."""

    def __init__(self, index: GlobalIndex, policy: Policy, expect_s: float) -> None:
        super().__init__(index, policy, expect_s)
        self.index = index


def placer(
    name: str, workers: list[WorkerRecord], alone_tokens: int = 0, weights: PolicyWeights = WEIGHTS
) -> IndexedPlacer:
    """A placer with that policy and these workers. Chance is seeded."""
    made = IndexedPlacer(GlobalIndex(), make_policy(name, weights, alone_tokens, random.Random(1)), 10.0)
    made.update(workers, 0.0)
    made.page_tokens = PAGE
    return made


def prefill(name: str, queued: int = 0, host: str = "", **load_fields: Any) -> WorkerRecord:
    load = WorkerLoad(queued_prefill_tokens=queued, free_tokens=1 << 20, **load_fields)
    return record(name, load=load, host=host or name, total_tokens=1 << 20)


def decode(name: str, requests: int = 0, host: str = "", **load_fields: Any) -> WorkerRecord:
    load = WorkerLoad(
        running_requests=requests, headroom_tokens=10_000, headroom_rows=8, free_tokens=1 << 20, **load_fields
    )
    return record(name, role=Role.DECODE, load=load, host=host or name, total_tokens=1 << 20)


def chosen(choice: Choice | None) -> tuple[str | None, str]:
    assert choice is not None
    p = choice.prefill_worker
    return p.record.id if p is not None else None, choice.decode_worker.record.id


def names(placement: Placement) -> tuple[str | None, str]:
    return placement.prefill.id if placement.prefill is not None else None, placement.decode.id


def hold(made: IndexedPlacer, worker: str, pages: int, medium: str = "GPU") -> None:
    made.index.store(worker, list(range(pages)), medium)


def test_prefill_left_is_weighed_against_the_queue() -> None:
    made = placer("kv", [prefill("warm", queued=500), prefill("cold"), decode("d")])
    hold(made, "warm", 50)
    assert chosen(made.choose(ask(60), 0.0)) == ("warm", "d")
    made.update([prefill("warm", queued=900), prefill("cold"), decode("d")], 1.0)
    assert chosen(made.choose(ask(60), 1.0)) == ("cold", "d")


def test_a_reported_queue_is_projected_at_the_reported_rate() -> None:
    load = WorkerLoad(queued_prefill_tokens=1000, prefill_tokens_per_s=1000.0)
    made = placer("kv", [record("busy", load=load), prefill("calm", queued=600), decode("d")])
    assert chosen(made.choose(ask(4), 0.1))[0] == "calm"
    assert chosen(made.choose(ask(4), 0.5))[0] == "busy"


def test_a_reported_queue_stays_until_the_next_report_where_no_rate_is_known() -> None:
    made = placer("kv", [prefill("p", queued=160), prefill("q"), decode("d")])
    assert {chosen(made.choose(ask(4), 0.9))[0] for _ in range(20)} == {"q"}
    made.update([prefill("p"), prefill("q"), decode("d")], 1.0)
    assert {chosen(made.choose(ask(4), 1.0))[0] for _ in range(40)} == {"p", "q"}


def test_decode_takes_load_and_its_own_hits() -> None:
    made = placer("kv", [prefill("p"), decode("a", 1), decode("b", 3)])
    hold(made, "b", 54)
    assert chosen(made.choose(ask(60), 0.0))[1] == "b"  # 96 + 10 against 32 + 96
    made.update([prefill("p"), decode("a", 1), decode("b", 9)], 1.0)
    assert chosen(made.choose(ask(60), 1.0))[1] == "a"


def test_a_decode_worker_without_memory_is_left_alone() -> None:
    full = record("full", role=Role.DECODE, load=WorkerLoad(free_tokens=10))
    made = placer("kv", [prefill("p"), full, decode("busy", 3)])
    assert chosen(made.choose(ask(4), 0.0))[1] == "busy"


def test_neighbours_move_pages_for_less() -> None:
    workers = [prefill("p", host="one"), prefill("q", host="two"), decode("d", host="two"), decode("e")]
    made = placer("kv", workers)
    assert {chosen(made.choose(ask(60), 0.0)) for _ in range(20)} == {("q", "d")}


def test_slower_tiers_save_less() -> None:
    made = placer("kv", [prefill("storage"), prefill("host"), decode("d")])
    hold(made, "storage", 60, "DISK")
    hold(made, "host", 60, "CPU_PINNED")
    choice = made.choose(ask(60), 0.0)
    assert chosen(choice)[0] == "host"
    assert choice is not None
    assert choice.hit_tokens == 960


def test_decode_alone_when_little_is_left_or_there_is_no_prefill() -> None:
    made = placer("kv", [prefill("p"), decode("d"), decode("e")], alone_tokens=16)
    hold(made, "d", 5)
    assert chosen(made.choose(ask(6), 0.0)) == (None, "d")
    assert chosen(made.choose(ask(8), 0.0))[0] == "p"
    assert chosen(placer("kv", [decode("d")]).choose(ask(6), 0.0)) == (None, "d")
    assert placer("kv", [prefill("p")]).choose(ask(6), 0.0) is None


@pytest.mark.parametrize("name", POLICIES)
def test_equals_take_turns(name: str) -> None:
    made = placer(name, [prefill("p"), prefill("q"), decode("d"), decode("e")])
    seen = {one for _ in range(60) for one in chosen(made.choose(ask(6), 0.0))}
    assert seen == {"p", "q", "d", "e"}


def test_least_loaded_takes_the_least_loaded() -> None:
    made = placer("least-loaded", [prefill("p", queued=5), prefill("q"), decode("d", 2), decode("e", 1)])
    assert chosen(made.choose(ask(6), 0.0)) == ("q", "e")


def test_an_unknown_policy_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"policy: 'best'.*kv, prefix-affinity, .*random"):
        make_policy("best", WEIGHTS, 0)


def test_a_draining_worker_is_no_candidate() -> None:
    gone = record("p", draining=True)
    assert chosen(placer("kv", [gone, prefill("q"), decode("d")]).choose(ask(6), 0.0)) == ("q", "d")


def test_workers_to_avoid_are_taken_when_there_are_no_others() -> None:
    made = placer("kv", [prefill("p"), prefill("q"), decode("d")])
    assert chosen(made.choose(ask(6), 0.0, frozenset({"p", "d"}))) == ("q", "d")


_WORKERS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 2000), st.integers(0, 40), st.integers(0, 12)),
    min_size=1, max_size=6,
)  # fmt: skip


@given(_WORKERS, _WORKERS, st.integers(1, 200))
def test_the_choice_is_the_formulas_minimum(
    prefills: list[tuple[int, int, int, int]], decodes: list[tuple[int, int, int, int]], tokens: int
) -> None:
    """Against every pair and every D alone, priced one by one as the module says."""
    w, alone_tokens = DEFAULTS, 32
    workers, held = [], {}
    for role, side in (("p", prefills), ("d", decodes)):
        for number, (host, queued, requests, pages) in enumerate(side):
            name = f"{role}{number}"
            worker = prefill(name, queued) if role == "p" else decode(name, requests)
            workers.append(msgspec.structs.replace(worker, host=f"h{host}"))
            held[name] = min(pages, tokens // PAGE) * PAGE
    made = placer("kv", workers, alone_tokens, w)
    prompt = PlacementRequest(tokens, as_hashes(range(tokens // PAGE)), 16)
    for name, count in held.items():
        hold(made, name, count // PAGE)

    def left(name: str) -> float:
        return max(1, tokens - held[name])

    costs: dict[tuple[str | None, str], float] = {}
    for number, (host, _, requests, _) in enumerate(decodes):
        d = f"d{number}"
        load = w.decode_load * requests
        if left(d) <= alone_tokens:
            costs[None, d] = load + w.decode_prefill * left(d)
        for other, (near, queued, _, _) in enumerate(prefills):
            p = f"p{other}"
            excess = queued - min(one[1] for one in prefills)
            cost = w.prefill_queue * (queued + excess**2 / w.queue_objective) + w.prefill_left * left(p)
            cost += load + w.transfer * (tokens - held[d]) * (w.same_host if near == host else 1)
            costs[p, d] = cost
    assert costs[chosen(made.choose(prompt, 0.0))] == pytest.approx(min(costs.values()))


@pytest.mark.parametrize("weights", [WEIGHTS, DEFAULTS])
def test_a_hot_prefix_stays_where_it_is_until_a_burst_of_it_comes(weights: PolicyWeights) -> None:
    workers = [*(prefill(name) for name in "pqrs"), *(decode(name) for name in "defg")]
    made = placer("kv", workers, weights=weights)

    def place(number: int, now: float) -> Placement:
        """2,000 tokens that are hot, and 112 that nobody else has."""
        pages = [*range(125), *range(1000 + 7 * number, 1007 + 7 * number)]
        prompt = PlacementRequest(len(pages) * PAGE, as_hashes(pages), 16)
        choice = made.choose(prompt, now)
        assert choice is not None
        return made.place(choice, now)

    places = []
    for number in range(3):  # one after the other
        placement = place(number, number)
        hold(made, names(placement)[0] or "", 125)
        made.close(placement, number)
        places.append(names(placement)[0])
    assert len(set(places)) == 1
    burst = [place(number, 9.0) for number in range(200)]  # at once
    prefills = Counter(names(one)[0] for one in burst)
    assert prefills[places[0]] == max(prefills.values())
    assert len(prefills) > 1
    assert max(Counter(names(one)[1] for one in burst).values()) <= 100


def test_a_long_queue_of_one_prefix_gives_it_a_second_holder() -> None:
    made = placer("kv", [prefill("warm", queued=1500), prefill("cold"), decode("d")])
    hold(made, "warm", 125)
    assert chosen(made.choose(ask(125), 0.0))[0] == "warm"
    made.update([prefill("warm", queued=2500), prefill("cold"), decode("d")], 1.0)
    assert chosen(made.choose(ask(125), 1.0))[0] == "cold"


@pytest.mark.parametrize("temperature", [20.0, 100.0])
def test_temperature_is_the_odds(temperature: float) -> None:
    weights = PolicyWeights.model_validate({"temperature": temperature})
    policy = make_policy("kv", weights, 0, random.Random(5))
    costs = np.array([40.0, 0.0, 100.0, 0.0])
    drawn = Counter(policy.cheapest(costs) for _ in range(8000))
    odds = np.exp(-costs / temperature)
    for row, share in enumerate(odds / odds.sum()):
        assert drawn[row] / 8000 == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize("same_host", [False, True])
def test_temperature_spreads_pairs_wherever_they_are(same_host: bool) -> None:
    weights = PolicyWeights.model_validate({"temperature": 50.0})
    made = Placer(GlobalIndex(), make_policy("kv", weights, 0, random.Random(5)), 10.0)
    host = "one" if same_host else ""
    made.update(
        [*(prefill(name, queued, host) for name, queued in (("p", 0), ("q", 30))), decode("d", host=host)],
        0.0,
    )
    drawn = Counter(chosen(made.choose(ask(6), 0.0))[0] for _ in range(2000))
    assert 0.2 < drawn["q"] / 2000 < 0.5


def test_a_session_meets_its_workers_again_while_they_are_not_much_busier() -> None:
    workers = [*(prefill(name) for name in "pqrs"), *(decode(name) for name in "defg")]
    made = placer("kv", workers)
    talk = PlacementRequest(96, as_hashes([]), 16, session="talk")
    choice = made.choose(talk, 0.0)
    assert choice is not None
    placement = made.place(choice, 0.0)
    made.close(placement, 0.0)
    assert {chosen(made.choose(talk, 0.0)) for _ in range(20)} == {names(placement)}
    others = {chosen(made.choose(talk._replace(session="another"), 0.0)) for _ in range(40)}
    assert len(others) > 4
    queue = int(WEIGHTS.session) + 1
    made.update([replace_load(one, names(placement)[0] or "", queue) for one in workers], 1.0)
    assert chosen(made.choose(talk, 1.0))[0] != names(placement)[0]
    made.update([one for one in workers if one.id != names(placement)[1]], 2.0)
    assert chosen(made.choose(talk, 2.0))[1] != names(placement)[1]


def replace_load(worker: WorkerRecord, busy: str, queued: int) -> WorkerRecord:
    return prefill(worker.id, queued) if worker.id == busy else worker


def test_equal_pairs_on_shared_hosts_take_turns() -> None:
    hosts = ["one", "two"]
    made = placer(
        "kv", [*(prefill(f"p{h}", host=h) for h in hosts), *(decode(f"d{h}", host=h) for h in hosts)]
    )
    assert {chosen(made.choose(ask(60), 0.0)) for _ in range(40)} == {("pone", "done"), ("ptwo", "dtwo")}


def test_the_documented_weights_are_the_weights() -> None:
    page = (Path(__file__).parents[3] / "docs" / "routing.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", page, re.MULTILINE)
    assert {name: float(value) for name, value in rows} == DEFAULTS.model_dump()
    formula = re.search(r"```\n(left\(w\).*?)```", page, re.DOTALL)
    assert formula is not None
    for line in formula[1].splitlines():
        assert f"    {line}\n" in (kv_policy.__doc__ or "")
    for name in POLICIES:
        assert f"| `{name}`" in page
