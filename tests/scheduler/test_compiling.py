"""Requests whose grammars are not compiled yet wait, and others go past them."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from llguidance import LLMatcher

from engine.grammar import GrammarState
from scheduler.config import SchedulerConfig
from scheduler.req import Req, ReqState
from tests.scheduler.rig import VOCAB, Rig
from wire.request import SamplingParams


def with_grammar(req: Req) -> Future[LLMatcher]:
    """The request gets a grammar, which is compiled when the future is done. The fake engine ignores it."""
    compiled: Future[LLMatcher] = Future()
    req.sampling.grammar = GrammarState(compiled, SamplingParams(), (), VOCAB)
    return compiled


@pytest.mark.parametrize("depth", [0, 1])
def test_others_go_past_a_request_whose_grammar_is_compiled(depth: int) -> None:
    rig = Rig(config=SchedulerConfig(model="m", overlap_depth=depth))
    late = rig.req(range(40), 6)
    compiled = with_grammar(late)
    rig.scheduler.add(late)
    other = rig.add(range(50, 90), 6)
    rig.run()
    assert other.state is ReqState.DONE
    assert late.state is ReqState.NEW
    assert not rig.step()
    compiled.set_exception(RuntimeError("also when it failed"))
    assert rig.step()
    rig.run()
    rig.assert_outputs()
    rig.close()


def test_a_request_that_is_aborted_meanwhile_is_gone() -> None:
    rig = Rig()
    late = rig.req(range(40), 6)
    compiled = with_grammar(late)
    rig.scheduler.add(late)
    assert rig.scheduler.abort(late.room, late.epoch)
    compiled.set_result(None)  # type: ignore[arg-type]
    assert not rig.step()
    assert late.state is ReqState.DONE
    assert late.room not in rig.policy.outputs
    rig.close()


def test_a_request_that_can_never_run_is_answered_at_once() -> None:
    rig = Rig(max_context=64)
    late = rig.req(range(80), 6)
    with_grammar(late)
    rig.scheduler.add(late)
    rig.step()
    assert late.state is ReqState.DONE
    rig.close()


def test_a_transferred_request_joins_when_its_grammar_is_compiled_and_others_do_before() -> None:
    rig = Rig(pre_alloc=2)
    first = rig.add(range(100, 132), 4)
    rig.run()
    late, ready = rig.req(range(100, 116), 5), rig.req(range(100, 116), 5)
    compiled = with_grammar(late)
    for req in (late, ready):
        assert rig.scheduler.hand_off.reserve(req)
        rig.scheduler.hand_off.add_transferred(req, rig.expected[req.room][0], None, 0)
    while ready.state is not ReqState.DONE:
        assert rig.step()
    assert (first.state, late.state) == (ReqState.DONE, ReqState.TRANSFERRED)
    assert not rig.step()
    compiled.set_result(None)  # type: ignore[arg-type]
    rig.run()
    rig.assert_outputs()
    rig.close()
