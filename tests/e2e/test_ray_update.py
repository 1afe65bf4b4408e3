"""`serve deploy` of other weights under the same name, on a real Ray cluster and under load: Serve starts new
replicas before it stops old ones; an update that cannot start leaves the old version serving."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from tests.e2e.ray_cluster import RayCluster, free_ports, ray_cluster
from tests.e2e.served import Served, served
from tests.harness.leftovers import Run
from tests.support.reference import reference_greedy
from tests.support.tiny_models import make_tiny

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PROMPTS = [[7, 3, 200, 41 + number] * 6 for number in range(3)]
TOKENS = 24
START_S = 240.0


def _config(port: int, admin_ports: str, model: Path) -> dict[str, object]:
    surging = {"num_cpus": 0.1, "max_surge_percent": 100, "drain_s": 20}
    args = {
        "model": str(model), "served_model_name": "m",
        "worker": {"dtype": "float32", "page_size": 16, "max_total_tokens": 4096, "threads": 1},
        "router": {**surging, "options": {"admin_ports": admin_ports}},
        "prefill": surging, "decode": surging,
    }  # fmt: skip
    application = {
        "name": "baton", "route_prefix": "/", "import_path": "cluster.app:build", "args": args,
    }  # fmt: skip
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [application],
    }


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RayCluster, Served, int]]:
    port, admin_port = free_ports(2)
    run = Run.begin()
    with (
        ray_cluster(tmp_path_factory.mktemp("ray"), run) as cluster,
        served(f"http://127.0.0.1:{port}", admin_port) as client,
    ):
        yield cluster, client, port


def _answers(client: Served, stop: Event, prompt: list[int]) -> list[list[int]]:
    """Requests, one after the other, until told to stop."""
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": TOKENS}
    found = []
    while not stop.is_set():
        answer = client.http.post("/generate", json={"input_ids": prompt, "sampling_params": sampling})
        assert answer.status_code == 200, answer.text
        found.append(answer.json()["output_ids"])
    return found


def _under_load(client: Served, change: Callable[[], None]) -> list[list[list[int]]]:
    """What each prompt was answered while something changed."""
    stop = Event()
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        asked = [pool.submit(_answers, client, stop, prompt) for prompt in PROMPTS]
        try:
            change()
        finally:
            stop.set()
        return [one.result(120) for one in asked]


def _is_exact(model: Path, prompt: list[int], answer: list[int]) -> bool:
    likeliest = reference_greedy(model, [*prompt, *answer])
    return all(token in likeliest[len(prompt) - 1 + place] for place, token in enumerate(answer))


def test_an_update_loses_no_request_and_one_that_fails_leaves_the_old_version(
    scene: tuple[RayCluster, Served, int], tmp_path: Path
) -> None:
    cluster, client, port = scene
    old, new, broken = (make_tiny("llama", tmp_path / str(seed), seed) for seed in (3, 90, 91))
    (broken / "model.safetensors").write_bytes(b"nothing")
    running = {"router": 1, "prefill": 1, "decode": 1}

    def deploy(model: Path) -> None:
        cluster.deploy(_config(port, client.admin.option, model))

    def update() -> None:
        before = {one["fingerprint"] for one in client.workers()}
        deploy(new)
        _until(lambda: before.isdisjoint({one["fingerprint"] for one in client.workers()}))
        cluster.wait_for(running, START_S)

    def fail() -> None:
        deploy(broken)
        _until(lambda: "DEPLOY_FAILED" in cluster.status())

    deploy(old)
    cluster.wait_for(running, START_S)
    client.wait_for_workers(2)
    for prompt, answers in zip(PROMPTS, _under_load(client, update), strict=True):
        assert all(_is_exact(old, prompt, one) != _is_exact(new, prompt, one) for one in answers)
        assert _is_exact(old, prompt, answers[0])
        assert _is_exact(new, prompt, answers[-1])
    for prompt, answers in zip(PROMPTS, _under_load(client, fail), strict=True):
        assert answers
        assert all(_is_exact(new, prompt, one) for one in answers), "the version from before serves"


def _until(condition: Callable[[], bool]) -> None:
    wait, done = Event(), False
    for _ in range(int(START_S)):
        done = condition()
        if done:
            return
        wait.wait(1.0)
    raise AssertionError("it did not happen in time")
