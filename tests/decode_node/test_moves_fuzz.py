"""Moves while messages are lost, doubled and reordered, rooms end and workers pause: random schedules.

Whatever happens: what the router has of a room is a prefix of the right answer, memory balances after every
turn, and once everything is delivered every room ends, and nothing is held.
"""

from __future__ import annotations

import random
import time

import pytest
from msgspec.structs import replace

from tests.support.hand_off import GROUPS, TRANSFER_S, prompt_of
from tests.support.oracle import seeds
from tests.support.two_decoders import Stream, TwoDecoders, two_decoders
from wire.messages.rooms import Abort, Decode, Resend


class Fuzz:
    """One random schedule, from a seed."""

    def __init__(self, two: TwoDecoders, seed: int, groups: tuple[str, ...]) -> None:
        self.two = two
        self.rng = random.Random(seed)
        self.groups = groups
        self.aborted: set[int] = set()

    # -- what can happen ---------------------------------------------------------------------------

    def ask(self) -> None:
        room = len(self.two.streams) + 1
        if room > 6:
            return
        rng = self.rng
        prompt = prompt_of(rng.randrange(3), rng.randrange(1, 60))
        more = {"top_logprobs": 1} if rng.random() < 0.3 else {}
        self.two.ask(room, prompt, rng.randrange(1, 90), rng.randrange(2), **more)

    def open_streams(self) -> list[tuple[int, Stream]]:
        streams = self.two.streams.items()
        return [(room, one) for room, one in streams if one.finish is None and room not in self.aborted]

    def move(self) -> None:
        ready = [room for room, one in self.open_streams() if one.tokens and one.moving is None]
        if ready:
            self.two.move(self.rng.choice(ready))

    def cancel(self) -> None:
        moving = [room for room, one in self.open_streams() if one.moving is not None]
        if moving:
            self.two.cancel(self.rng.choice(moving))

    def abort(self) -> None:
        ready = [room for room, _ in self.open_streams()]
        if len(ready) > 3:
            room = self.rng.choice(ready)
            self.aborted.add(room)
            self.say_over(room)

    def say_over(self, room: int) -> None:
        stream = self.two.streams[room]
        for where in (0, 1):
            self.two.post(where, Abort(room, stream.newest))

    def turn(self) -> None:
        self.two.workers[self.rng.randrange(2)].turn([])
        for worker in self.two.workers:
            worker.check_memory()

    def deliver(self) -> None:
        letters = self.two.network.letters
        if not letters:
            return
        index = self.rng.randrange(min(len(letters), 6))
        fate = self.rng.random()
        if fate < 0.06:
            del letters[index]
        elif fate < 0.12 and len(letters) < 60:
            letters.append(letters[index])
            self.two.deliver(index)
        else:
            self.two.deliver(index)

    def pass_time(self) -> None:
        self.two.pass_time(self.rng.choice([0.3, 0.3, 1.0, 4.0]))

    # -- the schedule ------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        names = ["turn"] * 8 + ["deliver"] * 14 + ["ask", "move", "move", "cancel", "abort", "pass_time"]
        for _ in range(steps):
            getattr(self, self.rng.choice(names))()
        self.finish()

    def finish(self) -> None:
        """A router that repeats itself gets every answer."""
        deadline = time.monotonic() + TRANSFER_S
        while self.open_streams():
            assert time.monotonic() < deadline, {room: vars(one) for room, one in self.open_streams()}
            for room, stream in self.open_streams():
                if stream.moving is not None:
                    self.two.cancel(room)
                self.two.post(stream.where, Resend(room, stream.request.epoch, len(stream.tokens)))
            for _ in range(30):
                self.two.round()
            self.two.pass_time(0.3)
            for room, stream in self.open_streams():
                if stream.lost:
                    self.restart(room, stream)
        for room in self.two.streams:
            self.say_over(room)
        for room, stream in self.two.streams.items():
            right = self.two.right(room, self.groups)
            assert stream.tokens == (right if room not in self.aborted else right[: len(stream.tokens)])
        self.two.settle()

    def restart(self, room: int, stream: Stream) -> None:
        """What a router does with a room that nobody runs."""
        self.say_over(room)
        stream.newest += 1
        stream.lost = False
        stream.request = replace(stream.request, epoch=stream.newest, forced=tuple(stream.tokens))
        self.two.post(stream.where, Decode(stream.request))


def run_seed(seed: int, groups: tuple[str, ...], steps: int) -> None:
    """Run one schedule."""
    with two_decoders(groups, overlap_depth=seed % 2, max_total_tokens=512, max_running_requests=4) as two:
        try:
            Fuzz(two, seed, groups).run(steps)
        except BaseException as failure:
            failure.add_note(f"seed {seed}")
            raise


@pytest.mark.covering("invariants")
@pytest.mark.parametrize("groups", GROUPS, ids="+".join)
@pytest.mark.parametrize("seed", seeds(6, 12))
def test_random_schedules_of_moves(seed: int, groups: tuple[str, ...]) -> None:
    run_seed(seed, groups, 400)


@pytest.mark.invariants
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("groups", GROUPS, ids="+".join)
def test_random_schedules_of_moves_long(groups: tuple[str, ...]) -> None:
    for seed in range(100, 300):
        run_seed(seed, groups, 600)
