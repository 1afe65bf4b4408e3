"""Bench: keeps the stack that the last scenario left, for the next one of its kind."""

from __future__ import annotations

import shutil
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.chaos.judge import Outcome
from tests.chaos.matrix import Cell
from tests.chaos.network import Network
from tests.chaos.questions import Questions, learn
from tests.chaos.scenario import Scenario
from tests.chaos.stack import ChaosStack, StackOptions, chaos_stack
from tests.chaos.states import STATES
from tests.support.tiny_models import make_tiny

_WORKER: dict[str, Any] = {
    "max_total_tokens": 2048,
    "chunked_prefill_size": 48,
    "max_running_requests": 8,
    "announce_interval_s": 0.5,
    "resume_grace_s": 5.0,  # no room of a router that was killed is left when a scenario is judged
}
_ENGINES: dict[str, dict[str, Any]] = {
    "fake": {"engine": "fake"},
    "tiny": {"dtype": "float32", "threads": 1, "overlap_depth": 1},
}
_DECODE: dict[bool, dict[str, Any]] = {
    False: {"max_total_tokens": 1024},
    True: {"max_total_tokens": 512, "decode_reserve_tokens": 0},  # scarce: what is admitted cannot all grow
}
_ROUTER: dict[str, Any] = {
    "prefill_on_decode_tokens": 0,
    "resume_key": "shared by both routers",
    "max_queued": 0,  # rooms wait at the workers, where the states are
}


class Bench:
    """Plays cells one after the other. Use it as a context manager."""

    def __init__(self, files: Path, seed: int) -> None:
        self._files = files
        self._seed = seed
        self._kind: tuple[str, str, bool] | None = None
        self._owned = ExitStack()
        self._stacks = 0
        self._disturbed_before: Counter[str] = Counter()
        self._stack: ChaosStack
        self._questions: Questions

    def play(self, cell: Cell, number: int) -> Outcome:
        """Play a cell, on a stack that is built now if the last one was of another kind.

        A scenario that breaks the stack is counted as lost, and the next one gets a new stack.
        """
        stack, questions = self.stack_of(cell.transport, cell.engine, STATES[cell.state].scarce)
        scenario = Scenario(cell, number, self._seed, stack, questions)
        try:
            outcome = scenario.run()
        except (TimeoutError, RuntimeError) as error:
            outcome = scenario.outcome
            outcome.count("broken", str(error))
            self.close()
        return outcome

    @property
    def disturbed(self) -> Counter[str]:
        """Messages by the role of their sender: of the stacks that are closed and of the one that runs."""
        now = self._stack.network.faults.disturbed if self._kind is not None else Counter[str]()
        return self._disturbed_before + now

    def stack_of(self, transport: str, engine: str, scarce: bool) -> tuple[ChaosStack, Questions]:
        """The stack of that kind, with what can be asked of it."""
        kind = (transport, engine, scarce)
        if kind != self._kind:
            self.close()
            self._build(*kind)
            self._kind = kind
        return self._stack, self._questions

    def close(self) -> None:
        """End the stack, if there is one."""
        if self._kind is not None:
            self._disturbed_before += self._stack.network.faults.disturbed
            self._kind = None
        self._owned.close()

    def _build(self, transport: str, engine: str, scarce: bool) -> None:
        self._stacks += 1
        files = self._files / f"stack{self._stacks}"
        files.mkdir()
        self._owned.callback(shutil.rmtree, files, ignore_errors=True)
        model = make_tiny("qwen3", self._files, 1)
        worker = {**_WORKER, **_ENGINES[engine], "kv_transfer_backend": transport}
        options = StackOptions(model, worker, _DECODE[scarce], _ROUTER)
        network = self._owned.enter_context(Network(self._seed))
        self._stack = self._owned.enter_context(chaos_stack(options, network, files))
        self._questions = learn(self._stack, engine, self._seed)
        self._stack.take_baseline()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
