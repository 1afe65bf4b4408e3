"""What goes into a forward: mixed batches, chunks, unknown tokens, cached prefixes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.batch import UNKNOWN_TOKEN, ForwardBatch, Pending
from scheduler.config import SchedulerConfig
from tests.scheduler.rig import Rig
from wire.request import FinishReason
from wire.stages import RequestStage

CONFIG = SchedulerConfig(model="m", max_running_requests=8, chunked_prefill_size=32)


def test_decode_rows_and_chunks_share_a_forward() -> None:
    rig = Rig(config=CONFIG)
    first = rig.add(range(20), 30)
    rig.step()
    rig.add(range(40, 40 + 50), 4)
    rig.step()
    batch = rig.engine.batches[-1]
    assert batch.q_lens.tolist() == [1, 16]  # one token of 32 goes to the decode row, the rest page-floored
    assert batch.sampled.tolist() == [0]
    assert batch.sampling.positions.tolist() == [1]
    assert batch.seq_lens.tolist() == [first.prompt_len + 1, 16]
    rig.run()
    rig.assert_outputs()
    rig.close()


def test_a_batch_shares_no_memory_with_what_the_next_step_changes() -> None:
    """A forward may run in a thread while the next step is scheduled."""
    rig = Rig(config=CONFIG, groups=("window", "state"))
    rig.add(range(20), 30)
    rig.step()
    rig.add(range(40, 90), 4)
    for _ in range(7):
        rig.step()
    assert {batch.q_lens.max() == 1 for batch in rig.engine.batches} == {False, True}, (
        "with chunks and without"
    )
    running = rig.scheduler._running
    assert running.states is not None
    assert rig.memory.swa is not None
    changing = [
        running.rows, running.lens, running.next_ids, running.page_table, running.states.reads,
        running.states.writes, rig.memory.req_to_token_pool.req_to_token, rig.memory.swa.table,
    ]  # fmt: skip
    for batch in rig.engine.batches:
        assert batch.window is not None
        assert batch.state is not None
        parts = (batch, batch.window, batch.state)
        given = [getattr(part, name) for part in parts for name in part.__slots__]
        arrays = [array for array in given if isinstance(array, np.ndarray)]
        assert len(arrays) == 12
        assert not any(np.shares_memory(array, one) for array in arrays for one in changing)
    rig.run()
    rig.close()


def test_one_request_is_chunked_at_a_time_on_page_borders() -> None:
    rig = Rig(config=CONFIG)
    long, other = rig.add(range(90), 2), rig.add(range(5, 85), 2)
    rig.run()
    assert rig.policy.chunk_ends[long.room] == [32, 64]
    assert all(end % 16 == 0 for end in rig.policy.chunk_ends[other.room])
    partial = [batch for batch in rig.engine.batches if len(batch.sampled) < len(batch.q_lens)]
    assert all(len(batch.q_lens) - len(batch.sampled) == 1 for batch in partial)
    rig.assert_outputs()
    rig.close()


def test_last_chunk_is_kept_small_when_asked() -> None:
    rig = Rig(config=replace(CONFIG, chunked_prefill_size=64, last_chunk_tokens=16))
    req = rig.add(range(60), 2)
    rig.run()
    assert rig.policy.chunk_ends[req.room] == [32]  # 44 floored; the last chunk carries 28
    rig.assert_outputs()
    rig.close()


def test_unlimited_chunks_prefill_whole_prompts() -> None:
    rig = Rig(config=replace(CONFIG, chunked_prefill_size=None, max_prefill_tokens=64))
    for start in range(3):
        rig.add(range(start, start + 50), 2)
    rig.run()
    prefills = [batch.q_lens.max() for batch in rig.engine.batches if batch.q_lens.max() > 1]
    assert prefills == [50, 50, 50]
    rig.assert_outputs()
    rig.close()


def test_overlap_launches_before_the_token_is_known() -> None:
    rig = Rig(config=replace(CONFIG, overlap_depth=1))
    req = rig.add(range(10), 5)
    rig.step()
    assert req.output_ids == []
    rig.step()
    assert rig.engine.batches[-1].input_ids.tolist() == [UNKNOWN_TOKEN]
    assert len(req.output_ids) == 1
    rig.run()
    # the last token's position is known beforehand, so nothing surplus is computed
    assert len(rig.engine.batches) == 5
    assert rig.scheduler.metrics.surplus_tokens == 0
    rig.assert_outputs()
    rig.close()


def test_a_request_for_one_token_needs_one_forward_and_no_place_in_the_decode_batch() -> None:
    rig = Rig(config=replace(CONFIG, overlap_depth=1))
    rig.add(range(10), 1)
    rig.step()
    assert len(rig.scheduler._running) == 0
    rig.run()
    assert len(rig.engine.batches) == 1
    rig.assert_outputs()
    rig.close()


def test_surplus_token_is_dropped_and_its_page_freed_late() -> None:
    rig = Rig(page_size=1, config=replace(CONFIG, overlap_depth=1))
    probe = rig.req(range(10), 8)
    stop = rig.expected.pop(probe.room)[2]
    req = rig.add(range(10), 8, stop_token_ids=(stop,))
    rig.run()
    assert rig.policy.outputs[req.room][-1] == stop
    assert rig.policy.finished[req.room] is FinishReason.STOP
    assert rig.scheduler.metrics.surplus_tokens == 1
    rig.assert_outputs()
    rig.close()


@pytest.mark.parametrize("page_size", [1, 16])
def test_cached_prefix_is_not_computed_again(page_size: int) -> None:
    rig = Rig(page_size=page_size, config=CONFIG)
    rig.add(range(64), 4)
    rig.run()
    again = rig.add(range(64), 4)
    rig.run()
    assert again.cached_tokens == (63 if page_size == 1 else 48)  # the last token is always computed
    rig.assert_outputs()
    rig.close()


def test_other_salt_or_extra_key_shares_nothing() -> None:
    rig = Rig(config=CONFIG)
    rig.add(range(64), 4)
    rig.run()
    req = rig.req(range(64), 4)
    req.namespace = replace(req.namespace, cache_salt="other")
    rig.scheduler.add(req)
    rig.run()
    assert req.cached_tokens == 0
    rig.assert_outputs()
    rig.close()


def test_same_prompt_twice_at_once_keeps_one_copy() -> None:
    for depth in (0, 1):
        rig = Rig(config=replace(CONFIG, overlap_depth=depth))
        rig.add(range(80), 4)
        rig.add(range(80), 4)
        rig.run()
        rig.assert_outputs()
        rig.close()


def test_stamps_come_once_in_order() -> None:
    rig = Rig(config=CONFIG)
    req = rig.add(range(90), 4)
    rig.run()
    assert [stamp.stage for stamp in req.stamps] == [
        RequestStage.PREFILL_WAITING,
        RequestStage.PREFILL_CHUNKED_FORWARD,
        RequestStage.PREFILL_CHUNKED_FORWARD,
        RequestStage.PREFILL_FORWARD,
        RequestStage.DECODE_LOOP,
    ]
    times = [stamp.at_ns for stamp in req.stamps]
    assert times == sorted(times)
    rig.close()


def test_a_forward_s_stage_begins_before_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without overlap `launch` returns when the forward is over."""
    rig = Rig(config=CONFIG)
    req = rig.add(range(40), 1)
    launch, entered = rig.engine.launch, []

    def watched(batch: ForwardBatch) -> Pending:
        entered.append(req.stamps[-1].stage)
        return launch(batch)

    monkeypatch.setattr(rig.engine, "launch", watched)
    rig.run()
    assert entered == [RequestStage.PREFILL_CHUNKED_FORWARD, RequestStage.PREFILL_FORWARD]
    rig.close()
