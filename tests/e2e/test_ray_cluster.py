"""2 prefill + 2 decode workers on a real Ray cluster, through its life: chats, a crowd, a client that leaves,
decode scaled up and down under load; and nothing held or left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import pytest

from tests.e2e.ray_cluster import ROOT, RayCluster, free_ports, ray_cluster
from tests.e2e.served import Served, served
from tests.harness.leftovers import Run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

MODEL = ROOT / "deploy" / "demo_model"
START_S = 180.0
SCALE_S = 120.0
LEASE_S = 3.0
POLL_S = 0.2
STREAM_TOKENS = 200
TOPICS = (
    "os.path.join",
    "json.dumps",
    "re.sub",
    "itertools.chain",
    "math.sqrt",
    "str.split",
    "heapq",
    "glob",
)


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").exists()


def _config(port: int, admin_ports: str, decode: int) -> dict[str, object]:
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": "baton",
                "route_prefix": "/",
                "import_path": "cluster.app:build",
                "args": {
                    "model": str(MODEL),
                    "router": {"options": {"admin_ports": admin_ports}},
                    "worker": {"page_size": 16, "max_total_tokens": 16384, "threads": 1},
                },
                "deployments": [
                    {"name": "prefill", "num_replicas": 2},
                    {"name": "decode", "num_replicas": decode},
                ],
            }
        ],
    }


class Scene:
    """The cluster, the application on it and the clients."""

    def __init__(self, run: Run, cluster: RayCluster, client: Served, port: int) -> None:
        self.run = run
        self.cluster = cluster
        self.client = client
        self.port = port

    def decode_replicas(self, count: int, timeout_s: float = SCALE_S) -> None:
        """A config update; returns when exactly these replicas run and the router sees them."""
        self.cluster.deploy(_config(self.port, self.client.admin.option, count))
        self.cluster.wait_for({"router": 1, "prefill": 2, "decode": count}, timeout_s)
        self.client.wait_for_workers(2 + count)

    def processes(self, name: str) -> list[int]:
        """Ids of the cluster's live processes that call themselves so."""
        self.run.look()
        return [pid for pid, called in self.run.processes.items() if name in called and _alive(pid)]

    def wait_until_all_decode(self) -> None:
        """Until every decode worker has been seen with rooms of its own."""
        deadline = time.monotonic() + SCALE_S
        idle = {worker["id"] for worker in self.client.workers() if worker["role"] == "decode"}
        while idle:
            assert time.monotonic() < deadline, f"{idle} have had nothing to do"
            for worker in self.client.workers():
                if worker["id"] in idle and self.client.inspect(worker, "rooms"):
                    idle.remove(worker["id"])

    def ask(self, question: str, **options: Any) -> Any:
        """A chat with the official client."""
        return self.client.openai.chat.completions.create(
            model="demo_model", messages=[{"role": "user", "content": question}], temperature=0, **options
        )


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    port, admin_port = free_ports(2)
    run = Run.begin()
    with (
        ray_cluster(tmp_path_factory.mktemp("ray"), run) as cluster,
        served(f"http://127.0.0.1:{port}", admin_port) as client,
    ):
        scene = Scene(run, cluster, client, port)
        scene.decode_replicas(2, START_S)
        yield scene


@pytest.fixture(autouse=True)
def _balanced(scene: Scene) -> Iterator[None]:
    yield
    scene.client.settle()


def test_the_official_client_streams_and_does_not(scene: Scene) -> None:
    question = "What does os.path.join do? Please explain it in one sentence."
    whole = scene.ask(question, max_tokens=32)
    text = ""
    usage = None
    stream = scene.ask(question, max_tokens=32, stream=True, stream_options={"include_usage": True})
    for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_a_repeat_comes_from_the_cache(scene: Scene) -> None:
    question = "Tell me what json.loads does, and please be as brief as you possibly can be about it."
    first = scene.ask(question, max_tokens=16)
    again = scene.ask(question, max_tokens=16)
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    assert again.choices[0].message.content == first.choices[0].message.content


def test_64_chats_at_once_with_shared_prefixes(scene: Scene) -> None:
    together = Barrier(64)

    def one(number: int) -> Any:
        topic = TOPICS[number % len(TOPICS)]
        together.wait(30)
        return scene.ask(f"I am new to Python. Explain what {topic} does, example {number}.", max_tokens=16)

    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(one, range(64)))
    assert all(answer.choices[0].finish_reason in {"stop", "length"} for answer in answers)
    assert all(answer.usage.completion_tokens > 0 for answer in answers)
    decoders = {
        scene.client.admin.get(f"/debug/trace/{answer._request_id}").json()["otherData"]["decode"]
        for answer in answers
    }
    assert len(decoders) == 2


def test_a_client_that_leaves_frees_both_sides(scene: Scene) -> None:
    stream = _endless(scene, "Count as far as you can.")
    for _, _chunk in zip(range(3), stream, strict=False):
        pass
    holding = [worker for worker in scene.client.workers() if scene.client.inspect(worker, "rooms")]
    assert holding
    stream.close()
    scene.client.settle()


def test_decode_scales_up_and_down_under_16_streams(scene: Scene) -> None:
    before = {worker["id"] for worker in scene.client.workers()}
    stop = Event()
    with ThreadPoolExecutor(16) as pool:
        streams = [pool.submit(_stream_until, scene, stop, number) for number in range(16)]
        try:
            scene.decode_replicas(3)
            scene.wait_until_all_decode()  # so that whichever is taken away has streams to finish
            scene.decode_replicas(2)
        finally:
            stop.set()
        lengths = _results(streams)
    assert all(lengths), "a stream has run no request"
    assert {length for one in lengths for length in one} == {STREAM_TOKENS}
    assert len(scene.client.workers()) == len(before)


def _stream_until(scene: Scene, stop: Event, number: int) -> list[int]:
    """Streams, one after the other, until told to stop; the lengths of what came, each a whole answer."""
    lengths = []
    while not stop.is_set():
        finish, usage = None, None
        for chunk in _endless(scene, f"Stream {number}, request {len(lengths)}: tell me a long story."):
            for choice in chunk.choices:
                finish = choice.finish_reason or finish
            usage = chunk.usage or usage
        assert finish == "length"
        assert usage is not None
        lengths.append(usage.completion_tokens)
    return lengths


def _endless(scene: Scene, question: str) -> Any:
    return scene.ask(
        question,
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=STREAM_TOKENS,
        extra_body={"ignore_eos": True},
    )


def _results(futures: list[Future[list[int]]]) -> list[list[int]]:
    return [future.result(120) for future in futures]


def test_a_directory_that_dies_loses_nothing(scene: Scene) -> None:
    known = {worker["id"] for worker in scene.client.workers()}
    (process,) = scene.processes("DirectoryActor")
    os.kill(process, signal.SIGKILL)
    deadline = time.monotonic() + 3 * LEASE_S
    while time.monotonic() < deadline:  # long enough for every lease of a directory that stays away to end
        assert {worker["id"] for worker in scene.client.workers()} == known
        assert scene.ask("What does math.sqrt do?", max_tokens=4).usage.completion_tokens > 0
    (again,) = scene.processes("DirectoryActor")
    assert again != process


def test_a_killed_decode_worker_is_replaced_and_loses_no_stream(scene: Scene) -> None:
    before = {worker["id"] for worker in scene.client.workers()}
    stop = Event()
    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(_stream_until, scene, stop, number) for number in range(4)]
        try:
            scene.wait_until_all_decode()
            victim = next(worker for worker in scene.client.workers() if worker["role"] == "decode")
            os.kill(victim["pid"], signal.SIGKILL)
            deadline = time.monotonic() + SCALE_S
            while len(now := {worker["id"] for worker in scene.client.workers()} - {victim["id"]}) < len(
                before
            ):
                assert time.monotonic() < deadline, f"{victim['id']} was not replaced: {now}"
                time.sleep(POLL_S)
        finally:
            stop.set()
        lengths = _results(streams)
    assert {length for one in lengths for length in one} == {STREAM_TOKENS}
