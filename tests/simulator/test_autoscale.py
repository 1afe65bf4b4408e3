"""Fleets that change during a run lose no request, and the comparison finds the cheapest of each kind."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from simulator.autoscale import LOAD_SWEEP, SHIFT_WORKERS, compare
from simulator.fleet import FleetSize
from simulator.options import Autoscale, SimulationOptions
from simulator.plot import draw_fleets
from simulator.serve_policy import ServeLoadPolicy
from simulator.simulation import Restart, Simulation, Trace
from simulator.summary import Summary
from simulator.table import comparison_table
from simulator.traces import read_trace
from tests.router.directory.test_directory import record
from tests.simulator.test_simulation import check, options, replayed, shared_prefixes, summary
from wire.records import Role, WorkerLoad


def changing(seconds: float, seed: int = 1, kind: str = "shift") -> Trace:
    """The beginning of a generated trace."""
    whole = read_trace(f"{kind}:{seed}")
    return Trace(whole.name, [one for one in whole.requests if one.at_s < seconds])


@pytest.mark.parametrize("policy", ["slo", "load"])
def test_a_fleet_that_grows_and_shrinks_loses_no_request(policy: str) -> None:
    scaling = {"policy": policy, "start_s": 5.0, "hold_s": 10.0, "upscale_delay_s": 0.0}
    scaling |= {"downscale_delay_s": 10.0, "look_back_s": 5.0}
    busy, quiet = changing(100.0).requests, shared_prefixes(requests=60, rate=0.5).requests
    later = [dataclasses.replace(one, at_s=one.at_s + 120.0) for one in quiet]
    simulation = replayed(Trace("two", [*busy, *later]), scaling=scaling, worker={"kv_tokens": 300_000})
    sizes = simulation.fleet.sizes
    assert max(size.prefill + size.decode for size in sizes) > 4
    assert sizes[-1].prefill + sizes[-1].decode < max(size.prefill + size.decode for size in sizes)
    assert all(one.attempts == 1 or one.rejected for one in simulation.requests), "drains restart nothing"


@pytest.mark.parametrize("workers", [8, pytest.param(64, marks=pytest.mark.invariants)])
def test_roles_switch_and_caches_stay(workers: int) -> None:
    given = {"prefill": workers // 2, "decode": workers // 2, "speed": workers / 8}
    given |= {"scaling": {"switch_roles": True}, "admission": {"max_in_flight": 100_000}}
    simulation = replayed(changing(7.5 * workers), **given)
    assert all(one.attempts == 1 for one in simulation.requests), "drains restart nothing"
    assert len(simulation.members.everyone) == workers, "nobody started and nobody left"
    switched = [one for one in simulation.members.everyone if one.record.incarnation > 1]
    assert len(switched) >= workers // 8
    assert any(worker.memory.cache.pages() for worker in switched)


@pytest.mark.parametrize("died_at", [1.2, 2.2], ids=["drains", "drained"])
def test_a_worker_that_dies_before_it_changes_its_role_comes_back_in_the_old_one(died_at: float) -> None:
    later = [dataclasses.replace(one, at_s=one.at_s + 4.0) for one in shared_prefixes(requests=10).requests]
    trace = Trace("later", later, [Restart(died_at, "d0", 0.1)])
    simulation = Simulation(trace, options(scaling={"switch_roles": True}, lease_s=1.5))

    def switches() -> None:
        worker = next(one for one in simulation.members.serving(Role.DECODE) if one.record.id == "d0")
        simulation.fleet._switching.add("d0")
        simulation.fleet._drain(worker, simulation.fleet._switch_later)

    simulation.clock.at(1.0, switches)
    simulation.run()
    check(simulation)
    died, came = [one for one in simulation.members.everyone if one.record.id == "d0"]
    assert (died.record.incarnation, came.record.incarnation) == (1, 2)
    assert simulation.members.worker(came.record) is came
    assert not simulation.fleet._switching


def test_worker_hours_count_from_the_order_to_the_end() -> None:
    fixed = replayed(shared_prefixes(requests=40))
    assert fixed.fleet.sizes[0] == FleetSize(0.0, 2, 2)
    assert fixed.fleet.worker_hours() == pytest.approx(4 * fixed.fleet.sizes[-1].at_s / 3600)


def test_both_ways_to_scale_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match="switch_roles needs policy=fixed"):
        options(scaling={"policy": "slo", "switch_roles": True})


def test_serves_delays_wait_for_one_direction() -> None:
    given = {"target_load": 0.5, "upscale_delay_s": 10.0, "downscale_delay_s": 20.0, "look_back_s": 1.0}
    policy = ServeLoadPolicy(options(scaling=given).scaling)
    worker = record("p", role=Role.PREFILL)

    def target(now: float, queued: int) -> int:
        return policy.target([worker], {"p": WorkerLoad(queued_prefill_tokens=queued)}, now, 2)

    assert [target(now, 8192 * 2) for now in (0.0, 5.0)] == [2, 2]
    assert target(7.0, 8192) == 2, "as many as there are: the delay begins again"
    assert [target(now, 8192 * 2) for now in (9.0, 18.0, 19.0)] == [2, 2, 4]
    assert [target(now, 0) for now in (30.0, 49.0, 50.0)] == [2, 2, 1]


class Fleets:
    """Stands in for simulations: a fleet attains with 5 prefill and 3 decode workers or with 4 and 5."""

    def __init__(self) -> None:
        self.base = summary(replayed(shared_prefixes(requests=5)))
        self.ran: list[tuple[str, SimulationOptions]] = []

    def run_all(self, wanted: list[tuple[str, SimulationOptions]]) -> list[Summary]:
        self.ran += wanted
        return [self._run(*one) for one in wanted]

    def _run(self, trace: str, given: SimulationOptions) -> Summary:
        p, d, scaling = given.prefill, given.decode, given.scaling
        fleet = (FleetSize(0.0, p, d), FleetSize(3600.0, p, d))
        attained, hours, goodput = float((p >= 5 and d >= 3) or (p >= 4 and d >= 5)), float(p + d), 0.0
        if scaling.policy is Autoscale.LOAD:
            attained, hours = float(scaling.target_load < 0.8), 10 * scaling.target_load
        elif scaling.policy is Autoscale.SLO:
            attained, hours = 0.96, 5.0
        elif trace.startswith("shift"):
            goodput = 20.0 if scaling.switch_roles else 10.0 - abs(p - 3)
        return dataclasses.replace(
            self.base, attainment=attained, worker_hours=hours, goodput=goodput, fleet=fleet
        )


def test_the_comparison_takes_the_cheapest_that_attains(tmp_path: Path) -> None:
    fleets = Fleets()
    found = compare("diurnal:7", options(), fleets.run_all)
    assert found.figures == {
        "worker_hours": {"fixed": 8.0, "load": 6.0, "slo": 5.0},
        "attainment": {"fixed": 1.0, "load": 1.0, "slo": 0.96},
        "goodput": {"best_fixed": 10.0, "switch": 20.0},
    }
    assert found.fixed.setting == "5 prefill, 3 decode"
    assert found.best_ratio.setting == f"3 prefill, {SHIFT_WORKERS - 3} decode"
    assert {trace for trace, _ in fleets.ran} == {"diurnal:7", "shift:7"}
    tried = {tuple(getattr(one.scaling, name) for name in LOAD_SWEEP) for _, one in fleets.ran}
    assert len(tried) >= len(LOAD_SWEEP["target_load"]) * len(LOAD_SWEEP["downscale_delay_s"])
    assert [line.split()[0] for line in comparison_table(found).splitlines()] == [
        "fleet", "fixed", "load", "slo", "best", "switch",
    ]  # fmt: skip
    json.dumps(found.figures)
    draw_fleets(found, tmp_path / "fleets.png")
    assert (tmp_path / "fleets.png").read_bytes().startswith(b"\x89PNG")


def test_a_trace_that_is_too_much_is_refused() -> None:
    fleets = Fleets()

    def none_attains(wanted: list[tuple[str, SimulationOptions]]) -> list[Summary]:
        return [dataclasses.replace(one, attainment=0.5) for one in fleets.run_all(wanted)]

    with pytest.raises(ConfigError, match="no fleet of up to"):
        compare("diurnal:7", options(), none_attains)


def drained_at(at_s: float, **given: Any) -> tuple[Simulation, bool]:
    """Long answers on three decode workers, of which one drains. Whether it was idle three seconds later."""
    requests = [dataclasses.replace(one, output_tokens=1500) for one in shared_prefixes(requests=30).requests]
    trace = Trace("long", requests, given.pop("restarts", ()))
    simulation = Simulation(trace, options(decode=3, **given))
    idle: list[bool] = []

    def drain() -> None:
        worker = simulation.members.serving(Role.DECODE)[0]
        assert len(worker.batch) > 3
        simulation.members.drain(worker)
        simulation.clock.after(3.0, lambda: idle.append(worker.memory.idle))

    simulation.clock.at(at_s, drain)
    simulation.run()
    check(simulation)
    return simulation, idle[0]


def test_requests_of_a_worker_that_drains_go_on_elsewhere_with_their_kv() -> None:
    simulation, idle = drained_at(6.0)
    assert idle
    assert all(one.attempts == 1 for one in simulation.requests), "nothing is computed again"
    assert simulation.itl.quantile(0.9999) < 0.5


def test_requests_on_their_way_to_a_worker_that_dies_stay() -> None:
    restarts = [Restart(6.0 + delay, "d1", 1.0) for delay in (0.6, 2.0)]
    simulation, _ = drained_at(6.0, restarts=restarts, lease_s=1.5)
    assert any(one.attempts > 1 for one in simulation.requests)


def test_nobody_has_memory_for_the_requests_of_a_worker_that_drains() -> None:
    simulation, idle = drained_at(6.0, worker={"kv_tokens": 70_000})
    assert not idle
    assert all(one.attempts == 1 for one in simulation.requests)
