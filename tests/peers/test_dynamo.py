"""NVIDIA Dynamo's standalone indexer reads our stream: no etcd, no NATS, a process and an HTTP port.

It needs `.venv/bin/pip install ai-dynamo-runtime==1.6.1`; or BATON_PEERS_PYTHON names a Python that has it.
It knows nothing of our tree, hashes token_ids its own way, and repairs a gap when the next batch comes.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.router.conftest import wait_until
from tests.support.kv_events_reader import Chain
from tests.support.raw_publisher import LossyProxy
from tests.support.tree_worker import TreeWorker

pytestmark = pytest.mark.peers

PYTHON = os.environ.get("BATON_PEERS_PYTHON", sys.executable)
PAGE = 4
WORKER = 7


@pytest.fixture
def indexer(tmp_path: Path) -> Iterator[httpx.Client]:
    """Its HTTP API."""
    if subprocess.run([PYTHON, "-c", "import dynamo.indexer.main"], capture_output=True).returncode:
        pytest.skip(f"{PYTHON} has no ai-dynamo-runtime: .venv/bin/pip install ai-dynamo-runtime==1.6.1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (tmp_path / "indexer.log").open("w") as log:
        command = [PYTHON, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=5.0) as client:
            wait_until(lambda: answers(client), 20.0)
            yield client
    finally:
        process.kill()
        process.wait(10)


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def matched(indexer: httpx.Client, prompt: list[int]) -> int:
    """Tokens of a prompt that it believes the worker holds."""
    answer = indexer.post("/query", json={"token_ids": prompt, "model_name": "m"}).json()
    return int(answer["instances"].get(str(WORKER), {}).get("longest_matched", 0))


def blocks(indexer: httpx.Client) -> int:
    """How many it believes there are."""
    events = indexer.get("/dump").json().get("m:default", {}).get("events", [])
    return sum(len(event["event"]["data"]["stored"]["blocks"]) for event in events)


def held(worker: TreeWorker, prompt: list[int]) -> int:
    """Tokens of a prompt that the worker does hold, for everybody."""
    pages, chain = worker.public_pages(), Chain("model", "", "")
    length = 0
    while length + PAGE <= len(prompt) and chain.add(tuple(prompt[length : length + PAGE])) in pages:
        length += PAGE
    return length


@pytest.mark.parametrize("buffer", [10_000, 4], ids=["replay", "snapshot"])
def test_dynamo_reads_our_stream_without_loss(indexer: httpx.Client, buffer: int) -> None:
    rng = random.Random(buffer)
    prompts: list[list[int]] = []

    def turns(worker: TreeWorker, count: int) -> None:
        for turn in range(count):
            shared = rng.choice(prompts)[: rng.randrange(20)] if prompts else []
            prompts.append([*shared, *(rng.randrange(1000) for _ in range(rng.randrange(4, 40)))])
            worker.put(prompts[-1])
            worker.put([7, *prompts[-1]], "ada")  # on the stream of private pages, which it does not read
            if turn % 4 == 3:
                worker.evict(60)

    def agree(worker: TreeWorker) -> None:
        """Once more something is published, which shows it what it lacks."""
        deadline = time.monotonic() + 20.0
        while [matched(indexer, p) for p in prompts] != [held(worker, p) for p in prompts]:
            assert time.monotonic() < deadline, "Dynamo believes something else"
            turns(worker, 1)
            time.sleep(0.1)  # between batches, not instead of an event: it tells nobody when it has read one
        wait_until(lambda: blocks(indexer) == len(worker.public_pages()))

    with TreeWorker(buffer) as worker, LossyProxy(worker.addresses["events"], 0.0, 1) as proxy:
        turns(worker, 10)
        addresses = {"endpoint": proxy.address, "replay_endpoint": worker.addresses["replay"]}
        joined = indexer.post(
            "/register", json={"instance_id": WORKER, "model_name": "m", "block_size": PAGE, **addresses}
        )
        assert joined.status_code == 201, joined.text
        agree(worker)
        proxy.loss = 1.0
        turns(worker, 12)
        wait_until(lambda: proxy.lost > 0)
        proxy.loss = 0.0
        agree(worker)
        assert bool(worker.publisher.public.snapshots) == (buffer == 4)
        assert any(0 < held(worker, prompt) < len(prompt) // PAGE * PAGE for prompt in prompts)
