"""Law number one holds whatever fails in between: workers that die, stop, or leave in mid-stream."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine.fake import fake_generate
from tests.harness.local_stack import Stack, stack
from tests.harness.processes import Child
from wire.mailbox import Mailbox

OUTPUT_TOKENS = 60
OPTIONS: dict[str, Any] = {
    "engine": "fake",
    "fake_step_s": 0.01,
    "max_total_tokens": 4096,
    "chunked_prefill_size": 48,
    "hand_off_timeout_s": 10.0,
}
ROUTER: dict[str, Any] = {
    "prefill_on_decode_tokens": 0,
    "token_timeout_s": 3.0,
    "first_token_timeout_s": 10.0,
}


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randrange(20, 120))] for _ in range(count)]


def kill(child: Child) -> None:
    child.kill()


def leave(child: Child) -> None:
    child.process.send_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("role", "how"),
    [
        ("prefill", kill),
        ("decode", leave),
        pytest.param("prefill", leave, marks=pytest.mark.invariants),
        pytest.param("decode", kill, marks=pytest.mark.invariants),
    ],
)
def test_a_worker_that_goes_in_mid_stream_loses_doubles_and_contradicts_nothing(
    tiny_model: Path, tmp_path: Path, role: str, how: Callable[[Child], None]
) -> None:
    asked = prompts(16, seed=7)
    with stack(tiny_model, tmp_path, prefill=2, decode=2, router=ROUTER, **OPTIONS) as running:
        with ThreadPoolExecutor(len(asked)) as pool:
            futures: list[Future[dict[str, Any]]] = [
                pool.submit(running.generate, prompt, OUTPUT_TOKENS) for prompt in asked
            ]
            busy = wait_until_busy(running)
            victim = running.prefill.pop(0) if role == "prefill" else take(running.decode, busy)
            how(victim)
            answers = [future.result(60.0) for future in futures]
        assert [answer["output_ids"] for answer in answers] == [
            fake_generate(prompt, OUTPUT_TOKENS) for prompt in asked
        ]
        running.settle()


def wait_until_busy(running: Stack, rooms: int = 2) -> Child:
    """A decode worker on which at least so many rooms decode now."""
    deadline = time.monotonic() + 20.0
    while True:
        for child in running.decode:
            if running.inspect(child, "load")["running_requests"] >= rooms:
                return child
        assert time.monotonic() < deadline, "nothing ever ran"


def take(children: list[Child], one: Child) -> Child:
    """It belongs to the stack no longer: whoever takes it ends it."""
    children.remove(one)
    return one


def test_a_stopped_prefill_worker_holds_decode_pages_in_quarantine_until_it_is_gone(
    tiny_model: Path, tmp_path: Path
) -> None:
    """SIGSTOP is not death: its writes could still land, so decode must not reuse what it was offered."""
    with stack(tiny_model, tmp_path, prefill=1, decode=1, router=ROUTER, **OPTIONS) as running:
        (prompt,) = prompts(1, seed=3)
        running.generate(prompt, 4)
        running.settle()
        prefill = running.prefill.pop()
        prefill.process.send_signal(signal.SIGSTOP)
        try:
            answer = running.generate(prompt[::-1], OUTPUT_TOKENS)  # decode ends up doing it alone
            assert answer["output_ids"] == fake_generate(prompt[::-1], OUTPUT_TOKENS)
        finally:
            prefill.process.send_signal(signal.SIGCONT)
            prefill.kill()
        running.settle()


def test_a_client_that_leaves_frees_both_sides(tiny_model: Path, tmp_path: Path) -> None:
    slow = {**OPTIONS, "fake_step_s": 0.05}
    with stack(tiny_model, tmp_path, prefill=1, decode=1, router=ROUTER, **slow) as running:
        started = threading.Event()

        def impatient(prompt: list[int]) -> None:
            body = {"model": "m", "prompt": prompt, "max_tokens": 1000, "stream": True, "ignore_eos": True}
            with running.http.stream("POST", "/v1/completions", json=body) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        started.set()
                        return

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(impatient, prompts(4, seed=5)))
        assert started.is_set()
        running.settle()


def test_a_worker_told_to_leave_while_it_joins_leaves_at_once(tiny_model: Path, tmp_path: Path) -> None:
    with Mailbox() as silent_directory:
        options = {"model": str(tiny_model), "directory": silent_directory.address, "max_total_tokens": 1024}
        with Child("prefill_node", {**options, "engine": "fake"}, tmp_path) as child:
            assert silent_directory.wait(60.0), "it does not even try to join"
            child.process.terminate()
            assert child.process.wait(10.0) == 0
