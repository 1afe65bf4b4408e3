"""Fields that clients of other servers send: they change the answer as there, or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.api.openai.responses.schema import ResponseBody
from router.api.openai.schema import ChatBody, CompletionBody
from router.api.request_body import parse
from router.text.chat import Chat
from router.text.tokenization import Tokenization
from tests.router.conftest import RouterProcess, start_router
from tests.support.fake_worker import FakeWorker, expected_tokens
from tests.support.sse import sse_events
from wire.codec import pack_tokens
from wire.records import Role

CHAT: list[Any] = [{"role": "user", "content": "Hello there"}]
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[RouterProcess]:
    """With a worker for both phases."""
    router = start_router(tmp_path_factory.mktemp("fields"), model)
    d = FakeWorker(Role.DECODE, router.mailbox, max_context=512, step_s=0.001)
    router.wait_for_workers(1)
    yield router
    d.close()
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


def test_what_changes_nothing_is_accepted(router: RouterProcess) -> None:
    usual = post(router, CHATS, messages=CHAT, max_tokens=4)["choices"]
    harmless = {
        "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "x", "user": "u",
        "prompt_cache_key": "k", "session_id": "s", "parallel_tool_calls": False, "top_logprobs": 0,
        "reasoning_effort": "low", "include_reasoning": True, "prediction": {"type": "content"},
        "modalities": ["text"], "verbosity": "medium", "spaces_between_special_tokens": False,
        "use_beam_search": False, "separate_reasoning": True, "best_effort": None,
    }  # fmt: skip
    assert post(router, CHATS, messages=CHAT, max_tokens=4, **harmless)["choices"] == usual


@pytest.mark.parametrize("obfuscated", [True, False, None])
def test_stream_options_of_clients_are_accepted(obfuscated: bool | None) -> None:
    options = {"include_obfuscation": obfuscated}
    for kind, body in ((ChatBody, {"messages": CHAT}), (CompletionBody, {"prompt": "a"})):
        plain = parse(kind, {**body, "stream": True}).shown(False)
        assert parse(kind, {**body, "stream": True, "stream_options": options}).shown(False) == plain
    parse(ResponseBody, {"input": "a", "stream": True, "stream_options": options})


def test_a_chunk_has_the_usage_so_far(router: RouterProcess, tokenization: Tokenization) -> None:
    prompt = len(tokenization.encode_chat(Chat(CHAT)))
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = events(router, CHATS, messages=CHAT, max_tokens=5, stream_options=options)
    counts = [(chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"]) for chunk in chunks]
    assert counts == [(prompt, count) for count in range(1, 6)]
    assert last["choices"] == []
    assert last["usage"] == chunks[-1]["usage"]
    # Without include_usage there is none, as in vLLM.
    alone = events(
        router, CHATS, messages=CHAT, max_tokens=2, stream_options={"continuous_usage_stats": True}
    )
    assert all("usage" not in chunk for chunk in alone)


def test_token_ids_beside_the_text(router: RouterProcess, tokenization: Tokenization) -> None:
    prompts = [tokenization.encode(text) for text in ("Hello", "The quick")]
    asked = {"prompt": ["Hello", "The quick"], "max_tokens": 3, "return_token_ids": True}
    whole = post(router, COMPLETIONS, **asked)["choices"]
    want = [expected_tokens(pack_tokens(prompt), 3) for prompt in prompts]
    assert [choice["token_ids"] for choice in whole] == want
    assert [choice["prompt_token_ids"] for choice in whole] == prompts
    streamed: dict[int, list[int]] = {0: [], 1: []}
    told = []
    for event in events(router, COMPLETIONS, **asked):
        (choice,) = event["choices"]
        streamed[choice["index"]] += choice["token_ids"]
        told += [(choice["index"], choice["prompt_token_ids"])] if "prompt_token_ids" in choice else []
    assert list(streamed.values()) == want
    assert sorted(told) == list(enumerate(prompts))
    chat = {"messages": CHAT, "max_tokens": 3, "return_token_ids": True}
    ids = tokenization.encode_chat(Chat(CHAT))
    answer, (first, *rest) = post(router, CHATS, **chat), events(router, CHATS, **chat)
    assert answer["prompt_token_ids"] == first["prompt_token_ids"] == ids
    assert answer["choices"][0]["token_ids"] == expected_tokens(pack_tokens(ids), 3)
    assert all("prompt_token_ids" not in event for event in rest)


def test_tokens_named_by_their_ids(router: RouterProcess) -> None:
    asked = {"prompt": "Hello", "max_tokens": 2, "return_token_ids": True, "return_tokens_as_token_ids": True}
    (choice,) = post(router, COMPLETIONS, **asked, logprobs=1)["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(name.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"] for name in top)


@pytest.mark.parametrize("name", ["include_stop_str_in_output", "no_stop_trim"])
def test_a_stop_string_may_stay(router: RouterProcess, tokenization: Tokenization, name: str) -> None:
    tokens = expected_tokens(pack_tokens(tokenization.encode("Hello")), 64)
    detokenizer = tokenization.detokenizers.make()
    text = "".join(map(detokenizer.push, tokens))
    stop = text[20:26]
    want = text[: text.index(stop)]
    asked = {"prompt": "Hello", "max_tokens": 64, "stop": stop}
    assert post(router, COMPLETIONS, **asked)["choices"][0]["text"] == want
    assert post(router, COMPLETIONS, **asked, **{name: True})["choices"][0]["text"] == want + stop
    chunks = events(router, COMPLETIONS, **asked, **{name: True})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == want + stop


def test_a_prompt_is_cut(router: RouterProcess) -> None:
    prompt = list(range(1, 100))
    for wish, want in (
        ({"truncate_prompt_tokens": 5}, prompt[-5:]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, prompt[:5]),
        ({"truncate_prompt_tokens": 100}, prompt),
    ):
        asked = {"prompt": prompt, "max_tokens": 2, "return_token_ids": True, **wish}
        assert post(router, COMPLETIONS, **asked)["choices"][0]["prompt_token_ids"] == want
    asked = {"prompt": [1] * 600, "max_tokens": 12, "truncate_prompt_tokens": -1, "return_token_ids": True}
    assert len(post(router, COMPLETIONS, **asked)["choices"][0]["prompt_token_ids"]) == 500


def test_an_effort_is_the_templates_and_documents_too(router: RouterProcess) -> None:
    def prompt(**wish: Any) -> Any:
        return router.http.post("/tokenize", json={"messages": CHAT, **wish}).json()["tokens"]

    off = prompt(chat_template_kwargs={"enable_thinking": False})
    assert prompt(reasoning_effort="none") == off != prompt()
    assert prompt(reasoning_effort="high") == prompt()
    assert prompt(reasoning={"effort": "none"}) == off
    assert prompt(reasoning={"effort": "none"}, reasoning_effort="high") == prompt()
    assert prompt(reasoning_effort="high", chat_template_kwargs={"enable_thinking": False}) == off
    assert prompt(documents=[{"title": "a"}]) == prompt()  # which this template does not know


def test_an_echo_begins_with_the_prompt(router: RouterProcess, tokenization: Tokenization) -> None:
    texts = ["Hello there", "The quick brown"]
    prompts = [tokenization.encode(text) for text in texts]
    asked: dict[str, Any] = {"prompt": texts, "max_tokens": 3, "n": 2}
    plain = post(router, COMPLETIONS, **asked)["choices"]
    echoed = post(router, COMPLETIONS, **asked, echo=True)["choices"]
    assert [one["text"] for one in echoed] == [texts[at // 2] + one["text"] for at, one in enumerate(plain)]
    by_ids = post(router, COMPLETIONS, **{**asked, "prompt": prompts}, echo=True)["choices"]
    assert [one["text"] for one in by_ids] == [one["text"] for one in echoed]
    streamed = [""] * 4
    for event in events(router, COMPLETIONS, **asked, echo=True):
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert streamed == [one["text"] for one in echoed]


def test_an_echo_has_log_probabilities_of_all_tokens(
    router: RouterProcess, tokenization: Tokenization
) -> None:
    text = "Hello there"
    tokens = tokenization.encode(text)
    for outputs in (0, 2):
        asked = {"prompt": text, "max_tokens": outputs, "echo": True, "logprobs": 1, "return_token_ids": True}
        answer = post(router, COMPLETIONS, **asked)
        (choice,) = answer["choices"]
        told = choice["logprobs"]
        assert told["token_logprobs"] == [None, *[-0.125] * (len(tokens) - 1), *[-0.25] * outputs]
        assert "".join(told["tokens"][: len(tokens)]) == text
        assert [text[at:][:1] for at in told["text_offset"][: len(tokens)]] == [
            name[0] for name in told["tokens"][: len(tokens)]
        ]
        assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"] == outputs
        assert choice["finish_reason"] == "length"
        if not outputs:
            assert choice["text"] == text


@pytest.mark.parametrize(("in_echo", "beside"), [(1, 3), (3, 1), (0, 2), (2, 0)])
def test_an_echo_and_the_prompts_own_list_have_each_as_many_others_as_asked_for(
    router: RouterProcess, in_echo: int, beside: int
) -> None:
    asked = {"prompt": "Hello there", "max_tokens": 2, "echo": True, "logprobs": in_echo}
    (alone,) = post(router, COMPLETIONS, **asked)["choices"]
    (choice,) = post(router, COMPLETIONS, **asked, prompt_logprobs=beside)["choices"]
    assert choice["logprobs"] == alone["logprobs"]
    del asked["logprobs"]
    (alone,) = post(router, COMPLETIONS, **asked, prompt_logprobs=beside)["choices"]
    assert choice["prompt_logprobs"] == alone["prompt_logprobs"]


def test_log_probabilities_of_a_chats_prompt(router: RouterProcess, tokenization: Tokenization) -> None:
    prompt = tokenization.encode_chat(Chat(CHAT))
    told = post(router, CHATS, messages=CHAT, max_tokens=2, prompt_logprobs=0)["prompt_logprobs"]
    assert told[0] is None
    assert [
        float(entry[str(token)]["logprob"]) for token, entry in zip(prompt[1:], told[1:], strict=True)
    ] == [-0.125] * (len(prompt) - 1)


def test_a_limit_of_thoughts_needs_their_tags(tmp_path: Path, model: Path) -> None:
    router = start_router(tmp_path, model, reasoning_parser="none")
    answer = router.http.post(CHATS, json={"messages": CHAT, "max_tokens": 9, "thinking_token_budget": 2})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "thinking_token_budget")
    assert "reasoning_parser" in error["message"]
    assert router.stop() == 0
