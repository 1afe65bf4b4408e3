"""A router in several processes on one port."""

from __future__ import annotations

import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.router.conftest import ROOT, RouterProcess, router_options, start_router, wait_until
from tests.support.fake_worker import FakeWorker, expected_tokens
from tests.support.sse import SseEvent, sse_events
from wire.codec import pack_tokens
from wire.messages.rooms import Decode
from wire.records import Role

pytestmark = pytest.mark.slow
PROMPTS = range(40)
Start = Callable[[int], RouterProcess]


@pytest.fixture
def start(tmp_path: Path, model: Path) -> Iterator[Start]:
    """Starts a router in so many processes. What a failed test leaves running is ended."""
    started: list[RouterProcess] = []

    def start_processes(count: int) -> RouterProcess:
        started.append(start_router(tmp_path, model, processes=count))
        return started[-1]

    yield start_processes
    for router in started:
        if router.process.poll() is None:
            router.stop()


def children(process: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def fetch(
    router: RouterProcess, path: str, body: bytes | None = None, request_id: str = "", last_id: str = ""
) -> bytes:
    """On a connection of its own, so that the kernel chooses a process, or the supervisor for admin pages."""
    base = router.admin.base_url if path.startswith(("/debug", "/metrics")) else router.url
    request = urllib.request.Request(f"{str(base).rstrip('/')}{path}", body)
    request.add_header("Accept", "text/event-stream")
    if request_id:
        request.add_header("X-Request-Id", request_id)
    if last_id:
        request.add_header("Last-Event-ID", last_id)
    with urllib.request.urlopen(request, timeout=20) as answer:
        content: bytes = answer.read()
    return content


def ask(router: RouterProcess, prompt: int, request_id: str = "") -> list[int]:
    body = json.dumps({"input_ids": [prompt], "sampling_params": {"max_new_tokens": 3}}).encode()
    tokens: list[int] = json.loads(fetch(router, "/generate", body, request_id))["output_ids"]
    return tokens


def output_tokens(router: RouterProcess) -> float:
    found = re.search(
        rb"^baton_router_output_tokens_total\{.*\} (\S+)", fetch(router, "/metrics"), re.MULTILINE
    )
    assert found is not None
    return float(found[1])


def rooms_of_both(router: RouterProcess) -> int:
    """The rooms that /debug/leases lists; 0 unless they are of two processes."""
    rows = json.loads(fetch(router, "/debug/leases"))["leases"]
    holders = [row["holder"] for row in rows if row["what"] == "room"]
    return len(holders) if len(set(holders)) == 2 else 0


def serves(router: RouterProcess, prompts: range) -> None:
    for prompt in prompts:
        assert ask(router, prompt) == expected_tokens(pack_tokens([prompt]), 3)


def asks_until(router: RouterProcess, processes: int, worker: FakeWorker) -> None:
    """The worker has had rooms of so many processes: each has upper 32 bits of its own for all its rooms."""

    def heard() -> bool:
        ask(router, 0)
        return len(served_by(worker)) == processes

    wait_until(heard, 30.0)


def served_by(worker: FakeWorker) -> set[int]:
    """The upper 32 bits of the worker's rooms."""
    return {message.room >> 32 for message in list(worker.seen) if isinstance(message, Decode)}


def test_several_processes_share_a_port_and_the_work(start: Start, workers: list[FakeWorker]) -> None:
    router = start(2)
    workers += [FakeWorker(Role.PREFILL, router.mailbox), FakeWorker(Role.DECODE, router.mailbox)]
    decode = workers[1]
    router.wait_for_workers(2)
    serves(router, PROMPTS)
    asks_until(router, 2, decode)
    records = router.workers()
    for seen, killed in enumerate(children(router.process.pid), start=3):
        kill_and_await_successor(router, killed)
        asks_until(router, seen, decode)  # its successor serves, too
    serves(router, PROMPTS)
    assert router.workers() == records, "neither the directory nor the workers notice"
    processes = children(router.process.pid)
    assert router.stop() == 0
    assert not any(Path(f"/proc/{process}").exists() for process in processes)


def kill_and_await_successor(router: RouterProcess, killed: int) -> None:
    before = children(router.process.pid)
    os.kill(killed, signal.SIGKILL)

    def replaced() -> bool:
        now = children(router.process.pid)
        return len(now) == len(before) and killed not in now

    wait_until(replaced, 30.0)


def test_any_process_answers_for_all(start: Start, workers: list[FakeWorker]) -> None:
    router = start(3)
    decode = FakeWorker(Role.DECODE, router.mailbox)
    workers.append(decode)
    router.wait_for_workers(1)
    asked: list[str] = []

    def all_serve() -> bool:
        asked.append(f"request-{len(asked)}")
        ask(router, 0, asked[-1])
        return len(served_by(decode)) == 3

    wait_until(all_serve, 30.0)
    assert [output_tokens(router) for _ in range(12)] == [3 * len(asked)] * 12
    for request_id in asked:
        for _ in range(4):
            trace = json.loads(fetch(router, f"/debug/trace/{request_id}"))
            assert trace["otherData"]["request_id"] == request_id
    with pytest.raises(urllib.error.HTTPError, match="404"):
        fetch(router, "/debug/trace/unknown")

    before = children(router.process.pid)
    os.kill(before[0], signal.SIGKILL)

    def replaced() -> bool:
        try:
            assert output_tokens(router) == 3 * len(asked)
        except urllib.error.HTTPError as error:
            if error.code != 503:  # its end is not known yet, and it does not answer
                raise
        now = children(router.process.pid)
        return len(now) == 3 and before[0] not in now

    wait_until(replaced, 30.0)
    ask(router, 0)
    wait_until(lambda: output_tokens(router) == 3 * len(asked) + 3)
    assert router.stop() == 0


def test_any_process_goes_on_with_a_stream_of_another(start: Start, workers: list[FakeWorker]) -> None:
    """No key is configured: the processes share the one that the first has drawn."""
    router = start(2)
    decode = FakeWorker(Role.DECODE, router.mailbox)
    workers.append(decode)
    router.wait_for_workers(1)
    asks_until(router, 2, decode)
    body = json.dumps({"input_ids": [7], "sampling_params": {"max_new_tokens": 3}, "stream": True}).encode()
    whole = list(sse_events(fetch(router, "/generate", body).decode().split("\n")))
    heard_before = served_by(decode)
    decode.seen.clear()
    decode.claimable = False  # so that rooms show which process has gone on

    def both_went_on() -> bool:
        rest = list(sse_events(fetch(router, "/generate", body, last_id=whole[1].id).decode().split("\n")))
        assert [event.data for event in rest[1:]] == [whole[-1].data]
        assert rest[0].json["output_ids"] == expected_tokens(pack_tokens([7]), 3)
        return served_by(decode) == heard_before

    wait_until(both_went_on, 30.0)
    assert router.stop() == 0


def test_all_processes_end_their_streams_at_once(start: Start, workers: list[FakeWorker]) -> None:
    """Sixteen connections: the kernel gives each process some."""
    router = start(2)
    decode = FakeWorker(Role.DECODE, router.mailbox, max_context=8192, step_s=0.05)
    workers.append(decode)
    router.wait_for_workers(1)
    asks_until(router, 2, decode)
    decode.seen.clear()
    body = {"input_ids": [7], "sampling_params": {"max_new_tokens": 8000}, "stream": True}
    began = threading.Semaphore(0)

    def last_event(_: int) -> SseEvent:
        with (
            httpx.Client(base_url=router.url, timeout=20.0) as client,
            client.stream("POST", "/generate", json=body) as answer,
        ):
            events = sse_events(answer.iter_lines())
            next(events)
            began.release()
            *_, last = events
        return last

    with ThreadPoolExecutor(16) as pool:
        reading = [pool.submit(last_event, number) for number in range(16)]
        for _ in reading:
            assert began.acquire(timeout=20.0)
        assert len(served_by(decode)) == 2
        for _ in range(4):
            wait_until(lambda: rooms_of_both(router) == 16, 30.0)
        router.process.terminate()
        for one in reading:
            last = one.result(20.0)
            assert (last.kind, last.json["error"]["code"]) == ("error", "resume")
    assert router.stop() == 0


def test_what_the_processes_print_goes_to_stdout(tmp_path: Path, model: Path) -> None:
    router = start_router(tmp_path, model, processes=2, request_log="-")
    names = {f"request-{number}" for number in range(8)}
    for name in names:
        fetch(router, "/get_model_info", request_id=name)
    stdout = router.process.stdout
    assert stdout is not None
    found: set[str] = set()
    while len(found) < len(names):
        readable, _, _ = select.select([stdout], [], [], 20.0)
        assert readable, "the lines of some requests do not come"
        found |= {json.loads(line)["request_id"] for line in os.read(stdout.fileno(), 65536).splitlines()}
    assert found == names
    assert router.stop() == 0


def test_a_supervisor_has_descriptors_for_many_workers(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "options.json"
    path.write_text(json.dumps(router_options(model)))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "router", "--options", str(path), "--processes", "2"],
        stdout=subprocess.PIPE, cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard)),
    )  # fmt: skip
    with supervisor:
        assert supervisor.stdout is not None
        assert json.loads(supervisor.stdout.readline())["ready"]
        allowed, _ = resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE)
        supervisor.terminate()
    assert allowed == min(hard, 65_536)


def test_no_process_outlives_its_supervisor(start: Start) -> None:
    router = start(2)
    processes = children(router.process.pid)
    assert len(processes) == 2
    router.process.kill()
    router.stop()
    wait_until(lambda: all(state(process) == "Z" for process in processes))


def test_what_is_wrong_with_the_options_is_said_once_per_process(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "options.json"
    path.write_text(json.dumps(router_options(tmp_path / "none")))
    command = [sys.executable, "-m", "router", "--options", str(path), "--processes", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert {line.split(":")[0] for line in ended.stderr.splitlines()} == {"router"}


def state(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
