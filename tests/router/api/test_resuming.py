"""A stream that broke off goes on at any position: nothing is lost, doubled or different.

The fake model's tokens are random bytes: many characters are unfinished between two events.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from router.text.tokenization import Tokenization
from tests.router.api.test_api import text_of
from tests.router.conftest import ROOT, RouterProcess, start_router, wait_until
from tests.support.fake_worker import FakeWorker
from tests.support.sse import DONE, SseEvent, sse_events
from wire.messages.rooms import Decode
from wire.records import Role

Service = tuple[RouterProcess, FakeWorker]
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
MESSAGES = [{"role": "user", "content": "Go on"}]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Service]:
    router = start_router(tmp_path_factory.mktemp("resuming"), model)
    decode = FakeWorker(Role.DECODE, router.mailbox, max_context=512, cached_tokens=3)
    router.wait_for_workers(1)
    yield router, decode
    decode.close()
    assert router.stop() == 0


NAMED = {"Accept": "text/event-stream"}
"""Without it events have no ids."""


def ask(router: RouterProcess, path: str, body: dict[str, Any], last_id: str = "") -> list[SseEvent]:
    """All events of a stream, which ends well."""
    headers = {**NAMED, **({"Last-Event-ID": last_id} if last_id else {})}
    with router.http.stream("POST", path, json={**body, "stream": True}, headers=headers) as response:
        assert response.status_code == 200, response.read()
        events = list(sse_events(response.iter_lines()))
    assert events[-1].data == DONE
    return events


def openai_answer(events: list[SseEvent]) -> dict[str, Any]:
    """What a client of the OpenAI API has made of the events."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for event in events:
        if event.data == DONE:
            continue
        usage = event.json.get("usage") or usage
        for choice in event.json["choices"]:
            known = choices.setdefault(
                choice["index"], {"text": "", "logprobs": [], "offsets": [], "roles": 0, "finish": None}
            )
            assert known["finish"] is None, "nothing follows a choice's end"
            delta = choice.get("delta", {})
            known["roles"] += "role" in delta
            known["text"] += delta["content"] if "delta" in choice else choice["text"]
            logprobs = choice["logprobs"] or {}
            known["logprobs"] += logprobs.get("content", logprobs.get("token_logprobs", []))
            known["offsets"] += logprobs.get("text_offset", [])
            known["finish"] = choice["finish_reason"]
    if usage is not None:
        del usage["prompt_tokens_details"]  # what was cached for those who computed last
    return {"choices": choices, "usage": usage}


def native_answer(events: list[SseEvent]) -> dict[int, Any]:
    answers = {}
    for event in events:
        if event.data != DONE:
            answer = event.json
            del answer["meta_info"]["e2e_latency"], answer["meta_info"]["id"]
            answers[answer["index"]] = answer
    return answers


OPENAI = {
    "plain": ("/v1/completions", {"prompt": "Hello", "max_tokens": 12, **USAGE}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 12}),
    "choices": ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 5, "n": 2, **USAGE}),
    "logprobs": ("/v1/completions", {"prompt": "Hello", "max_tokens": 12, "logprobs": 2, **USAGE}),
    "chat logprobs": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 9, "logprobs": True, "top_logprobs": 1, "n": 2, **USAGE},
    ),
}


@pytest.mark.parametrize("claimable", [False, True], ids=["computed again", "claimed"])
@pytest.mark.parametrize(("path", "body"), OPENAI.values(), ids=OPENAI)
def test_a_stream_goes_on_at_every_event(
    service: Service, path: str, body: dict[str, Any], claimable: bool
) -> None:
    router, decode = service
    decode.claimable = claimable
    whole = ask(router, path, body)
    want = openai_answer(whole)
    assert all(choice["finish"] for choice in want["choices"].values())
    for cut, event in enumerate(whole):
        rest = ask(router, path, body, event.id)
        assert openai_answer(whole[: cut + 1] + rest) == want, f"after event {cut}"


@pytest.mark.parametrize("claimable", [False, True], ids=["computed again", "claimed"])
@pytest.mark.parametrize("n", [1, 3])
def test_native_events_go_on_with_the_whole_text(service: Service, n: int, claimable: bool) -> None:
    router, decode = service
    decode.claimable = claimable
    sampling = {"max_new_tokens": 8, "n": n}
    body = {"text": "Hello", "sampling_params": sampling, "return_logprob": True}
    whole = ask(router, "/generate", body)
    for cut, event in enumerate(whole):
        rest = ask(router, "/generate", body, event.id)
        assert len(rest) <= max(1, len(whole) - cut - 1), "what the client has is not sent again"
        assert native_answer(whole[: cut + 1] + rest) == native_answer(whole), f"after event {cut}"


def test_a_stop_string_is_found_over_the_border(service: Service, model: Path) -> None:
    router, _ = service
    tokenization = Tokenization(model)
    text = text_of(tokenization, tokenization.encode("Hello"), 64)
    stop = text[20:26]
    body = {"prompt": "Hello", "max_tokens": 64, "stop": stop, **USAGE}
    whole = ask(router, "/v1/completions", body)
    want = openai_answer(whole)
    assert want["choices"][0]["text"] == text[: text.index(stop)]
    for cut, event in enumerate(whole):
        rest = ask(router, "/v1/completions", body, event.id)
        assert openai_answer(whole[: cut + 1] + rest) == want, f"after event {cut}"


def test_what_the_router_chose_is_kept(service: Service) -> None:
    """The body names neither a seed nor a length."""
    router, decode = service
    decode.claimable = False
    body = {"messages": MESSAGES}
    streamed = {**body, "stream": True}
    with router.http.stream("POST", "/v1/chat/completions", json=streamed, headers=NAMED) as response:
        event = next(sse_events(response.iter_lines()))
    first = _last_decode(decode)
    ask(router, "/v1/chat/completions", body, event.id)
    again = _last_decode(decode)
    assert again.room != first.room
    assert again.request.sampling == first.request.sampling


def _newest_room(decode: FakeWorker) -> int:
    return max((message.room for message in list(decode.seen) if isinstance(message, Decode)), default=0)


def _last_decode(decode: FakeWorker) -> Decode:
    wait_until(lambda: any(isinstance(message, Decode) for message in decode.seen))
    return [message for message in decode.seen if isinstance(message, Decode)][-1]


def test_a_client_that_names_more_than_there_is_gets_the_end(service: Service) -> None:
    router, _ = service
    body = {"prompt": "Hello", "max_tokens": 6}
    token = ask(router, "/v1/completions", body)[0].id.partition(":")[0]
    ended = ask(router, "/v1/completions", body, f"{token}:99")
    assert [event.json["choices"][0]["finish_reason"] for event in ended[:-1]] == ["length"]
    assert [event.data for event in ask(router, "/v1/completions", body, f"{token}:6f")] == [DONE]


def test_ids_that_do_not_fit_are_refused(service: Service) -> None:
    router, _ = service
    body = {"prompt": "Hello", "max_tokens": 6, "stream": True}
    event_id = ask(router, "/v1/completions", body)[0].id
    for wrong, header in (
        ({**body, "prompt": "Hallo"}, event_id),
        (body, event_id.replace(":", "!")),
        ({**body, "stream": False}, event_id),
        (body, "1"),
    ):
        answer = router.http.post("/v1/completions", json=wrong, headers={"Last-Event-ID": header})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")
    assert ask(router, "/v1/completions", body, event_id), "nothing was lost by that"


def test_a_stream_of_very_many_choices_has_no_ids(service: Service) -> None:
    router, _ = service
    events = ask(router, "/v1/completions", {"prompt": ["a", "b"], "n": 65, "max_tokens": 1})
    assert {event.id for event in events} == {""}


KEY = {"resume_key": "a key of these tests"}
LONG: dict[str, Any] = {"prompt": "Hello", "max_tokens": 60, "n": 2, "logprobs": 1, **USAGE}


@pytest.fixture
def routers(tmp_path: Path, model: Path) -> Iterator[list[RouterProcess]]:
    """Two with one key; the first hosts the directory. They are ended, unless a test has removed them."""
    first = start_router(tmp_path, model, **KEY)
    running = [first, start_router(tmp_path, model, directory=first.mailbox, **KEY)]
    yield running
    assert [router.stop() for router in reversed(running)] == [0] * len(running)


@pytest.fixture
def decodes(routers: list[RouterProcess]) -> Iterator[list[FakeWorker]]:
    """Two decode workers, each of which is likely to have one of two choices."""
    both = [FakeWorker(Role.DECODE, routers[0].mailbox, max_context=512, step_s=0.01) for _ in range(2)]
    for router in routers:
        router.wait_for_workers(2)
    yield both
    for worker in both:
        worker.close()


def starts(workers: list[FakeWorker]) -> int:
    return sum(worker.count(Decode) for worker in workers)


@contextlib.contextmanager
def in_mid_answer(workers: list[FakeWorker]) -> Iterator[None]:
    """Within the block no choice comes to its end, however long it takes."""
    for worker in workers:
        worker.wait_at = 20
    yield
    for worker in workers:
        worker.wait_at = None


def read(router: RouterProcess, body: dict[str, Any], then: Callable[[], object]) -> list[SseEvent]:
    """What a client has that calls `then` after eight events, and reads on until the stream ends somehow."""
    events: list[SseEvent] = []
    with (
        contextlib.suppress(httpx.TransportError),
        router.http.stream(
            "POST", "/v1/completions", json={**body, "stream": True}, headers=NAMED
        ) as response,
    ):
        for event in sse_events(response.iter_lines()):
            events.append(event)
            if len(events) == 8:
                then()
    return events


def test_a_killed_routers_stream_goes_on_at_another_where_it_was(
    routers: list[RouterProcess], decodes: list[FakeWorker]
) -> None:
    first, second = routers
    want = openai_answer(ask(first, "/v1/completions", LONG))
    before = starts(decodes)
    with in_mid_answer(decodes):
        events = read(second, LONG, second.process.kill)
    assert all(event.data != DONE for event in events)
    assert openai_answer(events)["choices"] != want["choices"]
    rest = ask(first, "/v1/completions", LONG, events[-1].id)
    assert openai_answer(events + rest) == want
    assert starts(decodes) == before + 2, "nothing was computed again"
    assert rest[0].id.partition(":")[0] != "", "and it could be resumed once more"
    routers.remove(second)
    second.stop()


def test_a_router_that_is_told_to_end_says_that_its_streams_can_be_resumed(
    routers: list[RouterProcess], decodes: list[FakeWorker]
) -> None:
    first, second = routers
    want = openai_answer(ask(first, "/v1/completions", LONG))
    before = starts(decodes)
    with in_mid_answer(decodes):
        *events, last = read(second, LONG, second.process.terminate)
    assert (last.kind, last.json["error"]["code"]) == ("error", "resume")
    assert second.process.wait(15) == 0
    rest = ask(first, "/v1/completions", LONG, last.id)
    assert openai_answer(events + rest) == want
    assert starts(decodes) == before + 2
    routers.remove(second)
    second.stop()


def test_the_same_router_goes_on_for_a_client_that_comes_back(
    routers: list[RouterProcess], decodes: list[FakeWorker]
) -> None:
    """Its first connection is still open."""
    first, _ = routers
    want = openai_answer(ask(first, "/v1/completions", LONG))
    before = starts(decodes)
    with ThreadPoolExecutor(1) as pool:
        with (
            in_mid_answer(decodes),
            httpx.Client(base_url=first.url, timeout=20.0, headers=NAMED) as other,
            other.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response,
        ):
            reader = sse_events(response.iter_lines())
            events = [next(reader) for _ in range(5)]
            resuming = pool.submit(ask, first, "/v1/completions", LONG, events[-1].id)
            *_, last = reader
            assert (last.kind, last.json["error"]["code"]) == ("error", "resume")
        assert openai_answer(events + resuming.result(20.0)) == want
    assert starts(decodes) == before + 2


def test_native_events_repeat_log_probabilities_that_the_rooms_worker_has_not(
    routers: list[RouterProcess], decodes: list[FakeWorker]
) -> None:
    """It got the tokens before its epoch without them."""
    first, _ = routers
    params = {"max_new_tokens": 40, "ignore_eos": True}
    body = {"text": "Hello", "sampling_params": params, "return_logprob": True, "top_logprobs_num": 1}
    want = native_answer(ask(first, "/generate", body))
    with (
        ThreadPoolExecutor(1) as pool,
        httpx.Client(base_url=first.url, timeout=20.0, headers=NAMED) as other,
    ):
        with (
            in_mid_answer(decodes),
            other.stream("POST", "/generate", json={**body, "stream": True}) as response,
        ):
            reader = sse_events(response.iter_lines())
            events = [next(reader) for _ in range(4)]
            max(decodes, key=_newest_room).drain()
            while len(events[-1].json["output_ids"]) < 20:
                events.append(next(reader))
            begun = [m.request for one in decodes for m in list(one.seen) if isinstance(m, Decode)]
            assert any(0 < len(request.forced) < 20 for request in begun), "it was started again"
            resuming = pool.submit(ask, first, "/generate", body, events[-1].id)
            *_, last = reader
            assert last.json["error"]["code"] == "resume"
        assert native_answer(events + resuming.result(20.0)) == want


def test_a_room_that_no_worker_has_is_computed_again(
    routers: list[RouterProcess], decodes: list[FakeWorker]
) -> None:
    first, second = routers
    want = openai_answer(ask(first, "/v1/completions", LONG))
    with in_mid_answer(decodes):
        events = read(second, LONG, second.process.kill)
    for worker in decodes[:1]:
        worker.close()
    decodes.remove(decodes[0])
    rest = ask(first, "/v1/completions", LONG, events[-1].id)
    assert openai_answer(events + rest) == want
    routers.remove(second)
    second.stop()


@pytest.mark.parametrize("accepts", ["*/*", "application/json"])
def test_a_client_that_does_not_name_events_gets_no_ids(service: Service, accepts: str) -> None:
    """vLLM's benchmark takes every line of a stream for data."""
    router, _ = service
    body = {"prompt": "Hello", "max_tokens": 3, "stream": True}
    answer = router.http.post("/v1/completions", json=body, headers={"Accept": accepts})
    lines = [line for line in answer.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines), lines


def test_the_client_in_the_documentation_loses_nothing(service: Service) -> None:
    """Its stream breaks off after every few bytes more."""
    router, _ = service
    page = (ROOT / "docs/resuming.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    documented: dict[str, Any] = {}
    exec(code, documented)
    documented["time"] = SimpleNamespace(sleep=lambda _: None)
    body = {"prompt": "Hello", "max_tokens": 12, "stream": True}
    want = [event.json["choices"] for event in ask(router, "/v1/completions", body)[:-1]]
    cuts = [0, 30, 400, 1100, 1500]

    def broken(request: httpx.Request) -> httpx.Response:
        headers = {key: value for key, value in request.headers.items() if key in ("accept", "last-event-id")}
        answer = router.http.post(request.url.path, content=request.content, headers=headers)
        return httpx.Response(answer.status_code, text=answer.text[: cuts.pop(0)] if cuts else answer.text)

    with httpx.Client(transport=httpx.MockTransport(broken), base_url="http://router") as client:
        got = [event["choices"] for event in documented["events"](client, "/v1/completions", body)]
    assert (got, cuts) == (want, [])
