"""A canary on a real Ray cluster: two sets of deployments are two versions of one model, and a weight divides
the new streams. Both routers know the weight, whoever says it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.e2e.ray_cluster import RayCluster, free_ports, ray_cluster
from tests.e2e.served import Served, served
from tests.harness.leftovers import Run
from tests.support.reference import MIN_MARGIN, reference_generate, reference_greedy
from tests.support.tiny_models import make_tiny

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SESSIONS = 40
SHORT, LONG = 8, 400
START_S = 240.0
PROMPT = [7, 3, 200, 41] * 6
ROUTERS = 2
WEIGHTS = {"v1": 70.0, "v2": 30.0}
VERSIONS = {"v1": 3, "v2": 90}  # seeds of their weights


def _config(
    port: int, admin_ports: str, models: dict[str, Path], deployed: dict[str, float] | None = None
) -> dict[str, object]:
    """The weights are in the models' entries, and those that are `deployed` in Serve's own `user_config`."""
    small = {"num_cpus": 0.1, "drain_s": 20}
    versions = [
        {
            "model": str(path), "served_model_name": "m", "model_version": name, "weight": WEIGHTS[name],
            "prefill": small, "decode": small,
        }
        for name, path in models.items()
    ]  # fmt: skip
    args = {
        "models": versions,
        "worker": {"dtype": "float32", "page_size": 16, "max_total_tokens": 4096, "threads": 1},
        "router": {**small, "num_replicas": ROUTERS, "options": {"admin_ports": admin_ports}},
    }
    application: dict[str, object] = {
        "name": "baton", "route_prefix": "/", "import_path": "cluster.app:build", "args": args,
    }  # fmt: skip
    if deployed is not None:
        application["deployments"] = [
            {"name": "router", "user_config": {"version_weights": {"m": deployed}}}
        ]  # fmt: skip
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [application],
    }


def _answer(client: Served, session: str, count: int = SHORT) -> list[int]:
    """The tokens of one new stream of a session."""
    body = {
        "input_ids": PROMPT, "stream": True,
        "sampling_params": {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": count},
    }  # fmt: skip
    tokens: list[int] = []
    with client.http.stream("POST", "/generate", json=body, headers={"X-Baton-Session": session}) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                said = json.loads(line[6:])
                assert "error" not in said, said
                tokens = said["output_ids"]
    assert len(tokens) == count
    return tokens


def _versions(client: Served, figure: str) -> dict[str, list[float]]:
    """A figure of each version, at each router."""
    pages = [page.raise_for_status().json()["models"] for page in client.admin.each("/debug/models")]
    assert len(pages) == ROUTERS
    return {
        name: [one[figure] for (model,) in pages for one in model["versions"] if one["version"] == name]
        for name in VERSIONS
    }


def _wait_for_weights(client: Served, weights: dict[str, float]) -> None:
    """Until both routers have these weights."""

    def told() -> list[dict[str, float]]:
        pages = client.admin.each("/admin/weights")
        return [page.raise_for_status().json()["models"]["m"]["weights"] for page in pages]

    _until(lambda: told() == [weights] * ROUTERS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: make_tiny("llama", folder / name, seed) for name, seed in VERSIONS.items()}


@dataclass
class Scene:
    cluster: RayCluster
    client: Served
    port: int


@pytest.fixture(scope="module")
def scene(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    port, admin_port = free_ports(2)
    run = Run.begin()
    with (
        ray_cluster(tmp_path_factory.mktemp("ray"), run) as cluster,
        served(f"http://127.0.0.1:{port}", admin_port) as client,
    ):
        cluster.deploy(_config(port, client.admin.option, models))
        workers = {f"{role}-m-{name}": 1 for role in ("prefill", "decode") for name in models}
        cluster.wait_for({"router": ROUTERS, **workers}, START_S)
        client.wait_for_workers(len(workers))
        yield Scene(cluster, client, port)


def test_shares_follow_the_weight_and_a_version_of_weight_0_drains(
    scene: Scene, models: dict[str, Path]
) -> None:
    client = scene.client
    decided = {name: reference_generate(path, PROMPT, SHORT) for name, path in models.items()}
    assert min(margin for _, margin in decided.values()) > MIN_MARGIN
    first = {name: tokens for name, (tokens, _) in decided.items()}
    by_session = {f"s{number}": _answer(client, f"s{number}") for number in range(SESSIONS)}
    of_v2 = [name for name, tokens in by_session.items() if tokens == first["v2"]]
    of_v1 = [name for name, tokens in by_session.items() if tokens == first["v1"]]
    assert len(of_v1) + len(of_v2) == SESSIONS, "each answer is one version's, from its first token on"
    assert 5 <= len(of_v2) <= 20, "30 of 100, by conversation"
    assert _versions(client, "share") == {"v1": [0.7] * ROUTERS, "v2": [0.3] * ROUTERS}
    began_on = {name: sum(streams) for name, streams in _versions(client, "streams").items()}
    assert began_on == {"v1": len(of_v1), "v2": len(of_v2)}
    assert [_answer(client, name) for name in of_v2[:3]] == [first["v2"]] * 3, "a conversation stays"

    with ThreadPoolExecutor(1) as pool:
        began = pool.submit(_answer, client, of_v2[0], LONG)
        _until(lambda: sum(_versions(client, "rooms")["v2"]) == 1)
        assert client.admin.post("/admin/weights?v1=1&v2=0").status_code == 200
        _wait_for_weights(client, {"v1": 1, "v2": 0})
        assert [_answer(client, name) for name in of_v2] == [first["v1"]] * len(of_v2)
        assert not began.done(), "it ran through the change"
        answer = began.result(120)
    assert _is_exact(models["v2"], answer), "and stayed on its version"
    _until(lambda: sum(_versions(client, "rooms")["v2"]) == 0)
    assert _versions(client, "share")["v2"] == [0.0] * ROUTERS

    routers = sorted(replica["pid"] for replica in scene.cluster.replicas("router"))
    scene.cluster.deploy(_config(scene.port, client.admin.option, models, {"v1": 0, "v2": 1}))
    _wait_for_weights(client, {"v1": 0, "v2": 1})
    assert [_answer(client, name) for name in of_v1[:5]] == [first["v2"]] * 5
    assert sorted(replica["pid"] for replica in scene.cluster.replicas("router")) == routers, "none restarted"

    assert client.admin.post("/admin/weights?v1=1").status_code == 200
    _wait_for_weights(client, {"v1": 1})
    for pid in routers:
        os.kill(pid, signal.SIGKILL)
    _until(lambda: _new_routers(scene.cluster, routers))
    _wait_for_weights(client, {"v1": 1})
    assert [_answer(client, name) for name in of_v2[:5]] == [first["v1"]] * 5, "the workers have kept it"
    client.settle()


def _new_routers(cluster: RayCluster, before: list[int]) -> bool:
    """Whether other routers run in place of these."""
    pids = [replica["pid"] for replica in cluster.replicas("router") if replica["state"] == "RUNNING"]
    return len(pids) == len(before) and not set(pids) & set(before)


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while True:
        # A router that was killed does not answer, and one that starts has no page yet.
        with suppress(httpx.HTTPError):
            if condition():
                return
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def _is_exact(model: Path, answer: list[int]) -> bool:
    likeliest = reference_greedy(model, [*PROMPT, *answer])
    return all(token in likeliest[len(PROMPT) - 1 + place] for place, token in enumerate(answer))
