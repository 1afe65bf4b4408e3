"""Who is there, when workers, routers and the directory end and start again."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import httpx

from engine.fake import fake_generate
from tests.e2e.ray_cluster import free_ports
from tests.harness.local_stack import Stack, stack, wait_for_workers
from tests.harness.processes import Child
from tests.router.conftest import wait_until

OPTIONS: dict[str, Any] = {"engine": "fake", "max_total_tokens": 1024, "worker_id": "d0"}
PROMPT = [1, 2, 3]


def incarnations(running: Stack) -> list[tuple[int, str]]:
    records = running.admin.get("/debug/workers").json()["workers"]
    return [(record["incarnation"], record["mailbox"]) for record in records]


def test_a_process_that_was_stopped_and_replaced_ends_when_it_wakes_up(
    tiny_model: Path, tmp_path: Path
) -> None:
    with stack(tiny_model, tmp_path, prefill=0, decode=1, **OPTIONS) as running:
        zombie = running.decode.pop()
        ((first, _),) = incarnations(running)
        zombie.process.send_signal(signal.SIGSTOP)
        try:
            options = {**OPTIONS, **common(running, tiny_model)}
            successor = Child("decode_node", options, tmp_path)
            running.decode.append(successor)
            with successor:
                successor.wait_ready()
                wait_until(lambda: incarnations(running) == [(first + 1, successor.ready["mailbox"])], 30.0)
                zombie.process.send_signal(signal.SIGCONT)
                assert zombie.process.wait(60.0) == 1
                assert "another process has joined as d0" in zombie.log.read_text()
                assert incarnations(running) == [(first + 1, successor.ready["mailbox"])]
                assert running.generate(PROMPT, 8)["output_ids"] == fake_generate(PROMPT, 8)
        finally:
            zombie.kill()


def test_a_router_that_is_killed_leaves_directory_and_workers_alone(tiny_model: Path, tmp_path: Path) -> None:
    with stack(tiny_model, tmp_path, prefill=0, decode=1, **OPTIONS) as running:
        before = incarnations(running)
        running.router.kill()
        options = {**common(running, tiny_model), "port": 0, "admin_ports": "0"}
        with Child("router", options, tmp_path) as successor:
            running.router = successor
            ready = successor.wait_ready()
            with (
                httpx.Client(base_url=ready["http"], timeout=60.0) as running.http,
                httpx.Client(base_url=ready["admin"], timeout=60.0) as running.admin,
            ):
                wait_for_workers(running, 1)
                assert incarnations(running) == before
                assert running.generate(PROMPT, 8)["output_ids"] == fake_generate(PROMPT, 8)


def test_a_directory_that_is_killed_and_started_again_on_its_port_changes_nothing(
    tiny_model: Path, tmp_path: Path
) -> None:
    leased = {"port": free_ports(1)[0], "lease_s": 3.0}
    with stack(
        tiny_model, tmp_path, 0, 1, {"lease_s": 3.0}, directory_port=leased["port"], **OPTIONS
    ) as running:
        before = incarnations(running)
        running.directory.kill()
        with (
            Child("router.directory", leased, tmp_path) as second,
            Child(
                "decode_node", {**OPTIONS, **common(running, tiny_model), "worker_id": "d1"}, tmp_path
            ) as late,
        ):
            assert second.wait_ready() == running.directory.ready
            assert running.generate(PROMPT, 8)["output_ids"] == fake_generate(PROMPT, 8)
            late.wait_ready()
            wait_for_workers(running, 2)
            first, new = incarnations(running)
            assert first == before[0]
            assert new[0] > first[0], "numbers go on above those of the earlier directory"
            late.ask_to_end()


def common(running: Stack, model: Path) -> dict[str, Any]:
    return {"model": str(model), "served_model_name": "m", "directory": running.directory.ready["mailbox"]}
