"""`baton top` against running routers and workers."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

from tests.harness.local_stack import stack
from tests.harness.processes import Child

ROOT = Path(__file__).parents[2]
BOUND_S = 30.0


def top(*arguments: str) -> list[list[str]]:
    """The words of each line of one frame."""
    done = subprocess.run(
        [sys.executable, "-m", "cluster.cli", "top", "--once", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env=dict(os.environ),
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [line.split() for line in done.stdout.splitlines()]


def test_one_frame_shows_both_routers_and_all_workers(tiny_model: Path, tmp_path: Path) -> None:
    with stack(
        tiny_model, tmp_path, decode=2, router={"prefill_on_decode_tokens": 0}, engine="fake",
        page_size=8, max_total_tokens=2048, rack="r7",
    ) as running:  # fmt: skip
        second = {"model": str(tiny_model), "served_model_name": "m", "port": 0, "admin_ports": "0",
                  "directory": running.directory.ready["mailbox"]}  # fmt: skip
        with Child("router", second, tmp_path) as other:
            other.wait_ready()
            for last in (1, 2):
                running.generate([*range(32), *[last] * 16], 9)
            running.settle()
            lines = top("--url", running.router.ready["admin"])
            assert {line[0] for line in top("--url", other.ready["admin"])} == {line[0] for line in lines}
    said = {line[0]: line[1:] for line in lines if line}
    assert said["routers"] == ["2", "answer"]
    assert said["workers"] == ["1", "prefill,", "2", "decode"]
    assert said["hit"][:2] == ["rate", f"{32 / 96:.1%}"]
    # Where it came from is in the workers' next heartbeat.
    assert said["hit"][2:] in ([], ["100%", "from", "device"])
    for worker in running.workers:
        assert worker.ready["id"] in said
    assert all(word.endswith("s") for word in said["TTFT"][-3:])
    assert all(word.endswith("s") for word in said["ITL"][-3:])
    assert said["transfer"][1] == "host"
    assert float(said["transfer"][2]) > 0
    assert said["errors"] == ["0", "restarts"]


def test_frames_follow_until_it_is_interrupted(tiny_model: Path, tmp_path: Path) -> None:
    with stack(tiny_model, tmp_path, engine="fake", page_size=8, max_total_tokens=2048) as running:
        ours, theirs = pty.openpty()
        command = ["-m", "cluster.cli", "top", "--interval", "0.2", "--url", running.router.ready["admin"]]
        process = subprocess.Popen(
            [sys.executable, *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=ROOT,
            env={**os.environ, "COLUMNS": "140", "LINES": "40"},
        )
        os.close(theirs)
        try:
            seen = b""
            while seen.count(b"figures") < 3:  # frames
                assert select.select([ours], [], [], BOUND_S)[0], seen
                seen += os.read(ours, 1 << 16)
            process.send_signal(signal.SIGINT)
            while select.select([ours], [], [], BOUND_S)[0]:
                try:
                    os.read(ours, 1 << 16)
                except OSError:  # its end of the terminal is closed
                    break
            assert process.wait(BOUND_S) == 0
        finally:
            process.kill()
            process.wait(BOUND_S)
            os.close(ours)
    for worker in running.workers:
        assert worker.ready["id"].encode() in seen


def test_a_router_that_is_not_there_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cluster.cli", "top", "--once", "--url", "http://127.0.0.1:9"],
        capture_output=True, text=True, timeout=60, cwd=ROOT, env=dict(os.environ),
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("baton: --url: nothing answers at http://127.0.0.1:9")
