"""What vLLM's and SGLang's own tests want of an answer: docs/api-parity.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from router.api.openai.logprobs import TextOffsets, TokenNames, completion_logprobs
from router.text.tokenization import Tokenization
from tests.router.conftest import RouterProcess, start_router
from tests.support.fake_worker import FakeWorker, expected_tokens
from tests.support.sse import sse_events
from wire.codec import pack_tokens
from wire.records import Role
from wire.request import TokenLogprobs

CHAT: list[Any] = [{"role": "user", "content": "Hello there"}]
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[RouterProcess]:
    """With a worker for both phases."""
    router = start_router(tmp_path_factory.mktemp("answers"), model)
    worker = FakeWorker(Role.DECODE, router.mailbox, max_context=512, cached_tokens=3, step_s=0.001)
    router.wait_for_workers(1)
    yield router
    worker.close()
    assert router.stop() == 0


@pytest.fixture(scope="module")
def tokenization(model: Path) -> Tokenization:
    return Tokenization(model)


def post(router: RouterProcess, path: str, **body: Any) -> dict[str, Any]:
    answer = router.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def events(router: RouterProcess, path: str, **body: Any) -> list[dict[str, Any]]:
    with router.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        return [event.json for event in list(sse_events(response.iter_lines()))[:-1]]


ANSWERED: dict[str, dict[str, Any]] = {
    CHATS: {"messages": CHAT, "max_tokens": 3, "logprobs": True},
    COMPLETIONS: {"prompt": ["a", "b"], "max_tokens": 3, "n": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 16},
    "/v1/messages": {"messages": CHAT, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": CHAT},
    "/v1/embeddings": {"input": ["a", "b"]},
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 3}},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [70]},
}


def test_answers_are_as_the_document_says(router: RouterProcess) -> None:
    """Every endpoint's, and an error of it."""
    document = router.http.get("/openapi.json").json()
    posts = {path: item["post"]["responses"] for path, item in document["paths"].items() if "post" in item}
    assert posts.keys() == ANSWERED.keys()
    for path, described in posts.items():
        for body, status in ((ANSWERED[path], 200), ({"nothing": 1}, 400)):
            answer = router.http.post(path, json=body)
            assert answer.status_code == status, answer.text
            schema = described[str(status)]["content"]["application/json"]["schema"]
            assert schema.keys() & {"properties", "anyOf", "$ref"}
            jsonschema.validate(answer.json(), {**schema, "components": document["components"]})


def text_of(tokenization: Tokenization, prompt: list[int], count: int) -> str:
    detokenizer = tokenization.detokenizers.make()
    return "".join(map(detokenizer.push, expected_tokens(pack_tokens(prompt), count))) + detokenizer.flush()


@pytest.mark.parametrize("asked", [{}, {"logprobs": False}, {"logprobs": None}, {"top_logprobs": None}])
def test_a_chat_has_no_log_probabilities_unless_asked_for(
    router: RouterProcess, asked: dict[str, Any]
) -> None:
    (choice,) = post(router, CHATS, messages=CHAT, max_tokens=3, **asked)["choices"]
    assert choice["logprobs"] is None
    for event in events(router, CHATS, messages=CHAT, max_tokens=3, **asked):
        assert event["choices"][0].get("logprobs") is None


@pytest.mark.parametrize("top", [None, 0, 1, 5, 20])
def test_each_token_of_a_chat_has_as_many_others_as_asked_for(router: RouterProcess, top: int | None) -> None:
    asked = {"messages": CHAT, "max_tokens": 3, "logprobs": True, "top_logprobs": top}
    (choice,) = post(router, CHATS, **asked)["choices"]
    content = choice["logprobs"]["content"]
    assert [len(token["top_logprobs"]) for token in content] == [top or 0] * 3
    assert all(token.keys() == {"token", "logprob", "bytes", "top_logprobs"} for token in content)
    streamed = [event["choices"][0]["logprobs"]["content"] for event in events(router, CHATS, **asked)]
    assert [token for tokens in streamed for token in tokens] == content


@pytest.mark.parametrize("top", [None, 0, 1, 5])
def test_each_token_of_a_completion_has_as_many_others_as_asked_for(
    router: RouterProcess, top: int | None
) -> None:
    asked = {"prompt": "Hello", "max_tokens": 3, "logprobs": top}
    (choice,) = post(router, COMPLETIONS, **asked)["choices"]
    if top is None:
        assert choice["logprobs"] is None
        return
    told = choice["logprobs"]
    assert [len(told[name]) for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs")] == [
        3
    ] * 4
    assert all(len(others) <= top + 1 for others in told["top_logprobs"])
    for token, logprob, others in zip(
        told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True
    ):
        assert others[token] == logprob


def test_a_sampled_token_is_among_the_best_of_a_completion(tokenization: Tokenization) -> None:
    """As OpenAI has it: one more than was asked for, if the model preferred others."""
    a, b, c = tokenization.encode("abc")
    names = TokenNames(tokenization.detokenizers, as_ids=False)
    scores = [
        None,
        TokenLogprobs(-3.0, [(b, -0.1), (c, -2.0)]),
        TokenLogprobs(-0.1, [(b, -0.1), (c, -2.0)]),
        TokenLogprobs(-3.0, []),
    ]
    offsets = TextOffsets(tokenization.detokenizers.make())
    assert completion_logprobs(names, [a, a, b, a], scores, offsets)["top_logprobs"] == [
        None, {"b": -0.1, "c": -2.0, "a": -3.0}, {"b": -0.1, "c": -2.0}, {"a": -3.0},
    ]  # fmt: skip


def test_of_tokens_with_one_text_the_best_is_told(tokenization: Tokenization) -> None:
    class OneName(TokenNames):
        def of_completion(self, token: int) -> str:
            return "same"

    scores = [TokenLogprobs(-3.0, [(1, -0.1), (2, -2.0)])]
    offsets = TextOffsets(tokenization.detokenizers.make())
    told = completion_logprobs(OneName(tokenization.detokenizers, False), [3], scores, offsets)
    assert told["top_logprobs"] == [{"same": -0.1}]


@pytest.mark.parametrize("several", [1, 3])
def test_a_prompts_tokens_have_log_probabilities(router: RouterProcess, several: int) -> None:
    for path, prompt in ((CHATS, {"messages": CHAT}), (COMPLETIONS, {"prompt": "Hello there"})):
        answer = post(router, path, **prompt, max_tokens=1, prompt_logprobs=several)
        told = answer["prompt_logprobs"] if path == CHATS else answer["choices"][0]["prompt_logprobs"]
        assert len(told) == answer["usage"]["prompt_tokens"]
        assert told[0] is None
        assert all(1 <= len(entry) <= several + 1 for entry in told[1:])
        without = post(router, path, **prompt, max_tokens=1)
        assert (without if path == CHATS else without["choices"][0]).get("prompt_logprobs") is None


def test_offsets_in_a_stream_are_those_of_a_whole_answer(
    router: RouterProcess, tokenization: Tokenization
) -> None:
    """While the text lags behind the tokens: its end may be the beginning of a stop string."""
    prompt = tokenization.encode("Hello")
    whole = text_of(tokenization, prompt, 24)
    asked = {"prompt": "Hello", "max_tokens": 24, "logprobs": 0, "stop": [whole[10:14] + "<never>"]}
    (choice,) = post(router, COMPLETIONS, **asked)["choices"]
    assert choice["text"] == whole
    streamed = [event["choices"][0] for event in events(router, COMPLETIONS, **asked)]
    assert "".join(one["text"] for one in streamed) == whole
    for name in ("tokens", "text_offset", "token_logprobs"):
        told = [value for one in streamed if one["logprobs"] for value in one["logprobs"][name]]
        assert told == choice["logprobs"][name]
    detokenizer = tokenization.detokenizers.make()
    begun = [0]
    for token in expected_tokens(pack_tokens(prompt), 24):
        begun.append(begun[-1] + len(detokenizer.push(token)))
    assert choice["logprobs"]["text_offset"] == begun[:-1]


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("usage", [False, True, None])
def test_usage_comes_when_it_is_asked_for(
    router: RouterProcess, path: str, usage: bool | None, running: bool
) -> None:
    prompt: dict[str, Any] = {"messages": CHAT} if path == CHATS else {"prompt": "Hello"}
    options = {"include_usage": usage, "continuous_usage_stats": running}
    given = {"stream_options": options}
    told = events(router, path, **prompt, max_tokens=4, **given)
    if not usage:
        assert all(event.get("usage") is None for event in told)
        return
    *chunks, last = told
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 4)
    assert last["usage"] == post(router, path, **prompt, max_tokens=4)["usage"]
    assert [event.get("usage") is not None for event in chunks] == [running] * len(chunks)


def test_chunks_of_a_stream_belong_together(router: RouterProcess) -> None:
    for path, prompt, kind in (
        (CHATS, {"messages": CHAT}, "chat.completion.chunk"),
        (COMPLETIONS, {"prompt": "Hello"}, "text_completion"),
    ):
        told = events(router, path, **prompt, max_tokens=4, n=2)
        assert {(event["object"], event["model"]) for event in told} == {(kind, "tiny")}
        assert len({(event["id"], event["created"]) for event in told}) == 1
        for index in (0, 1):
            mine = [event["choices"][0] for event in told if event["choices"][0]["index"] == index]
            assert [one["finish_reason"] for one in mine] == [None] * (len(mine) - 1) + ["length"]
            if path == CHATS:
                assert ["role" in one["delta"] for one in mine] == [True] + [False] * (len(mine) - 1)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_choices_of_a_chat_repeat_with_their_seed(router: RouterProcess, count: int) -> None:
    asked = {"messages": CHAT, "max_tokens": 4, "n": count, "seed": 7, "temperature": 1.0}
    answer = post(router, CHATS, **asked)
    assert [choice["index"] for choice in answer["choices"]] == list(range(count))
    assert answer["usage"]["completion_tokens"] == 4 * count
    assert post(router, CHATS, **asked)["choices"] == answer["choices"]
    texts = [""] * count
    for event in events(router, CHATS, **asked):
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == [choice["message"]["content"] for choice in answer["choices"]]


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_of_a_batch_keep_their_places(
    router: RouterProcess, tokenization: Tokenization, stream: bool
) -> None:
    prompts = [f"Prompt {number}" for number in range(10)]
    want = [text_of(tokenization, tokenization.encode(prompt), 5) for prompt in prompts]
    asked = {"prompt": prompts, "max_tokens": 5}
    if stream:
        got = [""] * len(prompts)
        for event in events(router, COMPLETIONS, **asked):
            got[event["choices"][0]["index"]] += event["choices"][0]["text"]
    else:
        got = [choice["text"] for choice in post(router, COMPLETIONS, **asked)["choices"]]
    assert got == want


def test_tokens_in_and_tokens_out(router: RouterProcess, tokenization: Tokenization) -> None:
    """Text, ids and names of tokens agree, for an answer and its next turn."""
    prompt = tokenization.encode("Grüße 🙂")
    asked = {"prompt": prompt, "max_tokens": 12, "logprobs": 1, "return_token_ids": True}
    answer = post(router, COMPLETIONS, **asked)
    (choice,) = answer["choices"]
    assert choice["prompt_token_ids"] == prompt
    assert choice["token_ids"] == expected_tokens(pack_tokens(prompt), 12)
    assert choice["text"] == text_of(tokenization, prompt, 12)
    assert (
        len(choice["logprobs"]["tokens"]) == len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
    )
    said = router.http.post("/detokenize", json={"tokens": choice["token_ids"]}).json()["prompt"]
    assert said == choice["text"]
    longer = [*prompt, *choice["token_ids"]]
    (again,) = post(router, COMPLETIONS, **{**asked, "prompt": longer})["choices"]
    assert again["prompt_token_ids"] == longer


def test_an_answer_is_as_long_as_the_context_unless_said(router: RouterProcess) -> None:
    answer = post(router, CHATS, messages=CHAT)
    usage = answer["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"] == 512
    assert answer["choices"][0]["finish_reason"] == "length"
    for name in ("max_tokens", "max_completion_tokens"):
        assert post(router, CHATS, messages=CHAT, **{name: 5})["usage"]["completion_tokens"] == 5


def test_chats_and_tools_are_counted_as_they_are_answered(router: RouterProcess) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    for body in ({"messages": CHAT}, {"messages": CHAT, "tools": tools}):
        counted = router.http.post("/tokenize", json=body).json()
        answered = post(router, CHATS, **body, max_tokens=1, return_token_ids=True)
        assert counted["tokens"] == answered["prompt_token_ids"]
        assert counted["count"] == len(counted["tokens"])
    assert router.http.post("/tokenize", json={}).status_code == 400
    assert router.http.post("/tokenize", json={"prompt": 3}).status_code == 400
    assert router.http.post("/detokenize", json={"tokens": ["a"]}).status_code == 400
    assert router.http.post("/detokenize", json={"tokens": [10**6]}).status_code == 400
    assert router.http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_a_request_has_a_name(router: RouterProcess) -> None:
    """The client's, or a new one."""
    body = {"prompt": "a", "max_tokens": 1}
    names = [router.http.post(COMPLETIONS, json=body).headers["x-request-id"] for _ in range(2)]
    assert len(set(names)) == 2
    mine = router.http.post(COMPLETIONS, json=body, headers={"X-Request-Id": "mine"})
    assert mine.headers["x-request-id"] == "mine"
    wrong = router.http.post(COMPLETIONS, json={}, headers={"X-Request-Id": "wrong"})
    assert (wrong.status_code, wrong.headers["x-request-id"]) == (400, "wrong")


def test_models_are_listed_as_openai_lists_them(router: RouterProcess) -> None:
    listed = router.http.get("/v1/models").json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 512)
    assert router.http.get("/v1/models/tiny").json() == card
    assert [one.id for one in router.openai().models.list()] == ["tiny"]
    assert post(router, COMPLETIONS, prompt="a", max_tokens=1)["model"] == "tiny"


def test_cached_tokens_are_told(router: RouterProcess) -> None:
    """Anthropic's form tells computed and cached ones apart; another salt is another request."""
    for path, prompt in ((CHATS, {"messages": CHAT}), (COMPLETIONS, {"prompt": "Hello there"})):
        usage = post(router, path, **prompt, max_tokens=1)["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
        assert usage["total_tokens"] == usage["prompt_tokens"] + 1
        options = {"include_usage": True}
        assert events(router, path, **prompt, max_tokens=1, stream_options=options)[-1]["usage"] == usage
    chat = post(router, CHATS, messages=CHAT, max_tokens=1)["usage"]
    asked = {"messages": CHAT, "max_tokens": 1}
    usage = post(router, "/v1/messages", **asked)["usage"]
    assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (3, 0)
    assert usage["input_tokens"] == chat["prompt_tokens"] - 3
    with router.http.stream("POST", "/v1/messages", json={**asked, "stream": True}) as answer:
        told = [event.json for event in sse_events(answer.iter_lines())]
    assert {**told[0]["message"]["usage"], **told[-2]["usage"]} == usage
    response = post(router, "/v1/responses", input="Hello there", max_output_tokens=1)["usage"]
    assert response["input_tokens_details"]["cached_tokens"] == 3
