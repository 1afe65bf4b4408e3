"""A request leaves nothing for the garbage collector: freeze_gc relies on it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest

from router.api.app import App, build_app
from router.options import RouterOptions
from router.service import Router
from tests.support.fake_worker import FakeWorker
from tests.support.left_over import left_over
from wire.messages.rooms import RejectKind
from wire.records import Role

PROMPT = {"model": "tiny", "prompt": "Hello there", "max_tokens": 6, "seed": 1}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": ("/v1/completions", PROMPT),
    "streamed": ("/v1/completions", {**PROMPT, "stream": True}),
    "chat": ("/v1/chat/completions", {**CHAT, "stream": True, "logprobs": True, "top_logprobs": 2}),
    "choices": ("/v1/completions", {**PROMPT, "n": 3, "temperature": 1.0, "prompt": ["a", "bc"]}),
    "stopped": ("/v1/completions", {**PROMPT, "max_tokens": 60, "stop": ["a", "e", "i", "o", "1", "2", "3"]}),
    "native": ("/generate", {"text": "Hello", "stream": True, "sampling_params": {"max_new_tokens": 6}}),
    "refused": ("/v1/completions", {**PROMPT, "max_tokens": 100_000}),
}


async def call(app: App, path: str, body: dict[str, Any] | None, leave: bool = False) -> bytes:
    """One request, as uvicorn would make it; a client that `leave`s is gone after the first piece."""
    scope = {"type": "http", "method": "GET" if body is None else "POST", "path": path, "headers": []}
    asked, left, pieces = False, asyncio.Event(), []

    async def receive() -> MutableMapping[str, Any]:
        nonlocal asked
        if asked:
            await left.wait()
            return {"type": "http.disconnect"}
        asked = True
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        pieces.append(message.get("body", b""))
        if leave:
            left.set()

    await asyncio.wait_for(app({**scope, "query_string": b""}, receive, send), 20)
    return b"".join(pieces)


@pytest.mark.parametrize("leave", [False, True], ids=["read", "left"])
def test_a_request_is_freed_by_its_counts(model: Path, leave: bool) -> None:
    async def run() -> None:
        router = Router(RouterOptions(model=model, served_model_name="tiny", prefill_on_decode_tokens=0))
        app = build_app(router)
        workers = [FakeWorker(role, router.mailbox_address, step_s=0.005) for role in Role]
        try:
            async with asyncio.timeout(10):
                while b'"ready"' not in await call(app, "/ready", None):
                    await asyncio.sleep(0.01)
            for path, body in REQUESTS.values():  # what is made once
                await call(app, path, body)
            with left_over("router", "wire") as found:
                for path, body in REQUESTS.values():
                    assert await call(app, path, body, leave)
            assert found == []
            for worker in workers:
                worker.reject = RejectKind.INVALID
            assert b"error" in await call(app, "/v1/completions", PROMPT)
            with left_over("router", "wire", "common") as found:
                for stream in (False, True):
                    assert b"error" in await call(app, "/v1/completions", {**PROMPT, "stream": stream})
            assert found == []
        finally:
            for worker in workers:
                await asyncio.to_thread(worker.close)
            router.close()

    asyncio.run(run())
