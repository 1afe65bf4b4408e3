"""The simulator: nothing is lost or doubled in it, it agrees with what theory says, and with itself."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.cli import main
from common.errors import ConfigError
from router.placement.load_estimate import WorkerLoadEstimate
from router.placement.placement import Placement
from simulator.attempt import Attempt
from simulator.batch import DecodeBatch, ItlHistogram
from simulator.cache import PrefixCache
from simulator.clock import Clock
from simulator.options import SimulationOptions, WorkerModel
from simulator.request import Request, TraceRequest
from simulator.simulation import Restart, Simulation, Trace
from simulator.summary import Summary, summarise
from simulator.sweep import GRID_STEP, REFINED, Pool, sustained
from simulator.traces import GENERATORS, read_trace
from simulator.worker import ModelledWorker
from tests.router.directory.test_directory import record

PAGE = 512


def options(**given_: Any) -> SimulationOptions:
    return SimulationOptions.model_validate({"prefill": 2, "decode": 2, **given_})


def replayed(trace: Trace, **given_: Any) -> Simulation:
    simulation = Simulation(trace, options(**given_))
    simulation.run()
    check(simulation)
    return simulation


def check(simulation: Simulation) -> None:
    """Every request ended once; nobody holds memory; every router's index is the workers' caches."""
    assert len(simulation.requests) == len({one.number for one in simulation.requests})
    for one in simulation.requests:
        assert one.ended
        assert one.rejected or one.forwarded == one.trace.output_tokens
        assert one.rejected or one.arrived_at <= one.first_at <= one.last_at
    for worker in alive(simulation):
        assert (worker.memory.cache.held, worker.memory.cache.locked) == (0, 0), worker.record.id
        for router in simulation.routers:
            held = set(router.index.held(worker.record.id))
            assert held == set().union(*worker.memory.pages().values()), worker.record.id
    for router in simulation.routers:
        for estimate in router.placer.fleet.estimates():
            assert estimate.own == dataclasses.replace(estimate.own, requests=0, prefills=0, context_tokens=0)
        assert (router.admission.queued, router.admission.in_flight) == (0, 0)


def alive(simulation: Simulation) -> list[ModelledWorker]:
    return [one for one in simulation.members.everyone if not one.dead]


def shared_prefixes(seed: int = 1, requests: int = 400, rate: float = 6.0, restarts: int = 0) -> Trace:
    """Prompts that begin like one of 12 others, more than two small caches hold."""
    chance, at, made = random.Random(seed), 0.0, []
    for number in range(requests):
        at += chance.expovariate(rate)
        family, own = chance.randrange(12), chance.randint(1, 1500)
        blocks = [1000 * family + block for block in range(20)]
        blocks += [1_000_000 + 10 * number + block for block in range(-(-own // PAGE))]
        prompt = 20 * PAGE + own
        hashes = np.array(blocks[: prompt // PAGE], np.int64)
        made.append(TraceRequest(at, prompt, chance.randint(1, 40), hashes))
    span = made[-1].at_s
    died = [
        Restart(span * (one + 1) / (restarts + 1), ("p0", "d1", "p1", "d0")[one % 4], (0.1, 3.0)[one % 2])
        for one in range(restarts)
    ]
    return Trace("shared", made, died)


def outcome(one: Request) -> tuple[Any, ...]:
    return one.first_at, one.last_at, one.cached_tokens, one.prefill, one.decode


@pytest.mark.parametrize("policy", ["kv", "prefix-affinity", "least-loaded", "round-robin", "random"])
def test_every_request_ends_once_and_memory_balances(policy: str) -> None:
    trace = shared_prefixes()
    simulation = replayed(trace, policy=policy, worker={"kv_tokens": 60_000}, admission={"max_queued": 0})
    assert [one.trace for one in simulation.requests] == list(trace.requests)
    assert all(one.attempts == 1 for one in simulation.requests)


def test_a_run_is_a_function_of_its_seed() -> None:
    trace, small = shared_prefixes(), {"kv_tokens": 60_000}
    runs = [replayed(trace, policy="random", seed=seed, worker=small) for seed in (1, 1, 2)]
    first, again, other = ([outcome(one) for one in run.requests] for run in runs)
    assert first == again
    assert first != other


def test_restarts_lose_no_request() -> None:
    trace = shared_prefixes(rate=12.0, restarts=4)
    simulation = replayed(trace, lease_s=1.5, worker={"kv_tokens": 60_000})
    assert len(simulation.members.everyone) == 8
    assert sum(one.attempts > 1 for one in simulation.requests) > 0


@pytest.mark.parametrize("schedule", ["prefill-first", "decode-first", "mixed"])
def test_colocated_workers_do_everything(schedule: str) -> None:
    simulation = replayed(shared_prefixes(), prefill=0, worker={"schedule": schedule, "kv_tokens": 80_000})
    assert all(one.prefill is None for one in simulation.requests)
    assert sum(one.moved_tokens for one in simulation.requests) == 0


def test_decode_without_memory_makes_prefill_wait_and_nobody_deadlocks() -> None:
    simulation = replayed(shared_prefixes(rate=40.0), worker={"kv_tokens": 40_000, "max_running": 4})
    assert max(one.ttft for one in simulation.requests) > 1.0


def test_a_prompt_that_has_begun_goes_on_when_one_of_higher_priority_finds_no_memory() -> None:
    hashes = np.arange(20, dtype=np.int64)
    first = TraceRequest(0.0, 20 * PAGE, 5, hashes)
    later = TraceRequest(0.2, 20 * PAGE, 5, hashes + 100, priority=1)
    small = {"kv_tokens": 30 * PAGE, "prefill_tokens_per_s": 10_000, "chunk_tokens": PAGE}
    one, other = replayed(Trace("two", [first, later]), prefill=1, worker=small).requests
    assert one.first_at < other.first_at


def test_what_fits_nowhere_is_refused() -> None:
    trace = Trace("big", [TraceRequest(0.0, 9000, 5, np.arange(17, dtype=np.int64))])
    assert replayed(trace, worker={"kv_tokens": 9000}).requests[0].rejected


def test_admission_refuses_what_would_be_late() -> None:
    trace = shared_prefixes(rate=60.0)
    late = summary(replayed(trace, policy="round-robin"))
    early = summary(replayed(trace, policy="round-robin", admission={"max_ttft_s": 2.0}))
    assert late.rejected == 0 < early.rejected
    assert early.ttft_p90 < late.ttft_p90
    assert early.attainment > late.attainment


def test_two_routers_share_the_work() -> None:
    simulation = replayed(shared_prefixes(), routers=2, worker={"kv_tokens": 80_000})
    assert all(len(router.peers) == 1 for router in simulation.routers)


def summary(simulation: Simulation) -> Summary:
    return summarise(simulation, simulation.options)


def test_kv_beats_round_robin_where_prefixes_are_shared() -> None:
    trace, small = shared_prefixes(rate=4.0), {"kv_tokens": 80_000}
    kv, blind = (summary(replayed(trace, policy=name, worker=small)) for name in ("kv", "round-robin"))
    assert kv.hit_rate > 1.3 * blind.hit_rate
    assert kv.ttft_p90 < 0.8 * blind.ttft_p90


def test_without_events_kv_knows_no_more_than_what_it_expects() -> None:
    trace = shared_prefixes()
    deaf = Simulation(trace, options(events=False))
    deaf.run()
    assert all(one.ended for one in deaf.requests)
    assert summary(deaf).hit_rate < summary(replayed(trace)).hit_rate


class Listener:
    """Notes when prompts are computed."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.first: list[float] = []

    def first_token(self, attempt: Attempt) -> None:
        self.first.append(self.clock.now)

    def reserved(self, attempt: Attempt) -> None:
        raise AssertionError("nobody decodes")

    def done(self, attempt: Attempt) -> None:
        raise AssertionError("nobody decodes")

    def stored(self, worker: ModelledWorker, pages: list[int], medium: str) -> None:
        """Nobody asks."""

    def removed(self, worker: ModelledWorker, pages: list[int], medium: str) -> None:
        """Nobody asks."""


def attempt(prefill: ModelledWorker, prompt: int, output: int, first_page: int) -> Attempt:
    hashes = np.arange(first_page, first_page + prompt // PAGE, dtype=np.int64)
    request = Request(0, TraceRequest(0.0, prompt, output, hashes), 0.0)
    load = WorkerLoadEstimate(prefill.record, 0.0)
    placement = Placement(
        prefill.record, prefill.record, False, 0, prompt, prompt + output, load, load, 1, 0, []
    )
    return Attempt(request, placement, prompt, output, hashes)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_one_prefill_worker_queues_like_md1(load: float) -> None:
    """Poisson arrivals of equal prompts: the mean wait is load / (2 (1 - load)) services."""
    clock, chance, at, arrivals = Clock(), random.Random(7), 0.0, []
    model = WorkerModel.model_validate({"chunk_tokens": 4096})
    listener, service = Listener(clock), 4096 / model.prefill_tokens_per_s
    worker = ModelledWorker(clock, record("p"), model, listener, ItlHistogram())
    for number in range(15_000):
        at += chance.expovariate(load / service)
        arrivals.append(at)
        clock.at(at, worker.prefill, attempt(worker, 4096, 1, 8 * number))
    clock.run(lambda: False)
    waits = np.array(listener.first) - np.array(arrivals) - service
    assert waits.mean() == pytest.approx(service * load / (2 * (1 - load)), rel=0.08)


def test_steps_in_one_go_equal_steps_one_by_one() -> None:
    model = WorkerModel.model_validate({})
    batch = DecodeBatch[str](model, ItlHistogram())
    batch.join("request", 5001, 100, 3.0)
    run = batch.steps(3.0, 0)
    at, context = 3.0, 5001
    for step in range(1, 101):
        at += model.step_s + model.row_s + model.context_s * context
        context += 1
        assert run.end(step) == pytest.approx(at)
        assert run.under_way(at - 1e-6) == step
    assert batch.advance(run, 100) == ["request"]
    assert len(batch) == batch.context == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12), st.booleans(), st.booleans()), max_size=60))
@settings(max_examples=60)
def test_cache_balances_and_evicts_leaves_first(operations: list[tuple[int, int, bool, bool]]) -> None:
    told: set[int] = set()
    cache = PrefixCache(20 * PAGE, PAGE, told.update, told.difference_update)
    kept: list[np.ndarray[Any, np.dtype[np.int64]]] = []
    for family, length, keep, copies in operations:
        path = np.array([100 * family + page for page in range(length)], np.int64)
        matched = path[: cache.match(path)]
        cache.lock(matched)
        rest = path[len(matched) :]
        if not cache.hold(len(rest) * PAGE):
            cache.unlock(matched)
            continue
        cache.insert(matched, rest, copies)
        kept.append(path)
        if not keep:
            cache.unlock(kept.pop(0))
        pages = cache.pages()
        assert pages == told
        assert len(pages) <= 20
        assert all(page - 1 in pages for page in pages if page % 100)  # closed under prefixes
    for path in kept:
        cache.unlock(path)
    assert (cache.locked, cache.held) == (0, 0)


def test_sustained_rate_is_the_first_fall() -> None:
    tried: list[float] = []

    def run(_trace: str, asked: SimulationOptions) -> Summary:
        tried.append(asked.speed)
        attained = 1.0 if asked.speed <= 3.0 or 5.0 < asked.speed < 50.0 else 0.5
        return dataclasses.replace(base, attainment=attained)

    base = summary(replayed(shared_prefixes(requests=5)))
    found = sustained(run, "trace", options())
    assert found <= 3.0 < found * REFINED
    assert max(tried) < 3.0 * GRID_STEP
    assert sustained(lambda *_: dataclasses.replace(base, attainment=0.0), "trace", options()) == 0.0


@pytest.mark.parametrize("kind", GENERATORS)
def test_generated_traces_are_functions_of_their_seed(kind: str) -> None:
    one, same, other = (read_trace(f"{kind}:{seed}") for seed in (1, 1, 2))
    assert [(r.at_s, r.prompt_tokens) for r in one.requests] == [
        (r.at_s, r.prompt_tokens) for r in same.requests
    ]
    assert one.requests[0].at_s != other.requests[0].at_s
    for request in one.requests:
        assert len(request.hashes) == request.prompt_tokens // PAGE
    assert len(one.restarts) == (2 if kind == "hot" else 0)


def mooncake(path: Path) -> str:
    lines = [
        {"timestamp": 200 * n, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2 + n]}
        for n in range(30)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_mooncake_lines_become_requests_of_whole_pages(tmp_path: Path) -> None:
    trace = read_trace(mooncake(tmp_path / "trace.jsonl"))
    assert [one.at_s for one in trace.requests[:3]] == [0.0, 0.2, 0.4]
    assert trace.requests[5].hashes.tolist() == [0, 1]


@pytest.mark.parametrize("first_ms", [1_795_000_000_000, -4000.0])
def test_a_trace_may_begin_at_any_time(tmp_path: Path, first_ms: float) -> None:
    path, line = tmp_path / "trace.jsonl", {"input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
    stamps = (first_ms + 500, first_ms, first_ms + 2000)
    path.write_text("".join(json.dumps({"timestamp": stamp, **line}) + "\n" for stamp in stamps))
    trace = read_trace(str(path))
    assert [one.at_s for one in trace.requests] == pytest.approx([0.0, 0.5, 2.0])
    assert replayed(trace).clock.now < 10.0


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 1"),
        ('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}', "every 512 tokens"),
        ('{"timestamp": 0, "input_length": 600, "output_length": 0, "hash_ids": [1, 2]}', "positive"),
        ("", "is empty"),
        (
            '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [9223372036854775808, 2]}',
            "64 bits",
        ),
    ],
)
def test_a_broken_trace_is_named_with_its_line(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match=says):
        read_trace(str(path))


def test_a_picture_that_cannot_be_written_costs_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simulator.replay._check_picture", lambda _path: None)
    with pytest.raises(SystemExit) as ended:
        main(["replay", mooncake(tmp_path / "trace.jsonl"), "--png", str(tmp_path)])
    told = capsys.readouterr()
    assert ended.value.code == 2
    assert told.out.splitlines()[1].split()[:2] == ["kv", "1.000"]
    assert told.err.splitlines()[-1].startswith("baton: --png: cannot write ")


def test_replay_prints_a_table_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, picture = mooncake(tmp_path / "trace.jsonl"), tmp_path / "curves.png"
    arguments = ["replay", trace, "--prefill", "2", "--decode", "2"]
    assert main([*arguments, "--png", str(picture)]) == 0
    told = capsys.readouterr()
    assert told.out.splitlines()[1].split()[:3] == ["kv", "1.000", "100.0%"]
    assert "100%" in told.err
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([*arguments, "--json", "--set", "weights.transfer=0.5"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["requests"] == 30


@pytest.mark.parametrize("given_", [["speed=2", "policy=random"], []])
def test_a_speed_and_a_policy_may_be_set_as_any_option(
    given_: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [word for one in given_ for word in ("--set", one)] or ["--speed", "2", "--policy", "random"]
    assert main(["replay", mooncake(tmp_path / "trace.jsonl"), "--json", *flags]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["speed"], run["policy"]) == (2.0, "random")


def test_scaling_is_compared_at_the_speed_and_under_the_policy_that_are_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compared: list[SimulationOptions] = []

    def none_attains(_trace: str, given_: SimulationOptions, _run_all: object) -> None:
        compared.append(given_)
        raise ConfigError("TRACE", "no fleet attains", "lower --speed")

    monkeypatch.setattr("simulator.replay.compare", none_attains)
    arguments = ["replay", mooncake(tmp_path / "trace.jsonl"), "--autoscale", "slo"]
    with pytest.raises(SystemExit):
        main([*arguments, "--speed", "0.5", "--policy", "least-loaded"])
    assert [(one.speed, one.policy) for one in compared] == [(0.5, "least-loaded")]


def test_the_goodput_of_requests_that_come_at_once_is_of_the_run() -> None:
    trace = shared_prefixes(requests=5)
    together = [dataclasses.replace(one, at_s=1.0) for one in trace.requests]
    at_once = dataclasses.replace(trace, requests=together)
    simulation = replayed(at_once)
    found, end = summary(simulation), max(one.last_at for one in simulation.requests)
    assert found.goodput == pytest.approx(found.attainment * 5 / (end - 1.0))
    nothing = summary(replayed(at_once, worker={"kv_tokens": 1}))
    assert (nothing.rejected, nothing.goodput) == (5, 0.0)


@pytest.mark.parametrize("theirs", [0.0, 0.5])
def test_a_rate_of_which_nothing_is_a_multiple_has_no_ratio(
    theirs: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where not even the lowest speed meets the objectives."""

    def sustained_rates(_self: Pool, wanted: list[tuple[str, SimulationOptions]]) -> list[float]:
        return [1.0 if one.policy == "kv" else theirs for _, one in wanted]

    monkeypatch.setattr(Pool, "sustained", sustained_rates)
    monkeypatch.setattr(Pool, "all", lambda _self, _wanted: [])
    arguments = ["replay", mooncake(tmp_path / "trace.jsonl"), "--policy", "all"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["ratios"]["kv/random"] == (1.0 / theirs if theirs else None)
    assert main(arguments) == 0
    assert f"hot={'2.00' if theirs else '-'}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--policy", "best"], "--policy: 'best' is unknown; choose one of kv, "),
        (["--speed", "fast"], "--speed: 'fast' is not a list"),
        (["--speed", "1,nan"], "--speed: '1,nan' is not a list"),
        (["--speed", "inf"], "--speed: 'inf' is not a list"),
        (["--prefill", "-1"], "prefill: "),
        (["--set", "worker.gpus=8"], "worker.gpus: "),
        (["--set", "worker.page_tokens=16"], "worker.page_tokens: unknown key"),
        (["--png", "/nowhere/at/all.png"], "--png: there is no directory"),
        (["--png", "/"], "--png: / is a directory"),
        (["--policy", "all", "--speed", "2"], "--speed: --policy all finds the speeds"),
        (["--autoscale", "slo", "--speed", "1,2"], "--autoscale: it compares fleets at one speed"),
    ],
)
def test_replay_refuses_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], says: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay", mooncake(tmp_path / "trace.jsonl"), *flags])
    told = capsys.readouterr()
    assert ended.value.code == 2
    assert told.err.startswith(f"baton: {says}")
    assert told.err.count("\n") == 1
