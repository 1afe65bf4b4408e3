"""The hand-off under orders, losses and repetitions of messages that a state machine chooses.

Whatever happens: what the router has of a room is a prefix of the right answer; once everything is delivered
and deadlines have passed, every room is over and every page and row of both workers is free or cached.
"""

from __future__ import annotations

import random
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.fake import fake_generate
from tests.support.hand_off import Pair, pair
from wire.codec import unpack_tokens


class HandOff(RuleBasedStateMachine):
    """Rooms start and end while messages are delivered in any order, lost and doubled."""

    groups: ClassVar[tuple[str, ...]] = ()  # of the fake model, beside its full group

    def __init__(self) -> None:
        super().__init__()
        self._context = pair(self.groups)
        self.pair: Pair = self._context.__enter__()
        self.rooms = 0

    @rule(length=st.integers(1, 90), n=st.integers(1, 12), shared=st.booleans(), split=st.booleans())
    def ask(self, length: int, n: int, shared: bool, split: bool) -> None:
        self.rooms += 1
        rng = random.Random(0 if shared else self.rooms)
        self.pair.ask(self.rooms, [rng.randrange(1000) for _ in range(length)], n, split)

    @precondition(lambda self: self.pair.network.letters)
    @rule(where=st.integers(0, 10_000), keep=st.booleans())
    def deliver(self, where: int, keep: bool) -> None:
        letters = self.pair.network.letters
        self.pair.deliver(where % len(letters), keep and len(letters) < 50)

    @precondition(lambda self: self.pair.network.letters)
    @rule(where=st.integers(0, 10_000))
    def lose(self, where: int) -> None:
        del self.pair.network.letters[where % len(self.pair.network.letters)]

    @rule(prefill=st.booleans())
    def turn(self, prefill: bool) -> None:
        self.pair.turn(self.pair.prefill if prefill else self.pair.decode)

    @rule(seconds=st.sampled_from([0.3, 1.0, 5.0]))
    def pass_time(self, seconds: float) -> None:
        self.pair.pass_time(seconds)

    @precondition(lambda self: self.rooms)
    @rule(which=st.integers(1, 10_000), split=st.booleans())
    def restart(self, which: int, split: bool) -> None:
        room = which % self.rooms + 1
        if self.pair.outputs[room].open:
            self.pair.restart(room, split)

    @precondition(lambda self: self.rooms)
    @rule(which=st.integers(1, 10_000))
    def abort(self, which: int) -> None:
        self.pair.abort(which % self.rooms + 1)

    @rule()
    def run_dry(self) -> None:
        self.pair.run_dry()

    @invariant()
    def memory_balances(self) -> None:
        for worker in (self.pair.prefill, self.pair.decode):
            worker.check_memory()

    @invariant()
    def answers_are_right_as_far_as_they_go(self) -> None:
        for output in self.pair.outputs.values():
            prompt = unpack_tokens(output.request.prompt).tolist()
            right = fake_generate(prompt, output.request.sampling.max_new_tokens, groups=self.groups)
            assert output.tokens == right[: len(output.tokens)]
            if output.finish is not None:
                assert len(output.tokens) == len(right)

    def teardown(self) -> None:
        try:
            self._everything_ends()
        finally:
            self._context.__exit__(None, None, None)

    def _everything_ends(self) -> None:
        """A router that repeats itself gets every answer. After all deadlines nothing is held."""
        self.pair.run_dry()
        for _ in range(4):
            unfinished = [room for room, output in self.pair.outputs.items() if output.open]
            for room in unfinished:
                self.pair.insist(room)
            self.pair.pass_time(3.0)
            self.pair.run_dry()
        assert not [output for output in self.pair.outputs.values() if output.open]
        self.pair.settle()


_SETTINGS = settings(stateful_step_count=40, suppress_health_check=list(HealthCheck), print_blob=True)


class HandOffWindow(HandOff):
    """A model with windowed layers."""

    groups = ("window",)


class HandOffState(HandOff):
    """A model with linear attention."""

    groups = ("state",)


class HandOffBoth(HandOff):
    """A model with both."""

    groups = ("window", "state")


class TestHandOff(HandOff.TestCase):  # type: ignore[misc]
    settings = settings(_SETTINGS, max_examples=5)


class TestHandOffWindow(HandOffWindow.TestCase):  # type: ignore[misc]
    settings = settings(_SETTINGS, max_examples=5)


class TestHandOffState(HandOffState.TestCase):  # type: ignore[misc]
    settings = settings(_SETTINGS, max_examples=5)


class TestHandOffBoth(HandOffBoth.TestCase):  # type: ignore[misc]
    settings = settings(_SETTINGS, max_examples=8)


_LONG = settings(_SETTINGS, max_examples=100, stateful_step_count=60)


@pytest.mark.invariants
class TestHandOffLong(HandOff.TestCase):  # type: ignore[misc]
    settings = _LONG


@pytest.mark.invariants
class TestHandOffWindowLong(HandOffWindow.TestCase):  # type: ignore[misc]
    settings = _LONG


@pytest.mark.invariants
class TestHandOffStateLong(HandOffState.TestCase):  # type: ignore[misc]
    settings = _LONG


@pytest.mark.invariants
class TestHandOffBothLong(HandOffBoth.TestCase):  # type: ignore[misc]
    settings = _LONG
