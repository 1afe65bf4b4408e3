"""A state machine over all operations of a prefill and a decode scheduler, in any order."""

from __future__ import annotations

import os
from typing import ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from scheduler.config import Phase, SchedulerConfig
from scheduler.node_policy import AfterPrefill
from scheduler.req import Req, ReqState
from tests.scheduler.rig import EOS, GROUPS, Rig
from tests.scheduler.test_hand_off import ship
from tests.support.late_device import LateDevice

SHORT = settings(
    max_examples=8,
    stateful_step_count=60,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
LONG = settings(
    SHORT,
    derandomize=False,
    max_examples=int(os.environ.get("BATON_EXAMPLES", "300")),
    stateful_step_count=120,
)


class TwoWorkers(RuleBasedStateMachine):
    """P and D with tiny pools. A request has the same room number on both."""

    groups: ClassVar[tuple[str, ...]] = ()

    @initialize(
        page_size=st.sampled_from([1, 16]),
        depth=st.sampled_from([0, 1]),
        chunk=st.sampled_from([16, 32, None]),
        reserve=st.sampled_from([0, 16, 512]),
        eos=st.booleans(),
        tight=st.booleans(),
        late=st.booleans(),
    )
    def start(
        self,
        page_size: int,
        depth: int,
        chunk: int | None,
        reserve: int,
        eos: bool,
        tight: bool,
        late: bool,
    ) -> None:
        def config(phases: frozenset[Phase]) -> SchedulerConfig:
            return SchedulerConfig(
                model="m",
                max_running_requests=3,
                chunked_prefill_size=chunk,
                overlap_depth=depth,
                decode_reserve_tokens=reserve,
                phases=phases,
            )

        ends = EOS if eos else ()

        def rig(phases: frozenset[Phase], after: AfterPrefill) -> Rig:
            return Rig(
                page_size,
                192,
                160,
                pre_alloc=3,
                config=config(phases),
                after=after,
                eos=ends,
                groups=self.groups,
                window=20,
                interval=16,
                tight=tight,
                device=LateDevice() if late else None,
            )

        self.prefill = rig(frozenset({Phase.PREFILL}), AfterPrefill.HAND_OFF)
        self.decode = rig(frozenset(Phase), AfterPrefill.DECODE)
        self.pairs: dict[int, tuple[Req, Req]] = {}
        self.fenced: list[int] = []
        self.dropped: set[int] = set()

    prompts = st.tuples(st.integers(0, 2), st.integers(20, 90), st.integers(2, 60), st.integers(0, 3))

    @rule(shape=prompts, reserve=st.booleans())
    def pair(self, shape: tuple[int, int, int, int], reserve: bool) -> None:
        base, length, max_new, forced = shape
        prompt = [(base * 31 + i) % 90 for i in range(length)]
        forced = min(forced, max_new - 1)
        sent = self.prefill.req(prompt, max_new, forced=forced)
        reference = self.decode.req(prompt, max_new, forced=forced)
        assert sent.room == reference.room
        self.pairs[sent.room] = (sent, reference)
        self.decode.expected[sent.room] = self.prefill.expected[sent.room]
        self.prefill.scheduler.add(sent)
        if reserve:
            self.decode.scheduler.hand_off.reserve(reference)

    @rule(shape=prompts, priority=st.integers(0, 1))
    def add_to_decode(self, shape: tuple[int, int, int, int], priority: int) -> None:
        base, length, max_new, forced = shape
        prompt = [(base * 31 + i) % 90 for i in range(length)]
        self.decode.add(prompt, max_new, forced=min(forced, max_new - 1), priority=priority)
        self.prefill.rooms = self.decode.rooms

    @rule(steps=st.integers(1, 3))
    def step_prefill(self, steps: int) -> None:
        for _ in range(steps):
            self.prefill.step()

    @precondition(lambda self: self._in(sent=ReqState.WAITING))
    @rule()
    def prefill_on(self) -> None:
        """Without this rule few rooms would reach a transfer."""
        while self.prefill.step():
            pass

    @rule(steps=st.integers(1, 12))
    def step_decode(self, steps: int) -> None:
        for _ in range(steps):
            self.decode.step()

    def _in(self, sent: ReqState | None = None, reference: ReqState | None = None) -> list[int]:
        """Rooms whose requests on P (`sent`) and D (`reference`) are in these states."""
        return [
            room
            for room, (a, b) in self.pairs.items()
            if (sent is None or a.state is sent) and (reference is None or b.state is reference)
        ]

    @precondition(lambda self: self._in(reference=ReqState.NEW))
    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        room = data.draw(st.sampled_from(self._in(reference=ReqState.NEW)))
        self.decode.scheduler.hand_off.reserve(self.pairs[room][1])

    @precondition(lambda self: self._in(sent=ReqState.HANDED_OFF))
    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        room = data.draw(st.sampled_from(self._in(sent=ReqState.HANDED_OFF)))
        self.prefill.scheduler.hand_off.park(self.pairs[room][0])

    @precondition(lambda self: self._in(sent=ReqState.PARKED))
    @rule(data=st.data())
    def readmit(self, data: st.DataObject) -> None:
        room = data.draw(st.sampled_from(self._in(sent=ReqState.PARKED)))
        self.prefill.scheduler.hand_off.readmit(self.pairs[room][0])

    @precondition(lambda self: self._in(ReqState.HANDED_OFF, ReqState.RESERVED))
    @rule(data=st.data())
    def transfer(self, data: st.DataObject) -> None:
        room = data.draw(st.sampled_from(self._in(ReqState.HANDED_OFF, ReqState.RESERVED)))
        sent, reference = self.pairs.pop(room)
        ship(self.prefill, sent, self.decode, reference)
        self.prefill.scheduler.hand_off.release(sent)
        self.decode.scheduler.hand_off.add_transferred(
            reference, sent.output_ids[-1], None, sent.cached_tokens
        )

    @precondition(lambda self: len(self.pairs) > 2)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """The client is gone: the room ends on both workers."""
        room = data.draw(st.sampled_from(self._in()))
        self.dropped.add(room)
        sent, reference = self.pairs.pop(room)
        if sent.state in (ReqState.HANDED_OFF, ReqState.PARKED):
            self.prefill.scheduler.hand_off.release(sent)
        else:
            self.prefill.scheduler.abort(sent.room, sent.epoch)
        if reference.state is ReqState.RESERVED:
            pages = self.decode.scheduler.hand_off.cancel_reservation(reference)
            for name, ids in pages.items():  # the peer writes on until the fence
                self.decode.memory.kv_caches[name].bytes[ids] = 5
            self.decode.memory.quarantine(pages, room)
            self.fenced.append(room)

    def _decoding(self) -> list[int]:
        known = set(self.decode.expected) - set(self.decode.policy.finished)
        return sorted(known - set(self.pairs) - self.dropped)

    @precondition(lambda self: len(self._decoding()) > 3)
    @rule(data=st.data())
    def abort_on_decode(self, data: st.DataObject) -> None:
        room = data.draw(st.sampled_from(self._decoding()))
        assert self.decode.scheduler.abort(room, 1)
        self.dropped.add(room)

    @precondition(lambda self: self.fenced)
    @rule()
    def fence_passes(self) -> None:
        self.decode.memory.release_quarantine(self.fenced.pop(0))

    def teardown(self) -> None:
        if not hasattr(self, "prefill"):
            return
        while self.fenced:
            self.fence_passes()
        for sent, reference in self.pairs.values():
            self.dropped.add(sent.room)
            if reference.state is ReqState.RESERVED:
                self.decode.memory.quarantine(
                    self.decode.scheduler.hand_off.cancel_reservation(reference), sent.room
                )
                self.decode.memory.release_quarantine(sent.room)
        self.decode.run()
        while not self.prefill.scheduler.idle:
            if not self.prefill.step():  # all that is left waits for rooms that are handed off
                handed = [sent for sent, _ in self.pairs.values() if sent.state is ReqState.HANDED_OFF]
                assert handed, "a step did nothing though nobody holds memory"
                for sent in handed:
                    self.prefill.scheduler.hand_off.release(sent)
        for sent, _ in self.pairs.values():
            if sent.state in (ReqState.HANDED_OFF, ReqState.PARKED):
                self.prefill.scheduler.hand_off.release(sent)
        self.decode.assert_outputs(*self.dropped)
        for rig in (self.prefill, self.decode):
            assert not rig.policy.failed
            for room, outputs in rig.policy.outputs.items():
                assert outputs == rig.expected[room][: len(outputs)]
            rig.close()


def _with(groups: tuple[str, ...]) -> type[TwoWorkers]:
    return type("TwoWorkers", (TwoWorkers,), {"groups": groups})


@pytest.mark.timeout(600)
@pytest.mark.parametrize("groups", GROUPS, ids="+".join)
def test_two_workers(groups: tuple[str, ...]) -> None:
    run_state_machine_as_test(_with(groups), settings=SHORT)


@pytest.mark.invariants
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("groups", GROUPS, ids="+".join)
def test_two_workers_long(groups: tuple[str, ...]) -> None:
    run_state_machine_as_test(_with(groups), settings=LONG)
