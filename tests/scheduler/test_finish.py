"""How output ends, and what comes with it."""

from __future__ import annotations

import pytest

from engine.errors import DeviceLost
from engine.fake import FakeTiming
from scheduler.config import SchedulerConfig
from tests.scheduler.rig import Rig
from wire.messages.rooms import RejectKind
from wire.request import FinishReason

PROMPT = list(range(30))


def _outputs(count: int) -> list[int]:
    rig = Rig()
    return rig.expected[rig.req(PROMPT, count).room]


@pytest.mark.parametrize("depth", [0, 1])
def test_length_stop_eos_and_min_tokens(depth: int) -> None:
    third = _outputs(12)[2]
    config = SchedulerConfig(model="m", max_running_requests=8, overlap_depth=depth)
    rig = Rig(config=config, eos=(third,))
    plain = rig.add(PROMPT, 12)
    ignoring = rig.add(PROMPT, 12, ignore_eos=True)
    stopping = rig.add(PROMPT, 12, ignore_eos=True, stop_token_ids=(third,))
    late = rig.add(PROMPT, 12, min_tokens=4)
    just = rig.add(PROMPT, 12, min_tokens=3)  # the third may not be the last
    one = rig.add(PROMPT, 1)
    rig.run()
    assert len(rig.policy.outputs[plain.room]) == 3
    assert rig.policy.finished[plain.room] is FinishReason.STOP
    assert len(rig.policy.outputs[ignoring.room]) == 12
    assert rig.policy.finished[ignoring.room] is FinishReason.LENGTH
    assert rig.policy.outputs[stopping.room] == rig.policy.outputs[plain.room]
    assert len(rig.policy.outputs[late.room]) > 3
    assert len(rig.policy.outputs[just.room]) > 3
    assert rig.policy.finished[one.room] is FinishReason.LENGTH
    rig.assert_outputs()
    rig.close()


def test_forced_tokens_are_input_and_never_reported() -> None:
    rig = Rig()
    req = rig.add(PROMPT, 12, forced=5)
    rig.run()
    assert rig.engine.batches[0].q_lens.tolist() == [35]
    assert rig.policy.outputs[req.room] == rig.expected[req.room]
    rig.close()


def test_all_output_forced_ends_without_a_forward() -> None:
    rig = Rig()
    req = rig.add(PROMPT, 6, forced=6)
    rig.run()
    assert rig.policy.finished[req.room] is FinishReason.LENGTH
    assert rig.engine.launches == 0
    rig.close()


def test_output_ends_where_the_context_does() -> None:
    rig = Rig(max_context=64)
    req = rig.add(range(60), 12)
    rig.run()
    assert len(rig.policy.outputs[req.room]) == 4
    assert rig.policy.finished[req.room] is FinishReason.LENGTH
    rig.close()


def test_a_lone_request_may_fill_the_pool() -> None:
    rig = Rig(page_size=16, pool_tokens=64, max_context=256)
    req = rig.add(range(40), 200)
    rig.run()
    assert rig.policy.finished[req.room] is FinishReason.LENGTH
    assert req.prompt_len + len(req.output_ids) == 64
    rig.close()


def test_prompt_that_can_never_fit_names_both_lengths() -> None:
    rig = Rig(pool_tokens=64)
    req = rig.add(range(70), 2)
    assert not rig.scheduler.idle
    rig.run()
    why, message = rig.policy.failed[req.room]
    assert why is RejectKind.INVALID
    assert "70" in message
    assert "64" in message
    rig.close()


def test_a_prompt_as_long_as_the_memory_leaves_no_room_for_a_token() -> None:
    rig = Rig(pool_tokens=64)
    req = rig.add(range(64), 2)
    rig.run()
    assert rig.policy.failed[req.room][0] is RejectKind.INVALID
    rig.close()


def test_logprobs_come_with_their_tokens() -> None:
    rig = Rig()
    req = rig.add(PROMPT, 5, top_logprobs=2)
    rig.run()
    assert len(rig.policy.logprobs[req.room]) == 5
    assert rig.policy.logprobs[req.room][0].top[0][0] == rig.policy.outputs[req.room][0]
    rig.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_failed_forward_fails_its_requests_only(depth: int) -> None:
    config = SchedulerConfig(model="m", max_running_requests=8, overlap_depth=depth)
    rig = Rig(config=config)
    rig.engine.fail_launch = 3
    hit = [rig.add(range(start, start + 40), 20) for start in (0, 10)]
    for _ in range(5):
        rig.step()
    spared = rig.add(PROMPT, 5)
    rig.run()
    assert set(rig.policy.failed) == {req.room for req in hit}
    assert all(why is RejectKind.FAILED for why, _ in rig.policy.failed.values())
    assert rig.policy.outputs[spared.room] == rig.expected[spared.room]
    rig.close()


@pytest.mark.parametrize("engine_overlap", [False, True])
@pytest.mark.parametrize("failing", [1, 2, 3, 4])
def test_who_joins_while_a_forward_fails_goes_on(failing: int, engine_overlap: bool) -> None:
    """The next step was launched before the failure, with the failed requests' rows in it."""
    config = SchedulerConfig(
        model="m", max_running_requests=8, overlap_depth=1, max_prefill_tokens=64, chunked_prefill_size=32
    )
    rig = Rig(config=config, engine_overlap=engine_overlap, page_size=1)
    rig.engine.fail_launch = failing
    hit = [rig.add(range(start, start + 20), 20, temperature=1.0, repetition_penalty=1.1) for start in (0, 9)]
    for _ in range(failing):
        rig.step()
    spared = [rig.add(range(start, start + 15), 9) for start in (100, 200)]
    rig.step()
    assert rig.scheduler.metrics.failed == len(hit)
    rig.run()
    assert {room: why for room, (why, _) in rig.policy.failed.items()} == {
        req.room: RejectKind.FAILED for req in hit
    }
    rig.assert_outputs(*(req.room for req in hit))
    assert all(req.room in rig.policy.finished for req in spared)
    rig.close()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("after_steps", [0, 1, 2, 3, 6])
def test_abort_frees_everything(after_steps: int, depth: int) -> None:
    config = SchedulerConfig(model="m", max_running_requests=8, overlap_depth=depth, chunked_prefill_size=32)
    rig = Rig(config=config)
    req = rig.add(range(90), 20)
    for _ in range(after_steps):
        rig.step()
    assert rig.scheduler.abort(req.room, req.epoch)
    assert not rig.scheduler.abort(req.room, req.epoch)
    assert not rig.scheduler.abort(req.room, req.epoch + 1)
    rig.run()
    assert req.room not in rig.policy.finished
    rig.close()


def test_a_stuck_forward_frees_nothing_and_ends_the_loop() -> None:
    config = SchedulerConfig(model="m", max_running_requests=8, result_timeout_s=0.01)
    rig = Rig(config=config, engine_overlap=True, timing=FakeTiming(per_step_s=0.2))
    req = rig.add(PROMPT, 5)
    with pytest.raises(DeviceLost, match="no result within"):
        rig.scheduler.step()
    assert req.req_pool_idx is not None
    assert not rig.policy.failed
    rig.engine.close()
    rig.memory.close()
