"""The hand-off with unusual options. test_hand_off_machine does the same to messages, with fixed options.

Tiny pools of each group, page sizes, eviction policies, no prefix cache, steps launched ahead, unlimited
chunks; messages lost, doubled and reordered; rooms restarted and aborted; deadlines that pass.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.fake import fake_generate
from kvcache.eviction import POLICIES
from tests.support.hand_off import GROUPS, Pair, pair
from wire.messages.rooms import RejectKind
from wire.messages.transfer import KVDone, KVFailed, KVTarget, Release

CONTROL = (KVTarget, KVDone, KVFailed, Release)
LONGEST = 90


def options_of(rng: random.Random, groups: tuple[str, ...]) -> dict[str, Any]:
    page_size = rng.choice([1, 4, 16, 64])
    options: dict[str, Any] = {
        "page_size": page_size,
        "max_total_tokens": rng.choice([256, 512]),
        "chunked_prefill_size": rng.choice([8, 20, None]),
        "overlap_depth": rng.choice([0, 1]),
        "max_running_requests": rng.choice([1, 2, 4]),
        "prefix_cache": rng.choice(["radix", "radix", "none"]),
        "eviction_policy": rng.choice(sorted(POLICIES)),
        "decode_reserve_tokens": rng.choice([0, 16, 512]),
        "max_context_tokens": 128,
    }
    if "window" in groups:
        options["swa_full_tokens_ratio"] = rng.choice([0.01, 0.3, 1.0])
    if "state" in groups:
        options["max_mamba_cache_size"] = rng.choice([3, 4, 5, 6, 12])
        options["mamba_track_interval"] = page_size * rng.choice([1, 2])
    return options


class Rooms:
    """Rooms of one pair, and the events that may happen to them."""

    def __init__(self, both: Pair, rng: random.Random, groups: tuple[str, ...]) -> None:
        self.pair, self.rng, self.groups = both, rng, groups
        self.count = 0
        self.right: dict[int, list[int]] = {}

    def ask(self) -> None:
        self.count += 1
        rng = self.rng
        base = rng.randrange(3)
        length, fork = rng.randrange(1, LONGEST), rng.randrange(2 * LONGEST)
        prompt = [base * 100 + i + (i >= fork) * 7 for i in range(length)]
        n = rng.choice([1, 2, rng.randrange(1, 30)])
        self.pair.ask(self.count, prompt, n, split=rng.random() < 0.8)
        self.right[self.count] = fake_generate(prompt, n, groups=self.groups)

    def deliver(self) -> None:
        letters = self.pair.network.letters
        if letters:
            where = self.rng.choice([0, self.rng.randrange(len(letters))])
            self.pair.deliver(where, keep=self.rng.random() < 0.2 and len(letters) < 60)

    def double_control(self) -> None:
        """A message of the hand-off comes twice in a row."""
        letters = self.pair.network.letters
        control = [i for i, letter in enumerate(letters) if isinstance(letter.message, CONTROL)]
        if control:
            where = self.rng.choice(control)
            self.pair.deliver(where, keep=True)
            self.pair.deliver(where, keep=self.rng.random() < 0.5)

    def lose(self) -> None:
        if self.pair.network.letters:
            del self.pair.network.letters[self.rng.randrange(len(self.pair.network.letters))]

    def turn(self) -> None:
        for _ in range(self.rng.choice([1, 3, 8])):
            self.pair.turn(self.rng.choice([self.pair.prefill, self.pair.decode]))

    def wait(self) -> None:
        self.pair.pass_time(self.rng.choice([0.3, 1.0, 5.0, 130.0]))

    def restart(self) -> None:
        room = self.rng.randint(1, self.count) if self.count else 0
        if (
            room
            and self.pair.outputs[room].open
            and len(self.pair.outputs[room].tokens) < len(self.right[room])
        ):
            self.pair.restart(room, split=self.rng.random() < 0.7)

    def abort(self) -> None:
        if self.count:
            self.pair.abort(self.rng.randint(1, self.count))

    def dry(self) -> None:
        self.pair.run_dry()

    def check(self) -> None:
        for worker in (self.pair.prefill, self.pair.decode):
            worker.check_memory()
        for room, output in self.pair.outputs.items():
            assert output.tokens == self.right[room][: len(output.tokens)], f"room {room}"
            if output.finish is not None:
                assert len(output.tokens) == len(self.right[room]), f"room {room} ended early"
            invalid = output.rejected is not None and output.rejected.why is RejectKind.INVALID
            assert not invalid, output.rejected

    def run(self, moves: int) -> None:
        names = (
            ["ask"] * 3 + ["deliver"] * 14 + ["turn"] * 8 + ["double_control"] * 2
            + ["lose", "wait", "restart", "abort", "dry"]
        )  # fmt: skip
        for _ in range(moves):
            getattr(self, self.rng.choice(names))()
            self.check()
        self.finish()

    def finish(self) -> None:
        """A router that repeats itself gets every answer. When all deadlines have passed, nothing is held."""
        for room in [room for room, output in self.pair.outputs.items() if output.aborted]:
            self.pair.abort(room)  # a router says so until it is confirmed
        self.pair.run_dry()
        for _ in range(4):
            for room in [room for room, output in self.pair.outputs.items() if output.open]:
                self.pair.insist(room)
            self.pair.pass_time(3.0)
            self.pair.run_dry()
        unfinished = [room for room, output in self.pair.outputs.items() if output.open]
        assert not unfinished, f"rooms {unfinished} never end"
        self.check()
        self.pair.settle()


def run_seed(seed: int, moves: int) -> None:
    rng = random.Random(seed)
    groups = GROUPS[seed % len(GROUPS)]
    options = options_of(rng, groups)
    with pair(groups, **options) as both:
        try:
            Rooms(both, rng, groups).run(moves)
        except BaseException as failure:
            failure.add_note(f"seed {seed}: {groups} {options}")
            raise


@pytest.mark.parametrize("seed", range(20))
def test_odd_configurations(seed: int) -> None:
    run_seed(seed, 80)


@pytest.mark.invariants
@pytest.mark.timeout(900)
def test_odd_configurations_long() -> None:
    for seed in range(1000, 1100):
        run_seed(seed, 250)
