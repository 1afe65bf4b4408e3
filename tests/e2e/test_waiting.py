"""What was accepted is never lost: in a queue, without a worker, between workers that are cut off."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from engine.fake import fake_generate
from tests.chaos.network import Network
from tests.e2e.test_failures import prompts, wait_until_busy
from tests.harness.local_stack import Stack, stack
from tests.harness.processes import Child

OUTPUT_TOKENS = 40
ROUTER: dict[str, Any] = {
    "prefill_on_decode_tokens": 0, "max_queued": 0, "silence_s": 0.2, "receipt_timeout_s": 2.0,
}  # fmt: skip
OPTIONS: dict[str, Any] = {
    "engine": "fake", "fake_step_s": 0.02, "max_total_tokens": 4096, "hand_off_timeout_s": 2.0,
}  # fmt: skip


def restarts(running: Stack) -> str:
    metrics = running.admin.get("/metrics").text
    return next(line for line in metrics.splitlines() if line.startswith("baton_router_restarts_total"))


def stages(running: Stack) -> set[str]:
    """What workers have said about rooms that are silent."""
    rooms = running.admin.get("/debug/rooms").json()["rooms"]
    return {worker["stage"] for room in rooms for worker in room["workers"]} - {""}


def test_streams_wait_for_a_slow_decode_worker_of_two_rows_longer_than_any_timer(
    tiny_model: Path, tmp_path: Path
) -> None:
    asked = prompts(24, seed=5)
    with stack(tiny_model, tmp_path, 1, 1, ROUTER, max_running_requests=2, **OPTIONS) as running:
        began, seen = time.monotonic(), set()
        with ThreadPoolExecutor(len(asked)) as pool:
            futures = [pool.submit(running.generate, prompt, OUTPUT_TOKENS) for prompt in asked]
            while not all(future.done() for future in futures):
                seen |= stages(running)
                time.sleep(0.1)
            answers = [future.result() for future in futures]
        took_s = time.monotonic() - began
        assert [answer["output_ids"] for answer in answers] == [
            fake_generate(prompt, OUTPUT_TOKENS) for prompt in asked
        ]
        assert took_s > 3 * OPTIONS["hand_off_timeout_s"], "no room waited longer than the timers"
        assert restarts(running).endswith(" 0.0")
        assert "decode_bootstrap" in seen, "the router knows where its rooms wait"
        running.settle()


def test_a_cut_between_the_only_pair_leaves_decode_to_serve_alone(tiny_model: Path, tmp_path: Path) -> None:
    """Neither is suspected: the router hears both, and each of them blames the other."""
    options = {**OPTIONS, "kv_transfer_backend": "tcp", "hand_off_timeout_s": 60.0}
    asked = prompts(12, seed=6)
    with Network() as network:
        runner = ("tests.chaos.launcher", network.address)
        with stack(tiny_model, tmp_path, 1, 1, ROUTER, runner, **options) as running:
            (prefill,), (decode,) = running.prefill, running.decode
            with ThreadPoolExecutor(len(asked)) as pool:
                futures = [pool.submit(running.generate, prompt, OUTPUT_TOKENS) for prompt in asked[:6]]
                wait_until_busy(running)
                network.faults.cut(f"P/{prefill.process.pid}", f"D/{decode.process.pid}")
                futures += [pool.submit(running.generate, prompt, OUTPUT_TOKENS) for prompt in asked[6:]]
                answers = [future.result(60.0) for future in futures]
            assert [answer["output_ids"] for answer in answers] == [
                fake_generate(prompt, OUTPUT_TOKENS) for prompt in asked
            ]
            page = running.admin.get("/debug/suspicions").json()
            assert page["suspicions"] == []
            assert (prefill.ready["id"], decode.ready["id"]) in {
                (one["prefill"], one["decode"]) for one in page["broken_pairs"]
            }
            metrics = running.admin.get("/metrics").text
            counted = [line for line in metrics.splitlines() if "restart_causes_total{" in line]
            causes = {line.split('"')[1] for line in counted if float(line.rpartition(" ")[2])}
            assert causes == {"link"}
            network.faults.heal()
            running.settle()


def test_every_stream_ends_complete_after_the_only_pair_was_killed_and_replaced(
    tiny_model: Path, tmp_path: Path
) -> None:
    asked = prompts(8, seed=7)
    with stack(tiny_model, tmp_path, 1, 1, ROUTER, **OPTIONS) as running, ExitStack() as replacements:
        options = {
            "model": str(tiny_model), "served_model_name": "m",
            "directory": running.directory.ready["mailbox"], **OPTIONS,
        }  # fmt: skip
        with ThreadPoolExecutor(len(asked)) as pool:
            futures = [pool.submit(running.generate, prompt, OUTPUT_TOKENS) for prompt in asked]
            wait_until_busy(running)
            for role, children in (("prefill_node", running.prefill), ("decode_node", running.decode)):
                children.pop().kill()
                children.append(replacements.enter_context(Child(role, options, tmp_path)))
            for child in running.workers:
                child.wait_ready()
            answers = [future.result(100.0) for future in futures]
        assert [answer["output_ids"] for answer in answers] == [
            fake_generate(prompt, OUTPUT_TOKENS) for prompt in asked
        ]
        assert not restarts(running).endswith(" 0.0")
        running.settle()
