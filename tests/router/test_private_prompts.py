"""What workers are told of prompts: which of their tokens are public, and which pages never will be."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from common.errors import ConfigError
from router.private_hook import PrivatePromptHook
from router.text.tokenization import Tokenization
from tests.router.conftest import RouterProcess, start_router
from tests.support.fake_worker import FakeWorker
from wire.codec import unpack_tokens
from wire.messages.rooms import Decode
from wire.records import Role
from wire.request import NO_MARKS, GenerateRequest, PromptMarks, SamplingParams

HOOK = "tests.support.prompt_hooks:by_word"
SYSTEM = "You are the assistant of a library. Answer briefly."
STORY = "Once upon a time, there was a story that everybody knew:"
TENANT = "X-Baton-Tenant"
BOUND_S = 0.3
Service = tuple[RouterProcess, FakeWorker]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Service]:
    """A router with public prefixes and a hook, and a decode worker."""
    directory = tmp_path_factory.mktemp("private")
    (directory / "story.txt").write_text(STORY + "\n", encoding="utf-8")
    router = start_router(
        directory, model,
        trusted_tenant_header=TENANT,
        public_prefixes=[{"text": SYSTEM}, {"file": str(directory / "story.txt"), "form": "prompt"}],
        private_prompt_hook=HOOK,
        private_prompt_hook_s=BOUND_S,
    )  # fmt: skip
    worker = FakeWorker(Role.DECODE, router.mailbox)
    router.wait_for_workers(1)
    yield router, worker
    worker.close()
    assert router.stop() == 0


def sent(service: Service, path: str, body: dict[str, Any]) -> list[GenerateRequest]:
    """What the worker got for a request."""
    router, worker = service
    worker.seen.clear()
    answer = router.http.post(path, json=body, headers={TENANT: "gold"})
    assert answer.status_code == 200, answer.text
    return [one.request for one in list(worker.seen) if isinstance(one, Decode)]


def chat(user: str, system: str = SYSTEM) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return {"messages": messages, "max_tokens": 2}


def test_workers_are_told_how_much_of_a_chat_is_public(service: Service, model: Path) -> None:
    (request,) = sent(service, "/v1/chat/completions", chat("What is open?"))
    tokens = unpack_tokens(request.prompt).tolist()
    public = Tokenization(model).decode(tokens[: request.marks.public])
    assert SYSTEM in public
    assert "What" not in public
    assert request.marks.whole == request.marks.public
    (other,) = sent(service, "/v1/chat/completions", chat("What is open?", "You know nothing."))
    assert other.marks.public < request.marks.public
    assert other.marks.whole == 0


def test_workers_are_told_how_much_of_a_text_is_public(service: Service) -> None:
    body = {"prompt": [f"{STORY} it", "Something else"], "max_tokens": 2, "n": 2}
    told = {request.choice: [] for request in sent(service, "/v1/completions", body)}
    assert list(told) == [0, 1]
    requests = sent(service, "/v1/completions", body)
    assert [one.marks.whole > 5 for one in sorted(requests, key=lambda one: one.room)] == [
        True, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "Hello", "sampling_params": {"max_new_tokens": 2}}),
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 2}),
        ("/v1/chat/completions", chat("Hello")),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 2}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}),
    ],
)
def test_a_request_says_from_where_on_it_is_private(
    service: Service, path: str, body: dict[str, Any]
) -> None:
    if path == "/v1/messages":
        body = {**body, "model": "tiny"}
    for page in (None, 0, 7):
        given = body if page is None else {**body, "private_from_page": page}
        (request,) = sent(service, path, given)
        assert request.marks.private_from == page


@pytest.mark.parametrize(
    ("text", "asked", "told"),
    [
        ("nothing special", None, None),
        ("my password is", None, 1),
        ("my password is", 5, 1),
        ("my password is", 0, 0),
        ("it fails", 5, 0),
        ("it times out", None, 0),
        ("nonsense", None, 0),
        ("negative", None, 0),
        ("it hangs", 3, 0),
    ],
)
def test_the_hook_makes_prompts_private_and_fails_closed(
    service: Service, text: str, asked: int | None, told: int | None
) -> None:
    body = {"text": text, "sampling_params": {"max_new_tokens": 2}, "private_from_page": asked}
    (request,) = sent(service, "/generate", body)
    assert request.marks.private_from == told


def test_what_the_hook_came_to_is_counted(service: Service) -> None:
    def counted() -> dict[str, float]:
        lines = service[0].admin.get("/metrics").text.splitlines()
        name = "baton_router_private_prompt_hook_total{"
        found = [line.removeprefix(name).split() for line in lines if line.startswith(name)]
        return {label.split('"')[1]: float(value) for label, value in found}

    before = counted()
    for text in ("nothing", "my password", "it fails", "it hangs"):
        sent(service, "/generate", {"text": text, "sampling_params": {"max_new_tokens": 2}})
    grown = {name: value - before.get(name, 0) for name, value in counted().items()}
    assert grown == {"open": 1, "private": 1, "failed": 1, "late": 1}


def test_without_options_nothing_is_told(router: RouterProcess, workers: list[FakeWorker]) -> None:
    workers.append(FakeWorker(Role.DECODE, router.mailbox))
    router.wait_for_workers(1)
    (request,) = sent((router, workers[0]), "/v1/chat/completions", chat("my password"))
    assert request.marks == NO_MARKS


@pytest.mark.parametrize("page", [-1, "one", 2**31, 1.5])
def test_a_page_is_a_number(service: Service, page: object) -> None:
    body = {"text": "x", "sampling_params": {"max_new_tokens": 2}, "private_from_page": page}
    answer = service[0].http.post("/generate", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "private_from_page"


@pytest.mark.parametrize(
    "name",
    [
        "nothing",
        "no.such.module:f",
        "tests.support.prompt_hooks:none",
        ":f",
        "tests.support.prompt_hooks:SECRET_WORD",
    ],
)
def test_a_hook_that_cannot_be_called_stops_the_start(name: str) -> None:
    with pytest.raises(ConfigError, match="private_prompt_hook"):
        PrivatePromptHook(name, 1.0, CollectorRegistry())


def test_calls_that_hang_do_not_hold_up_prompts_for_longer_than_their_time() -> None:
    """More of them than are called at once: later prompts are private without a call."""

    async def ask() -> None:
        hook = PrivatePromptHook(HOOK, 0.2, CollectorRegistry())
        asked = [hook.private_from("a", [], lambda _: "it hangs") for _ in range(20)]
        async with asyncio.timeout(5):
            assert await asyncio.gather(*asked) == [0] * 20
            assert await hook.private_from("a", [], lambda _: "nothing") == 0

    asyncio.run(ask())


@pytest.mark.parametrize("text", ["it exits", "it is cancelled"])
def test_a_call_that_ends_with_no_plain_exception_gives_back_its_place(text: str) -> None:
    async def ask() -> None:
        hook = PrivatePromptHook(HOOK, 5.0, CollectorRegistry())
        asked = [hook.private_from("a", [], lambda _: text) for _ in range(20)]
        assert await asyncio.gather(*asked) == [0] * 20
        assert await hook.private_from("a", [], lambda _: "nothing") is None

    asyncio.run(ask())


def test_a_call_for_which_there_is_no_thread_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def ask() -> None:
        hook = PrivatePromptHook(HOOK, 5.0, CollectorRegistry())
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            assert [await hook.private_from("a", [], lambda _: "open") for _ in range(20)] == [0] * 20
        assert await hook.private_from("a", [], lambda _: "nothing") is None

    asyncio.run(ask())


def test_a_prompt_without_a_tenant_is_of_its_own_request() -> None:
    def request(tenant: str, choice: int, marks: PromptMarks) -> GenerateRequest:
        return GenerateRequest(
            request_id="r", sampling=SamplingParams(), room=7 + choice, epoch=0, prompt=b"", tenant=tenant,
            choice=choice, marks=marks,
        )  # fmt: skip

    private = PromptMarks(private_from=0)
    assert request("", 0, NO_MARKS).tenant_key == ""
    assert request("a", 0, private).tenant_key == "a"
    assert request("", 0, private).tenant_key == request("", 1, private).tenant_key != ""
