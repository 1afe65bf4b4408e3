"""Two processes claim one worker id: the one that joined last is the worker, the other ends."""

from __future__ import annotations

import signal
from pathlib import Path

from engine.fake import fake_generate
from tests.harness.local_stack import Stack, stack
from tests.harness.processes import Child
from tests.router.conftest import wait_until

OPTIONS = {"engine": "fake", "max_total_tokens": 1024, "worker_id": "d0"}
PROMPT = [1, 2, 3]


def incarnations(running: Stack) -> list[tuple[int, str]]:
    records = running.http.get("/debug/workers").json()["workers"]
    return [(record["incarnation"], record["mailbox"]) for record in records]


def test_a_process_that_was_stopped_and_replaced_ends_when_it_wakes_up(
    tiny_model: Path, tmp_path: Path
) -> None:
    with stack(tiny_model, tmp_path, prefill=0, decode=1, **OPTIONS) as running:
        zombie = running.decode.pop()
        ((first, _),) = incarnations(running)
        zombie.process.send_signal(signal.SIGSTOP)
        try:
            options = {"model": str(tiny_model), "served_model_name": "m", **OPTIONS}
            successor = Child("decode_node", {**options, "directory": directory_of(running)}, tmp_path)
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


def directory_of(running: Stack) -> str:
    return str(running.router.ready["mailbox"])
