"""A router in several processes on one port."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from pathlib import Path

from tests.router.conftest import RouterProcess, start_router, wait_until
from tests.support.fake_worker import FakeWorker, expected_tokens
from wire.codec import pack_tokens
from wire.messages import Decode
from wire.records import Role

PROMPTS = range(40)


def children(process: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def ask(router: RouterProcess, prompt: int) -> list[int]:
    """On a connection of its own, so that the kernel chooses a process."""
    body = json.dumps({"input_ids": [prompt], "sampling_params": {"max_new_tokens": 3}}).encode()
    with urllib.request.urlopen(f"{router.url}/generate", body, timeout=20) as answer:
        tokens: list[int] = json.load(answer)["output_ids"]
    return tokens


def serves(router: RouterProcess, prompts: range) -> None:
    for prompt in prompts:
        assert ask(router, prompt) == expected_tokens(pack_tokens([prompt]), 3)


def asks_until(router: RouterProcess, processes: int, worker: FakeWorker) -> None:
    """The worker has heard of so many processes: each gives all its rooms an upper half of its own."""

    def heard() -> bool:
        ask(router, 0)
        rooms = [message.room for message in list(worker.seen) if isinstance(message, Decode)]
        return len({room >> 32 for room in rooms}) == processes

    wait_until(heard, 30.0)


def test_several_processes_share_a_port_and_the_work(
    tmp_path: Path, model: Path, workers: list[FakeWorker]
) -> None:
    router = start_router(tmp_path, model, processes=2)
    workers += [FakeWorker(Role.PREFILL, router.mailbox), FakeWorker(Role.DECODE, router.mailbox)]
    decode = workers[1]
    router.wait_for_workers(2)
    serves(router, PROMPTS)
    asks_until(router, 2, decode)
    (sibling,) = children(router.process.pid)

    os.kill(sibling, signal.SIGKILL)
    wait_until(lambda: children(router.process.pid) not in ([sibling], []), 30.0)
    asks_until(router, 3, decode)
    serves(router, PROMPTS)
    (sibling,) = children(router.process.pid)
    assert router.stop() == 0
    assert not Path(f"/proc/{sibling}").exists()


def test_no_sibling_outlives_a_router_that_is_killed(tmp_path: Path, model: Path) -> None:
    router = start_router(tmp_path, model, processes=2)
    (sibling,) = children(router.process.pid)
    router.process.kill()
    router.stop()
    wait_until(lambda: not Path(f"/proc/{sibling}").exists() or "Z" in state(sibling))


def state(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
