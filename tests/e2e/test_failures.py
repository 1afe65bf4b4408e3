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
from tests.harness.local_stack import Stack, stack, wait_for_workers
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
ROUTER: dict[str, Any] = {"prefill_on_decode_tokens": 0, "max_queued": 0}


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randrange(20, 120))] for _ in range(count)]


def kill(child: Child) -> None:
    child.kill()


def go_on(child: Child) -> None:
    child.process.send_signal(signal.SIGCONT)


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


def test_pages_that_a_stopped_writer_was_granted_are_quarantined(tiny_model: Path, tmp_path: Path) -> None:
    """Prefill is stopped in a write. Until the write is over, or prefill is killed, the pages stay unused.

    Decode serves alone meanwhile, from a pool so small that it would reuse pages that are free. The late
    write would then show in an answer.
    """
    flag = tmp_path / "stop"
    options = {**OPTIONS, "max_total_tokens": 768}
    runner = ("tests.support.stops_in_write", str(flag))
    with stack(tiny_model, tmp_path, 1, 1, ROUTER, runner, **options) as running:
        (prefill,), (decode,) = running.prefill, running.decode
        for seed, end in ((3, go_on), (4, kill)):
            prompt, *others = prompts(13, seed)
            running.settle()
            wait_for_workers(running, 2)
            flag.touch()
            try:
                assert_right(running, [prompt])
                assert not flag.exists(), "nothing was written"
                pages = -(-len(prompt) // 16)
                assert running.inspect(decode, "memory")["quarantined_pages"] == pages
                assert_right(running, others)
                assert running.inspect(decode, "memory")["quarantined_pages"] == pages
                with ThreadPoolExecutor(1) as pool:
                    asking = pool.submit(assert_right, running, [other[::-1] for other in others])
                    wait_until_busy(running)
                    end(prefill)
                    asking.result(60.0)
            finally:
                go_on(prefill)
        running.prefill.clear()
        running.settle()


def assert_right(running: Stack, asked: list[list[int]]) -> None:
    answers = running.generate_all(asked, OUTPUT_TOKENS)
    assert [answer["output_ids"] for answer in answers] == [
        fake_generate(prompt, OUTPUT_TOKENS) for prompt in asked
    ]


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
