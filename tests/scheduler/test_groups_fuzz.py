"""Random schedules of two workers over every combination of groups, with unusual options.

What test_machine does not vary: eviction policies, prefix caching off, every page size, odd numbers of state
slots, stop tokens on top of ends of sequence, forwards that fail, peers that write into what decode had
reserved. All pools are balanced after every step, every answer is the oracle's, and every room ends.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from kvcache.eviction import POLICIES
from scheduler.config import Phase, SchedulerConfig
from scheduler.node_policy import AfterPrefill
from scheduler.req import Req, ReqState
from tests.scheduler.rig import EOS, GROUPS, Rig
from tests.scheduler.test_hand_off import ship

CONTEXT = 160


class Fuzz:
    """One random configuration and one random schedule, all from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.groups = GROUPS[seed % len(GROUPS)]
        page_size = rng.choice([1, 4, 16, 64])
        policy = rng.choice(sorted(POLICIES))
        eos = rng.choice([(), EOS])
        shared: dict[str, Any] = {
            "page_size": page_size,
            "pool_tokens": rng.choice([192, 256, 448]),
            "max_context": CONTEXT,
            "pre_alloc": rng.choice([1, 4]),
            "eos": eos,
            "prefix_cache": rng.choice(["radix"] * 4 + ["none"]),
            "groups": self.groups,
            "window": rng.choice([3, 17, 24, 40]),
            "interval": page_size * rng.choice([1, 2, 4]),
            "tight": rng.random() < 0.7,
            "state_slots": rng.choice([None, 4, 5, 6, 9]),
            "eviction_policy": policy,
        }
        config = SchedulerConfig(
            model="m",
            max_running_requests=rng.choice([1, 2, 3, 6]),
            chunked_prefill_size=rng.choice([8, 20, 32, None]),
            max_prefill_tokens=rng.choice([48, 8192]),
            last_chunk_tokens=rng.choice([0, 0, 10]),
            decode_reserve_tokens=rng.choice([0, 16, 512]),
            overlap_depth=rng.choice([0, 1]),
        )
        self.about = f"seed {seed}: {shared} {config}"
        sender = replace(config, phases=frozenset({Phase.PREFILL}))
        overlap = bool(config.overlap_depth) and rng.random() < 0.2
        self.prefill = Rig(config=sender, after=AfterPrefill.HAND_OFF, engine_overlap=overlap, **shared)
        self.decode = Rig(config=config, engine_overlap=overlap, **shared)
        self.pairs: dict[int, tuple[Req, Req]] = {}
        self.gone: set[int] = set()
        self.fenced: list[int] = []
        self.asked: list[Req] = []
        self.paused: list[Req] = []

    def prompt(self) -> list[int]:
        """A prompt. Beginnings are few, so that prompts share prefixes; many end on page borders."""
        rng = self.rng
        size = self.prefill.page_size
        length = rng.choice([rng.randrange(1, 130), size * rng.randrange(1, max(2, 120 // size))])
        base = rng.randrange(3)
        fork = rng.randrange(0, 150)
        return [(base * 37 + i + (i >= fork) * 7) % 90 for i in range(length)]

    def shape(self) -> tuple[list[int], int, dict[str, Any]]:
        rng = self.rng
        prompt = self.prompt()
        max_new = rng.randrange(1, min(50, CONTEXT - len(prompt)))
        more: dict[str, Any] = {"forced": rng.choice([0, 0, rng.randrange(max_new)])}
        more["priority"] = rng.choice([0, 0, 1])
        if rng.random() < 0.3:
            more["stop_token_ids"] = tuple(rng.sample(range(499), 60))
        return prompt, max_new, more

    # -- what can happen ---------------------------------------------------------------------------

    def ask_decode(self) -> None:
        prompt, max_new, more = self.shape()
        self.asked.append(self.decode.add(prompt, max_new, **more))
        self.prefill.rooms = self.decode.rooms

    def ask_pair(self) -> None:
        prompt, max_new, more = self.shape()
        sent = self.prefill.req(prompt, max_new, **more)
        reference = self.decode.req(prompt, max_new, **more)
        assert sent.room == reference.room
        self.pairs[sent.room] = (sent, reference)
        self.prefill.scheduler.add(sent)

    def reserve(self) -> None:
        for sent, reference in self.pairs.values():
            if reference.state is ReqState.NEW and sent.room not in self.prefill.policy.failed:
                self.decode.scheduler.hand_off.reserve(reference)
                return

    def step(self) -> None:
        rig = self.rng.choice([self.prefill, self.decode, self.decode])
        for _ in range(self.rng.choice([1, 1, 2, 6])):
            rig.step()

    def of_state(self, state: ReqState) -> list[int]:
        return [room for room, (sent, _) in self.pairs.items() if sent.state is state]

    def park(self) -> None:
        for room in self.of_state(ReqState.HANDED_OFF)[:1]:
            self.prefill.scheduler.hand_off.park(self.pairs[room][0])

    def readmit(self) -> None:
        for room in self.of_state(ReqState.PARKED)[:1]:
            self.prefill.scheduler.hand_off.readmit(self.pairs[room][0])

    def transfer(self) -> None:
        for room in self.of_state(ReqState.HANDED_OFF):
            sent, reference = self.pairs[room]
            if reference.state is ReqState.RESERVED:
                del self.pairs[room]
                ship(self.prefill, sent, self.decode, reference)
                self.prefill.scheduler.hand_off.release(sent)
                self.decode.scheduler.hand_off.add_transferred(
                    reference, sent.output_ids[-1], None, sent.cached_tokens
                )
                return

    def drop(self) -> None:
        """The room ends on both workers. A peer writes to what decode had reserved until the fence passes."""
        if not self.pairs:
            return
        room = self.rng.choice(list(self.pairs))
        self.end_pair(room)

    def end_pair(self, room: int) -> None:
        sent, reference = self.pairs.pop(room)
        self.gone.add(room)
        if sent.state in (ReqState.HANDED_OFF, ReqState.PARKED):
            self.prefill.scheduler.hand_off.release(sent, is_insert=self.rng.random() < 0.5)
        else:
            self.prefill.scheduler.abort(sent.room, sent.epoch)
        if reference.state is ReqState.RESERVED:
            pages = self.decode.scheduler.hand_off.cancel_reservation(reference)
            for name, ids in pages.items():
                self.decode.memory.kv_caches[name].bytes[ids] = 5
            self.decode.memory.quarantine(pages, room)
            self.fenced.append(room)
        elif reference.state is ReqState.NEW:
            self.decode.scheduler.hand_off.withdraw(reference)

    def abort(self) -> None:
        policy = self.decode.policy
        over = {*self.pairs, *self.gone, *policy.finished, *policy.failed}
        running = [room for room in self.decode.expected if room not in over]
        if running:
            room = self.rng.choice(running)
            if self.decode.scheduler.abort(room, 1):
                self.gone.add(room)

    def pause(self) -> None:
        for req in self.asked:
            if req.state is not ReqState.PAUSED and self.decode.scheduler.hand_off.pause(req):
                self.paused.append(req)
                return

    def resume(self) -> None:
        self.paused = [req for req in self.paused if req.state is ReqState.PAUSED]  # others were aborted
        if self.paused:
            self.decode.scheduler.hand_off.resume(self.paused.pop())

    def fence(self) -> None:
        if self.fenced:
            room = self.fenced.pop(self.rng.randrange(len(self.fenced)))
            self.decode.memory.release_quarantine(room)

    def evict(self) -> None:
        rig = self.rng.choice([self.prefill, self.decode])
        amount = self.rng.randrange(1, 40)
        rig.memory.cache.tree.evict(self.rng.choice(["full", "window", "state"]), amount)

    def fail_forward(self) -> None:
        rig = self.rng.choice([self.prefill, self.decode])
        rig.engine.fail_launch = rig.engine.launches + self.rng.randrange(1, 4)

    # -- the schedule ------------------------------------------------------------------------------

    def run(self, moves: int) -> None:
        names = (
            ["step"] * 12 + ["ask_decode"] * 2 + ["ask_pair"] * 3 + ["reserve"] * 4 + ["transfer"] * 4
            + ["park", "readmit", "readmit", "drop", "abort", "fence", "evict", "pause", "resume", "resume"]
        )  # fmt: skip
        failures = self.rng.random() < 0.15
        for _ in range(moves):
            if failures and self.rng.random() < 0.03:
                self.fail_forward()
            getattr(self, self.rng.choice(names))()
            self.check()
        self.finish()

    def check(self) -> None:
        for rig in (self.prefill, self.decode):
            rig.check()
            for room, outputs in rig.policy.outputs.items():
                assert outputs == rig.expected[room][: len(outputs)], f"room {room}"

    def finish(self) -> None:
        """Every room ends, and at the end nothing is held."""
        for _ in range(1500):
            for rig in (self.prefill, self.decode):
                rig.step()
            self.fence()
            self.resume()
            self.reserve()
            for room, (sent, reference) in list(self.pairs.items()):
                over = {
                    *self.prefill.policy.failed,
                    *self.prefill.policy.finished,
                    *self.decode.policy.failed,
                }
                if room in over:
                    self.end_pair(room)
                elif sent.state is ReqState.HANDED_OFF and reference.state is not ReqState.RESERVED:
                    self.prefill.scheduler.hand_off.park(sent)  # as a prefill worker does at once
                elif sent.state is ReqState.PARKED and reference.state is ReqState.RESERVED:
                    self.prefill.scheduler.hand_off.readmit(sent)
            self.transfer()
            idle = self.prefill.scheduler.idle and self.decode.scheduler.idle
            if idle and not self.pairs and not self.fenced:
                break
        else:
            states = {room: (str(a.state), str(b.state)) for room, (a, b) in self.pairs.items()}
            raise AssertionError(f"no end: {states}")
        self.check()
        self.decode.assert_outputs(
            *self.gone, *self.decode.policy.failed, *self.prefill.policy.finished, *self.prefill.policy.failed
        )
        for rig in (self.prefill, self.decode):
            assert rig.engine.fail_launch is not None or not rig.policy.failed, rig.policy.failed
            rig.close()


def run_seed(seed: int, moves: int) -> None:
    fuzz = Fuzz(seed)
    try:
        fuzz.run(moves)
    except BaseException as failure:
        failure.add_note(fuzz.about)
        raise


@pytest.mark.parametrize("seed", range(20))
def test_random_schedules(seed: int) -> None:
    run_seed(seed, 80)


@pytest.mark.invariants
@pytest.mark.timeout(900)
def test_random_schedules_long() -> None:
    for seed in range(1000, 1150):
        run_seed(seed, 250)
