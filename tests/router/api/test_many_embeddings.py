"""/v1/embeddings of more texts than run at once: part after part, refused at the first or not at all."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from router.api.answering import encode_prompts
from router.api.openai.embeddings import _AT_ONCE
from router.api.request_body import MOST_INPUTS
from router.model import Model
from router.text.long_texts import LONG
from tests.router.conftest import RouterProcess, start_router, wait_until
from tests.router.test_overload import gauge, queued
from tests.support.fake_worker import FakeWorker
from tests.support.prompt_hooks import HOOK_PIPE
from wire.codec import unpack_tokens
from wire.messages.rooms import Abort, Decode
from wire.records import Role


class Embedder:
    """A decode worker whose vector of a prompt is its first two tokens. It holds texts back when told to."""

    def __init__(self, router: RouterProcess) -> None:
        self.told: set[bytes] = set()  # prompts whose vector was sent
        self.most = 0  # rooms at once
        self.hold_after = -1  # so many of them; -1: never
        self.worker = FakeWorker(Role.DECODE, router.mailbox, vector=self._vector)

    def _vector(self, prompt: bytes) -> bytes:
        if prompt not in self.told:
            running = self.worker.open_rooms() - len(self.told)  # a room that is over stays open there
            self.most = max(self.most, running)
            self.told.add(prompt)
            if len(self.told) == self.hold_after:
                self.worker.wait_at = 0
        return struct.pack("<2f", *unpack_tokens(prompt)[:2])

    def began(self) -> int:
        return self.worker.count(Decode)


@pytest.fixture
def embedder(router: RouterProcess) -> Iterator[Embedder]:
    made = Embedder(router)
    router.wait_for_workers(1)
    yield made
    made.worker.close()


def body(texts: int) -> dict[str, Any]:
    """Each is another pair of tokens."""
    return {"input": [[1 + text % 128, 1 + text // 128] for text in range(texts)], "normalize": False}


LINES = "requests.jsonl"


@pytest.fixture
def logged(tmp_path: Path, model: Path) -> Iterator[RouterProcess]:
    running = start_router(tmp_path, model, request_log=str(tmp_path / LINES), request_log_prompts=True)
    yield running
    assert running.stop() == 0


def test_as_many_texts_as_openai_takes_are_answered_in_order(logged: RouterProcess, tmp_path: Path) -> None:
    embedder, asked = Embedder(logged), body(MOST_INPUTS)
    try:
        logged.wait_for_workers(1)
        answer = logged.http.post("/v1/embeddings", json=asked, headers={"x-request-id": "many"}).json()
    finally:
        embedder.worker.close()
    assert [one["index"] for one in answer["data"]] == list(range(MOST_INPUTS))
    assert [one["embedding"] for one in answer["data"]] == asked["input"]
    assert answer["usage"] == {"prompt_tokens": 2 * MOST_INPUTS, "total_tokens": 2 * MOST_INPUTS}
    assert 0 < embedder.most <= _AT_ONCE
    names = {one.request.request_id for one in embedder.worker.seen if isinstance(one, Decode)}
    assert names == {"many", *(f"many-{part}" for part in range(2, MOST_INPUTS // _AT_ONCE + 1))}
    wait_until(lambda: (tmp_path / LINES).read_text().endswith("\n"))
    (line,) = map(json.loads, (tmp_path / LINES).read_text().splitlines())
    made = line["generated"]
    assert (line["request_id"], made["choices"]) == ("many", MOST_INPUTS)
    assert (made["prompt_tokens"], made["output_tokens"]) == (2 * MOST_INPUTS, MOST_INPUTS)
    assert len(made["ends"]) == len(made["workers"]) == len(made["prompts"]) == MOST_INPUTS
    assert 0 < made["ttft_s"] < line["seconds"]


def test_a_client_that_leaves_during_a_later_part_leaves_no_rooms(
    router: RouterProcess, embedder: Embedder
) -> None:
    embedder.hold_after = _AT_ONCE
    url = httpx.URL(router.url)
    client = http.client.HTTPConnection(url.host, url.port or 0)
    headers = {"content-type": "application/json"}
    client.request("POST", "/v1/embeddings", json.dumps(body(3 * _AT_ONCE)), headers)
    wait_until(lambda: embedder.began() == 2 * _AT_ONCE)
    client.close()
    wait_until(lambda: embedder.worker.count(Abort) == _AT_ONCE)
    wait_until(lambda: gauge(router, "baton_router_rooms") == queued(router) == 0)
    embedder.worker.wait_at = None
    assert router.http.post("/v1/embeddings", json=body(1)).status_code == 200
    assert embedder.began() == 2 * _AT_ONCE + 1


def test_a_full_router_refuses_the_first_part_and_no_later_one(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv(HOOK_PIPE, str(tmp_path / "pipe"))
    pipe = os.open(tmp_path / "pipe", os.O_RDWR)  # to write only would wait for the hook
    router = start_router(
        tmp_path, model, max_in_flight=_AT_ONCE, max_queued=3, max_queue_s=0.2, queue_decode_full=False,
        private_prompt_hook="tests.support.prompt_hooks:when_told", private_prompt_hook_s=30,
    )  # fmt: skip
    embedder = Embedder(router)
    embedder.hold_after = _AT_ONCE
    post = router.http.post
    with ThreadPoolExecutor(3) as clients:
        try:
            router.wait_for_workers(1)
            parted = body(_AT_ONCE + 1)
            parted["input"] += [[0, 0]]  # the hook keeps the second part waiting
            answer = clients.submit(post, "/v1/embeddings", json=parted)
            wait_until(lambda: len(embedder.told) == _AT_ONCE and gauge(router, "baton_router_rooms") == 0)
            crowd = {"prompt": [9], "n": _AT_ONCE, "max_tokens": 1}
            taking = clients.submit(post, "/v1/completions", json=crowd)
            wait_until(lambda: embedder.began() == 2 * _AT_ONCE)
            waiting = clients.submit(post, "/v1/embeddings", json=body(2))
            wait_until(lambda: queued(router) == 2)
            os.write(pipe, b".")
            assert "within 0.2 s" in waiting.result().text
            wait_until(lambda: queued(router) == 2)  # the second part, for which there was no place left
            refused = post("/v1/embeddings", json=body(_AT_ONCE))
            assert (refused.status_code, "places" in refused.text) == (429, True)
            late = post("/v1/embeddings", json=body(1))  # it comes after the second part
            assert (late.status_code, "within 0.2 s" in late.text) == (429, True)
            assert queued(router) == 2
            embedder.worker.wait_at = None
            assert taking.result().status_code == 200
            assert [one["embedding"] for one in answer.result().json()["data"]] == parted["input"]
        finally:
            embedder.worker.wait_at = None
            embedder.worker.close()
            os.close(pipe)
            assert router.stop() == 0


def test_many_short_texts_leave_other_requests_their_turns() -> None:
    encoded: list[str] = []

    class Quick:
        async def encode(self, text: str, *_: object) -> list[int]:
            encoded.append(text)
            return [1]

    async def run() -> None:
        seen: list[int] = []
        asyncio.get_running_loop().call_soon(lambda: seen.append(len(encoded)))
        texts = ["x" * (LONG // 4)] * 100
        prompts = await encode_prompts(cast(Model, Quick()), texts, "input", 1, add_special_tokens=True)
        assert prompts == [[1]] * 100
        assert seen == [4]

    asyncio.run(run())
