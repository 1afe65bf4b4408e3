"""Several models, and several versions of one, behind one router process."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.directory.server import DirectoryHost
from router.streams.resume import HEADER
from router.text.chat import Chat
from router.text.tokenization import Tokenization
from tests.router.api.test_api import text_of
from tests.router.conftest import RouterProcess, start_router, wait_until
from tests.support.fake_worker import VOCABULARY, FakeWorker, expected_tokens, token_at
from tests.support.sse import sse_events
from tests.support.tokenizers import byte_fallback, byte_level
from wire.codec import pack_tokens
from wire.records import Role

CHAT = [{"role": "user", "content": "Hello"}]
PROMPT = [5, 6, 7]
Started = list[FakeWorker]


def other_token(prompt: bytes, choice: int, position: int) -> int:
    """The new version's model: it never agrees with the old one."""
    return (zlib.crc32(prompt + bytes([choice]) + position.to_bytes(4, "little")) + 1) % VOCABULARY


def new_tokens(count: int) -> list[int]:
    return [other_token(pack_tokens(PROMPT), 0, position) for position in range(count)]


OLD, NEW = expected_tokens(pack_tokens(PROMPT), 12), new_tokens(12)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[RouterProcess, dict[str, Path]]]:
    """A router of two models that differ in everything, each with P and D."""
    paths = {"a": byte_level(tmp_path / "a"), "org/b": byte_fallback(tmp_path / "b")}
    models = [{"model": str(path), "served_model_name": name} for name, path in paths.items()]
    router = start_router(tmp_path, paths["a"], model=None, served_model_name=None, models=models)
    limits = {"a": 512, "org/b": 300}
    started = [
        FakeWorker(role, router.mailbox, model=name, fingerprint=name, max_context=limits[name])
        for name in paths
        for role in Role
    ]
    router.wait_for_workers(4)
    yield router, paths
    for worker in started:
        worker.close()
    assert router.stop() == 0


def test_each_model_has_its_text_its_context_and_its_workers(
    two: tuple[RouterProcess, dict[str, Path]],
) -> None:
    router, paths = two
    listed = router.http.get("/v1/models").json()["data"]
    assert [(one["id"], one["max_model_len"]) for one in listed] == [("a", 512), ("org/b", 300)]
    for name, path in paths.items():
        text = Tokenization(path)
        prompt = text.encode_chat(Chat(CHAT))
        answer = router.openai().chat.completions.create(model=name, messages=CHAT, max_tokens=12)  # type: ignore[arg-type]
        assert answer.model == name
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.choices[0].message.content == text_of(text, prompt, 12)
        told = router.http.post("/tokenize", json={"model": name, "messages": CHAT}).json()
        assert told["tokens"] == prompt
        route = router.admin.get("/debug/route", params={"model": name, "prompt": "Hi"}).json()
        assert route["model"] == name
        records = {one["id"]: one["model"] for one in router.workers()}
        assert {records[one["id"]] for one in route["prefill"] + route["decode"]} == {name}


def test_an_unknown_model_is_not_found_and_none_is_not_guessed(
    two: tuple[RouterProcess, dict[str, Path]],
) -> None:
    router, _ = two
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": CHAT},
        "/v1/completions": {"prompt": "x"},
        "/generate": {"text": "x"},
        "/tokenize": {"prompt": "x"},
        "/detokenize": {"tokens": [1]},
    }
    for path, body in bodies.items():
        refused = router.http.post(path, json={**body, "model": "c"})
        assert refused.status_code == 404
        error = refused.json()["error"]
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "'a', 'org/b'" in error["message"]
        unnamed = router.http.post(path, json=body)
        assert (unnamed.status_code, unnamed.json()["error"]["param"]) == (400, "model")
        assert router.http.post(path, json={**body, "model": "org/b"}).status_code == 200


def generate(router: RouterProcess, count: int = 12, **headers: str) -> list[int]:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": count, "ignore_eos": True}}
    answer = router.http.post("/generate", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["output_ids"])


def version(router: RouterProcess, workers: Started, name: str, new: bool, **options: Any) -> Started:
    """P and D of one version."""
    if new:
        options["token"] = other_token
    fingerprint = "new" if new else "old"
    added = [
        FakeWorker(role, router.mailbox, version=name, fingerprint=fingerprint, **options) for role in Role
    ]
    workers += added
    router.wait_for_workers(len(workers))
    return added


@pytest.mark.parametrize(
    "router", [{"version_weights": {"stable": 80, "canary": 20}}], indirect=True, ids=["canary"]
)
def test_a_canary_gets_its_share_by_conversation(router: RouterProcess, workers: Started) -> None:
    version(router, workers, "stable", new=False)
    version(router, workers, "canary", new=True)
    answers = {}
    for number in range(60):
        session = {"X-Baton-Session": f"conversation {number}"}
        answers[number] = generate(router, **session)
        assert generate(router, **session) == answers[number], "a conversation stays"
    got = Counter("old" if tokens == OLD else "new" for tokens in answers.values())
    assert all(tokens in (OLD, NEW) for tokens in answers.values())
    assert 3 <= got["new"] <= 24, got
    (model,) = router.admin.get("/debug/models").json()["models"]
    assert (model["model"], model["max_model_len"]) == ("tiny", 4096)
    seen = {one["version"]: one for one in model["versions"]}
    assert {name: one["share"] for name, one in seen.items()} == {"stable": 0.8, "canary": 0.2}
    assert {name: one["streams"] for name, one in seen.items()} == {
        "stable": 2 * got["old"], "canary": 2 * got["new"],
    }  # fmt: skip
    canary = [one.record.id for one in workers if one.record.version == "canary"]
    assert seen["canary"]["workers"]["prefill"] + seen["canary"]["workers"]["decode"] == canary
    metrics = router.admin.get("/metrics").text
    labels = '{fingerprint="new",model="tiny",version="canary"}'
    assert f"baton_router_version_share{labels} 0.2" in metrics
    assert f"baton_router_version_streams_total{labels} {2.0 * got['new']}" in metrics


@pytest.mark.parametrize("router", [{"processes": 2}, {}], indirect=True, ids=["two processes", "one"])
def test_weights_change_in_every_process_while_it_runs(router: RouterProcess, workers: Started) -> None:
    def said() -> set[tuple[int, ...]]:
        """What different conversations are answered, on connections to different processes."""
        found = set()
        for number in range(12):
            with httpx.Client(base_url=router.url) as client:
                body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 12, "ignore_eos": True}}
                answer = client.post("/generate", json=body, headers={"X-Baton-Session": str(number)})
                found.add(tuple(answer.json()["output_ids"]))
        return found

    version(router, workers, "stable", new=False)
    version(router, workers, "canary", new=True)
    for weights, wanted in (("stable=1", OLD), ("stable=0&canary=0.5", NEW), ("model=tiny&stable=2", OLD)):
        changed = router.admin.post(f"/admin/weights?{weights}")
        assert changed.status_code == 200, changed.text
        wait_until(lambda: said() == {tuple(wanted)})  # noqa: B023  not kept
    assert router.admin.post("/admin/weights").status_code == 200
    wait_until(lambda: said() == {tuple(OLD), tuple(NEW)})  # without weights they share by capacity
    for _ in range(2):  # of either process
        told = router.admin.get("/admin/weights").json()
        assert told == {"models": {"tiny": {"revision": 4, "weights": {}, "configured": {}}}}


def test_weights_reach_another_router_and_outlive_a_router(
    tmp_path: Path, model: Path, workers: Started
) -> None:
    weights = {"stable": 1.0}
    with DirectoryHost() as directory:
        started = [
            start_router(tmp_path, model, directory=directory.address, version_weights=weights)
            for _ in range(2)
        ]
        one, other = started
        for name in ("stable", "canary"):
            new = name == "canary"
            workers += [
                FakeWorker(
                    role, directory.address, version=name, fingerprint=name,
                    token=other_token if new else token_at,
                )
                for role in Role
            ]  # fmt: skip
        for router in started:
            router.wait_for_workers(4)
            assert generate(router) == OLD
        assert one.admin.post("/admin/weights?canary=3").json()["models"]["tiny"]["weights"] == {"canary": 3}
        wait_until(lambda: generate(other) == NEW)
        assert one.stop() == 0
        again = start_router(tmp_path, model, directory=directory.address, version_weights=weights)
        again.wait_for_workers(4)
        assert generate(again) == NEW, "the operator spoke after the configuration"
        (told,) = again.admin.get("/admin/weights").json()["models"].values()
        assert told == {"revision": 2, "weights": {"canary": 3}, "configured": weights}
        for router in (other, again):
            assert router.stop() == 0


def test_what_is_no_change_of_weights_changes_nothing(router: RouterProcess, workers: Started) -> None:
    version(router, workers, "stable", new=False)
    assert router.admin.get("/admin/weights?stable=0").status_code == 200
    assert router.admin.post("/debug/models?stable=0").status_code == 405
    for wrong, status in (
        ("stable=-1", 400),
        ("stable=nan", 400),
        ("stable=x", 400),
        ("stable=1e10", 400),
        ("model=other", 404),
    ):
        assert router.admin.post(f"/admin/weights?{wrong}").status_code == status
    from_a_page = router.admin.post("/admin/weights?stable=0", headers={"Origin": "http://example.org"})
    assert from_a_page.status_code == 401
    (model,) = router.admin.get("/debug/models").json()["models"]
    assert [one["share"] for one in model["versions"]] == [1.0]


def test_a_stream_stays_with_its_version_while_the_fleet_changes(
    router: RouterProcess, workers: Started, ends_slowly: Callable[..., Any]
) -> None:
    old_p, old_d = version(router, workers, "", new=False, step_s=0.02)
    spare = FakeWorker(Role.DECODE, router.mailbox, fingerprint="old", step_s=0.02)
    workers.append(spare)
    router.wait_for_workers(3)
    with ends_slowly(router, 60) as stream:
        stream.read(5)
        version(router, workers, "", new=True)
        holder = old_d if old_d.open_rooms() else spare
        holder.drain()  # its rooms start again elsewhere
        tokens = stream.read_all()
    assert tokens == expected_tokens(pack_tokens(PROMPT), 60)
    old_p.drain()
    (old_d if holder is spare else spare).drain()
    wait_until(lambda: generate(router) == NEW)
    assert all(generate(router, **{"X-Baton-Session": str(n)}) == NEW for n in range(10))


@pytest.mark.parametrize("router", [{"version_wait_s": 0.5}], indirect=True, ids=["wait"])
def test_a_stream_whose_version_is_gone_ends_with_an_error_and_cannot_be_resumed_elsewhere(
    router: RouterProcess, workers: Started, ends_slowly: Callable[..., Any]
) -> None:
    _, old_d = version(router, workers, "", new=False, step_s=0.02)
    with ends_slowly(router, 60) as stream:
        stream.read(5)
        version(router, workers, "", new=True)
        old_d.drain()
        with pytest.raises(RuntimeError, match="version of 'tiny' on which this stream began"):
            stream.read_all()
        assert stream.tokens == expected_tokens(pack_tokens(PROMPT), len(stream.tokens)), "and no other"
    for worker in workers[:2]:
        worker.close()
    router.wait_for_workers(2)
    again = router.http.post("/generate", json=stream.body, headers={HEADER: stream.last_id})
    assert again.status_code == 503
    assert "send the request again" in again.json()["error"]["message"]
    assert generate(router) == NEW


class _Stream:
    """A streamed /generate."""

    def __init__(self, router: RouterProcess, count: int) -> None:
        self.body = {
            "input_ids": PROMPT, "stream": True,
            "sampling_params": {"max_new_tokens": count, "ignore_eos": True, "seed": 1},
        }  # fmt: skip
        self.tokens: list[int] = []
        self.last_id = ""
        self._context = router.http.stream(
            "POST", "/generate", json=self.body, headers={"Accept": "text/event-stream"}
        )

    def __enter__(self) -> _Stream:
        response = self._context.__enter__()
        assert response.status_code == 200, response.read()
        self._events = sse_events(response.iter_lines())
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def read(self, count: int) -> None:
        """Until there are so many tokens."""
        while len(self.tokens) < count:
            assert self._next(), "it ended"

    def read_all(self) -> list[int]:
        while self._next():
            pass
        return self.tokens

    def _next(self) -> bool:
        event = next(self._events)
        if event.data == "[DONE]":
            return False
        said = json.loads(event.data)
        if "error" in said:
            raise RuntimeError(said["error"]["message"])
        self.tokens, self.last_id = said["output_ids"], event.id or self.last_id
        return True


@pytest.fixture
def ends_slowly() -> Callable[..., _Stream]:
    return _Stream
