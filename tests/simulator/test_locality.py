"""Where modelled workers are: how long their transfers take, and what the router makes of it."""

from __future__ import annotations

from statistics import mean
from typing import Any

import pytest
from msgspec.structs import replace

from common.errors import ConfigError
from common.options import parse_options
from router.placement.transfer_rates import Kind, Locality
from simulator.link import Link
from simulator.options import SimulationOptions, WorkerModel
from simulator.simulation import Simulation
from tests.router.directory.test_directory import record
from tests.simulator.test_simulation import check, shared_prefixes

SLOW_NETWORK = {"link_bytes_per_s": 2e9, "rack_bytes_per_s": 10e9, "host_bytes_per_s": 100e9}
GB = 1e9


def link(host: str, rack: str = "") -> Link:
    return Link(replace(record("w"), host=host, rack=rack), WorkerModel.model_validate(SLOW_NETWORK))


def simulated(**given: Any) -> Simulation:
    """Four P and four D, p0 and d0 on one host, and two hosts in a rack."""
    options = {"prefill": 4, "decode": 4, "workers_per_host": 1, "hosts_per_rack": 2, "worker": SLOW_NETWORK}
    simulation = Simulation(shared_prefixes(rate=3.0), SimulationOptions.model_validate({**options, **given}))
    simulation.run()
    check(simulation)
    return simulation


def near(simulation: Simulation) -> dict[Locality, int]:
    """How many prompts moved how far."""
    counts = dict.fromkeys(Locality, 0)
    for one in simulation.requests:
        if one.prefill is not None and one.decode is not None:
            p, d = int(one.prefill[1:]), int(one.decode[1:])
            counts[Locality.HOST if p == d else Locality.RACK if p // 2 == d // 2 else Locality.FAR] += 1
    return counts


def test_each_distance_has_its_speed() -> None:
    here = link("a", "r1")
    assert here.send(link("a", "r1"), 10 * GB, 5.0) == (5.1, 0.1)
    assert here.send(link("b", "r1"), 10 * GB, 5.0) == (6.0, 1.0)
    assert link("a", "r1").send(link("c", "r2"), 10 * GB, 5.0) == (10.0, 5.0)
    assert link("a").send(link("c"), 10 * GB, 5.0) == (10.0, 5.0), "no label is no common rack"


def test_a_transfer_waits_for_the_network_and_not_within_a_host() -> None:
    here, there = link("a"), link("b")
    assert here.send(there, 2 * GB, 0.0) == (1.0, 1.0)
    assert here.send(there, 2 * GB, 0.5) == (2.0, 1.0), "a wait is no time of writing"
    assert here.send(link("a"), 10 * GB, 0.5) == (0.6, 0.1)


def test_the_router_learns_the_prices_and_moves_less_over_the_slow_network() -> None:
    priced, blind = simulated(), simulated(weights={"transfer": 0.0})
    prices = priced.routers[0].placer.policy.transfers.prices(priced.options.weights)
    host, rack, far = (prices.of(Kind(one, "")) for one in (Locality.HOST, Locality.RACK, Locality.FAR))
    assert host < rack < far
    assert far > 3 * host
    seen = blind.routers[0].placer.policy.transfers.kinds
    for one, speed in ((Locality.HOST, 100e9), (Locality.RACK, 10e9), (Locality.FAR, 2e9)):
        assert seen[Kind(one, "")].seconds_per_byte == pytest.approx(1 / speed)
    ours, theirs = near(priced), near(blind)
    assert ours[Locality.HOST] > 2 * theirs[Locality.HOST]
    assert ours[Locality.FAR] < theirs[Locality.FAR] / 2
    assert mean(one.last_at - one.first_at for one in priced.requests) < mean(
        one.last_at - one.first_at for one in blind.requests
    )


def test_without_hosts_nothing_is_measured() -> None:
    simulation = simulated(workers_per_host=0, hosts_per_rack=0)
    assert simulation.routers[0].placer.policy.transfers.kinds == {}
    assert {one.record.host for one in simulation.members.everyone} == {
        f"{role}{n}" for role in "pd" for n in range(4)
    }


def test_racks_need_hosts() -> None:
    with pytest.raises(ConfigError, match="hosts_per_rack needs workers_per_host"):
        parse_options(SimulationOptions, {"hosts_per_rack": 2})
