"""The speed that a scheduler reports."""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import replace

import pytest
from llguidance import LLMatcher

from engine.batch import BatchResult, Engine, ForwardBatch, Pending
from engine.grammar import GrammarState
from engine.spec import ModelSpec
from scheduler.config import Phase, SchedulerConfig
from scheduler.node_policy import AfterPrefill
from scheduler.rates import FORWARD_FACTOR, Rates
from tests.scheduler.rig import Rig
from wire.request import SamplingParams

CONFIG = SchedulerConfig(model="m", max_running_requests=8, chunked_prefill_size=32)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class SlowEngine:
    """Each forward takes 0.1 s plus a millisecond per prompt token, on the given clock."""

    def __init__(self, inner: Engine, clock: Clock) -> None:
        self.inner = inner
        self.clock = clock
        self.spec: ModelSpec = inner.spec

    def launch(self, batch: ForwardBatch) -> Pending:
        self.clock.now += 0.1 + 0.001 * int(batch.q_lens[batch.q_lens > 1].sum())
        return self.inner.launch(batch)

    def close(self) -> None:
        self.inner.close()


def test_nothing_is_known_before_the_first_forward() -> None:
    rates = Rates(Clock())
    assert (rates.prefill_tokens_per_s, rates.decode_step_s) == (0.0, 0.0)


def test_a_mixed_forward_counts_for_both() -> None:
    clock = Clock()
    rates = Rates(clock)
    rates.launched(3, 100)
    clock.now = 0.5
    rates.landed()
    assert (rates.prefill_tokens_per_s, rates.decode_step_s) == (200.0, 0.5)


def test_with_overlap_a_forward_begins_when_the_one_before_it_has_landed() -> None:
    clock = Clock()
    rates = Rates(clock)
    rates.launched(1, 0)
    for _ in range(20):
        rates.launched(1, 0)  # while the one before is out
        clock.now += 0.25
        rates.landed()
    assert rates.decode_step_s == pytest.approx(0.25)


def test_idle_time_is_no_forward_and_old_ones_fade() -> None:
    clock = Clock()
    rates = Rates(clock)
    for seconds, count in ((1.0, 10), (0.1, 300)):
        for _ in range(count):
            clock.now += 60.0
            rates.launched(0, 100)
            clock.now += seconds
            rates.landed()
    assert rates.prefill_tokens_per_s == pytest.approx(1000.0, rel=0.05)
    assert rates.decode_step_s == 0.0


@pytest.mark.parametrize("depth", [0, 1])
def test_the_load_has_the_engines_rates(depth: int) -> None:
    clock = Clock()
    rig = Rig(config=replace(CONFIG, overlap_depth=depth), clock=clock)
    rig.engine.inner = SlowEngine(rig.engine.inner, clock)
    rig.add(range(64), 1)
    rig.run()
    assert rig.scheduler.load().prefill_tokens_per_s == pytest.approx(32 / 0.132)
    rig.add(range(100, 110), 40)
    rig.run()
    load = rig.scheduler.load()
    assert load.decode_step_s == pytest.approx(0.1, rel=0.05)
    rig.close()


def test_a_queue_counts_what_is_left_to_compute() -> None:
    rig = Rig(config=replace(CONFIG, max_running_requests=1), pool_tokens=2048)
    load = rig.scheduler.load
    rig.add(range(161), 1)
    assert load().queued_prefill_tokens == 161  # nothing is known of hits
    rig.run()
    for _ in range(40):
        rig.add(range(161), 1)  # 160 of them cached
    rig.run()
    for _ in range(10):
        rig.add(range(161), 1)
    assert load().queued_prefill_tokens < 161 * 10 / 2
    assert load().queued_prefill_tokens >= 10
    rig.run()
    assert load().queued_prefill_tokens == 0
    rig.close()


def test_prompts_whose_kv_is_brought_back_are_no_hits_and_no_prompts() -> None:
    phases = frozenset({Phase.PREFILL})
    rig = Rig(config=replace(CONFIG, phases=phases), after=AfterPrefill.HAND_OFF, pool_tokens=4096)
    for number in range(40):  # decode says late where the KV should go
        req = rig.add(range(3 * number, 3 * number + 64), 4)
        rig.run()
        rig.scheduler.hand_off.park(req)
        rig.scheduler.hand_off.readmit(req)
        rig.run()
        rig.scheduler.hand_off.release(req)
    for _ in range(8):
        rig.add(range(300, 364), 4)
    load = rig.scheduler.load()
    assert load.queued_prefill_tokens == 8 * 64
    assert load.prompts == 40
    rig.run()
    for handed_off in rig.policy.prefilled[-8:]:
        rig.scheduler.hand_off.release(handed_off)
    rig.close()


def test_what_waits_before_the_queue_is_to_be_computed_too() -> None:
    rig = Rig()
    late, fetching = rig.req(range(40), 2), rig.req(range(50, 120), 2)
    compiled: Future[LLMatcher] = Future()
    late.sampling.grammar = GrammarState(compiled, SamplingParams(), (), 64)
    rig.scheduler.add(late)
    rig.scheduler.add(fetching, fetch=True)
    assert rig.scheduler.load().queued_prefill_tokens == 40 + 70
    compiled.set_exception(RuntimeError("also when it failed"))
    rig.scheduler.fetches.go_on(fetching)
    assert rig.scheduler.load().queued_prefill_tokens == 40 + 70
    rig.run()
    assert rig.scheduler.load().queued_prefill_tokens == 0
    rig.close()


def test_a_forward_that_is_expected_to_take_long_is_waited_for() -> None:
    clock, waited = Clock(), list[float]()

    class Bounded(SlowEngine):
        def launch(self, batch: ForwardBatch) -> Pending:
            launched = super().launch(batch)

            class Waited:
                def result(self, timeout_s: float) -> BatchResult:
                    waited.append(timeout_s)
                    return launched.result(timeout_s)

            return Waited()

    config = replace(CONFIG, chunked_prefill_size=None, result_timeout_s=1.0)
    rig = Rig(config=config, clock=clock, max_context=1024)
    rig.engine.inner = Bounded(rig.engine.inner, clock)
    rig.add(range(100), 1)
    rig.run()
    rig.add(range(100, 450), 1)  # 3.5 times as long
    rig.run()
    assert waited == [1.0, pytest.approx(FORWARD_FACTOR * 3.5 * 0.2)]
    rig.close()


def test_every_waiting_prompt_counts_a_token_at_least() -> None:
    rates = Rates(Clock())
    rates.admitted(100, 0)
    assert rates.to_compute(3, 300) == 3


def test_what_is_in_flight_is_expected_to_take_as_long_as_lately() -> None:
    clock = Clock()
    rates = Rates(clock)
    assert rates.expected_s == 0.0
    rates.launched(0, 100)
    assert math.isinf(rates.expected_s), "nothing is known of prefill"
    clock.now += 2.0
    rates.landed()
    assert rates.expected_s == 0.0
    rates.launched(0, 50)
    assert rates.expected_s == pytest.approx(1.0)
    rates.launched(3, 0)
    assert math.isinf(rates.expected_s), "nothing is known of decode"
    clock.now += 1.0
    rates.landed()
    clock.now += 0.5
    rates.landed()
    rates.launched(3, 25)
    rates.launched(2, 0)
    assert rates.expected_s == pytest.approx(0.5 + 0.5 + 0.5)
