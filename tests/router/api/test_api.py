"""The HTTP edge: a router process, fake workers, real clients."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from router.text.chat import Chat
from router.text.tokenization import Tokenization
from tests.router.conftest import RouterProcess, start_router, wait_until
from tests.support.fake_worker import FakeWorker, expected_tokens
from tests.support.sse import DONE, sse_events
from tests.support.tokenizers import byte_level
from wire.codec import pack_tokens
from wire.messages.rooms import Abort, Decode, Prefill
from wire.records import Role

Service = tuple[RouterProcess, FakeWorker, FakeWorker]
CHAT: list[Any] = [{"role": "user", "content": "Hello there"}]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Service]:
    """One prefill and one decode worker."""
    router = start_router(tmp_path_factory.mktemp("api"), model, trusted_tenant_header="X-Baton-Tenant")
    p = FakeWorker(Role.PREFILL, router.mailbox, cached_tokens=3)
    d = FakeWorker(Role.DECODE, router.mailbox, max_context=512, cached_tokens=3, step_s=0.001)
    router.wait_for_workers(2)
    yield router, p, d
    p.close()
    d.close()
    assert router.stop() == 0


@pytest.fixture(scope="module")
def tokenization(model: Path) -> Tokenization:
    return Tokenization(model)


def text_of(tokenization: Tokenization, prompt: list[int], count: int, choice: int = 0) -> str:
    detokenizer = tokenization.detokenizers.make()
    tokens = expected_tokens(pack_tokens(prompt), count, choice)
    return "".join(detokenizer.push(token) for token in tokens) + detokenizer.flush()


def test_openai_client_chat(service: Service, tokenization: Tokenization) -> None:
    router, *_ = service
    prompt = tokenization.encode_chat(Chat(CHAT))
    answer = router.openai().chat.completions.create(model="tiny", messages=CHAT, max_completion_tokens=12)
    assert answer.choices[0].message.content == text_of(tokenization, prompt, 12)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 12)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_openai_client_streams_the_same(service: Service, tokenization: Tokenization) -> None:
    router, *_ = service
    stream = router.openai().chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert len(chunks) == 13  # one per token and the usage
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == text_of(tokenization, tokenization.encode_chat(Chat(CHAT)), 12)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 11 + ["length"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


def test_completions_take_text_tokens_and_batches(service: Service, tokenization: Tokenization) -> None:
    router, *_ = service
    texts = ["Hello", "The quick brown"]
    tokens = [tokenization.encode(text) for text in texts]
    want = [text_of(tokenization, prompt, 5) for prompt in tokens]
    client = router.openai()
    for prompts, expected in ((texts[0], want[:1]), (tokens[0], want[:1]), (texts, want), (tokens, want)):
        answer = client.completions.create(model="tiny", prompt=prompts, max_tokens=5)
        assert [choice.text for choice in answer.choices] == expected
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 5 * len(expected)


def test_n_choices_each_with_their_own_noise(service: Service, tokenization: Tokenization) -> None:
    router, *_ = service
    prompt = tokenization.encode("Hello")
    answer = router.openai().completions.create(model="tiny", prompt=["Hello", "Hi"], n=3, max_tokens=6)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices[:3]] == [
        text_of(tokenization, prompt, 6, choice) for choice in range(3)
    ]
    stream = router.openai().completions.create(model="tiny", prompt="Hello", n=3, max_tokens=6, stream=True)
    texts = ["", "", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in answer.choices[:3]]


def test_logprobs_of_chat(service: Service) -> None:
    router, *_ = service
    client = router.openai()
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=4, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 4
    assert content[0].logprob == -0.25
    assert [top.logprob for top in content[0].top_logprobs] == [-0.25, -1.25]
    assert bytes(content[0].bytes or []).decode("utf-8", "replace") == content[0].token
    stream = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=4, logprobs=True, top_logprobs=2, stream=True
    )
    streamed = [entry for chunk in stream for entry in (chunk.choices[0].logprobs.content or [])]  # type: ignore[union-attr]
    assert streamed == content


def test_logprobs_of_completions(service: Service) -> None:
    router, *_ = service
    answer = router.openai().completions.create(model="tiny", prompt="Hello", max_tokens=4, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == [-0.25] * 4
    assert logprobs.tokens is not None
    assert logprobs.top_logprobs is not None
    assert [len(top) for top in logprobs.top_logprobs] == [2] * 4
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[0] == 0


def test_answers_with_many_logprobs_are_complete(service: Service, tokenization: Tokenization) -> None:
    """More than the event loop writes by itself."""
    router, *_ = service
    tokens = expected_tokens(pack_tokens(tokenization.encode("Hello")), 60, choice=7)
    body = {"prompt": "Hello", "n": 8, "max_tokens": 60, "logprobs": 20}
    choices = router.http.post("/v1/completions", json=body).json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(8))
    told = choices[7]["logprobs"]
    assert told["token_logprobs"] == [-0.25] * 60
    names = [tokenization.detokenizers.token_bytes(token) for token in tokens]
    plain = [
        (name.decode(), given) for name, given in zip(names, told["tokens"], strict=True) if name.isascii()
    ]
    assert all(name == given for name, given in plain)
    sampling = {"max_new_tokens": 60, "n": 8}
    body = {"text": "Hello", "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 20}
    answer = router.http.post("/generate", json=body).json()[7]
    assert answer["output_ids"] == tokens
    assert [len(top) for top in answer["meta_info"]["output_top_logprobs"]] == [20] * 60


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_over_several_tokens_ends_the_answer_and_the_work(
    service: Service, tokenization: Tokenization, stream: bool
) -> None:
    router, p, d = service
    text = text_of(tokenization, tokenization.encode("Hello"), 64)
    stop = text[20:26]
    want = text[: text.index(stop)]
    before = len(d.aborted)
    body = {"prompt": "Hello", "max_tokens": 64, "stop": [stop, "never this"], "stream": stream}
    if stream:
        got, finish = "", None
        for chunk in sse(router, "/v1/completions", body):
            got += chunk["choices"][0]["text"]
            finish = chunk["choices"][0]["finish_reason"]
    else:
        choice = router.http.post("/v1/completions", json=body).json()["choices"][0]
        got, finish = choice["text"], choice["finish_reason"]
    assert (got, finish) == (want, "stop")
    wait_until(lambda: len(d.aborted) == before + 1 and d.aborted <= p.aborted)


def sse(router: RouterProcess, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with router.http.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        *events, last = sse_events(response.iter_lines())
    assert last.data == DONE
    yield from (event.json for event in events)


def test_a_client_that_leaves_aborts_both(service: Service) -> None:
    router, p, d = service
    before = len(d.aborted)
    body = {"prompt": "Hello, leaver", "max_tokens": 400, "stream": True}
    with router.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    wait_until(lambda: len(d.aborted) == before + 1 and d.aborted <= p.aborted)
    assert router.admin.get("/debug/workers").json()["accounts"][0]["own"]["requests"] == 0


def test_native_generate(service: Service, tokenization: Tokenization) -> None:
    router, *_ = service
    prompt = tokenization.encode("Hello")
    body = {"text": "Hello", "sampling_params": {"max_new_tokens": 5}, "return_logprob": True}
    one = router.http.post("/generate", json=body).json()
    assert one["text"] == text_of(tokenization, prompt, 5)
    assert one["output_ids"] == expected_tokens(pack_tokens(prompt), 5)
    assert one["meta_info"]["finish_reason"] == {"type": "length", "length": 5}
    assert one["meta_info"]["output_token_logprobs"] == [[-0.25, token, None] for token in one["output_ids"]]
    batch = router.http.post(
        "/generate", json={"input_ids": [prompt, prompt[:1]], "sampling_params": {}}
    ).json()
    assert [len(answer["output_ids"]) for answer in batch] == [128, 128]
    last = list(sse(router, "/generate", {**body, "stream": True}))[-1]
    assert (last["text"], last["output_ids"]) == (one["text"], one["output_ids"])


def test_tokenize_and_detokenize(service: Service, tokenization: Tokenization, model: Path) -> None:
    router, *_ = service
    answer = router.http.post("/tokenize", json={"prompt": "Grüße 🙂"}).json()
    assert answer["tokens"] == tokenization.encode("Grüße 🙂")
    assert answer["max_model_len"] == 512
    assert "token_strs" not in answer
    named = router.http.post("/tokenize", json={"prompt": "Grüße 🙂", "return_token_strs": True}).json()
    library = AutoTokenizer.from_pretrained(model)
    assert named == {**answer, "token_strs": library.convert_ids_to_tokens(answer["tokens"])}
    assert router.http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "Grüße 🙂"}
    chat = router.http.post("/tokenize", json={"messages": CHAT}).json()
    assert chat["tokens"] == tokenization.encode_chat(Chat(CHAT))


def test_what_is_sent_to_the_workers(service: Service) -> None:
    router, p, d = service
    headers = {"X-Request-Id": "mine-1", "X-Baton-Tenant": "gold"}
    body = {
        "prompt": [1, 2, 3], "max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1,
        "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.1, "logit_bias": {"5": -100},
        "min_tokens": 1, "stop_token_ids": [7], "ignore_eos": True, "user": "bronze", "priority": 3,
        "cache_salt": "salt", "extra_key": "lora", "seed": 11, "allowed_token_ids": [5, 9],
    }  # fmt: skip
    response = router.http.post("/v1/completions", json=body, headers=headers)
    assert response.headers["x-request-id"] == "mine-1"
    request = next(m for m in d.seen if isinstance(m, Decode) and m.request.request_id == "mine-1").request
    assert (request.tenant, request.priority, request.cache_salt, request.extra_key) == (
        "gold",
        3,
        "salt",
        "lora",
    )
    s = request.sampling
    assert (s.temperature, s.top_p, s.top_k, s.min_p, s.seed) == (0.5, 0.9, 0, 0.1, 11)
    assert (s.presence_penalty, s.frequency_penalty, s.repetition_penalty) == (1, -1, 1.1)
    assert s.allowed_token_ids == (5, 9)
    assert (s.logit_bias, s.min_tokens, s.stop_token_ids, s.ignore_eos) == ({5: -100.0}, 1, (7,), True)
    assert next(m for m in p.seen if isinstance(m, Prefill) and m.request.request_id == "mine-1")
    seeds = set()
    for name in ("seed-1", "seed-2"):
        sent = {"prompt": [1], "max_tokens": 2}  # the second token comes from D: it has seen the Decode
        router.http.post("/v1/completions", json=sent, headers={"X-Request-Id": name})
        decode = next(m for m in d.seen if isinstance(m, Decode) and m.request.request_id == name)
        seeds.add(decode.request.sampling.seed)
    assert len(seeds) == 2


def test_the_models_generation_config_is_what_requests_leave_out(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "model")
    written = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05}
    (path / "generation_config.json").write_text(json.dumps(written))
    router = start_router(tmp_path, path)
    d = FakeWorker(Role.DECODE, router.mailbox, max_context=512)
    router.wait_for_workers(1)
    native = {"text": "a", "sampling_params": {"top_k": -1, "max_new_tokens": 2}}
    for name, url, body in (
        ("none", "/v1/completions", {"prompt": "a", "max_tokens": 2, "temperature": None}),
        ("some", "/v1/chat/completions", {"messages": CHAT, "max_tokens": 2, "temperature": 0, "min_p": 0}),
        ("native", "/generate", native),
    ):
        assert router.http.post(url, json=body, headers={"X-Request-Id": name}).status_code == 200
    sent = {m.request.request_id: m.request.sampling for m in d.seen if isinstance(m, Decode)}
    assert {name: getattr(sent["none"], name) for name in written} == written
    assert (sent["some"].temperature, sent["some"].min_p, sent["some"].top_p) == (0, 0, 0.95)
    assert (sent["native"].top_k, sent["native"].temperature) == (0, 0.6)
    d.close()
    assert router.stop() == 0


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/v1/completions", {"prompt": "a", "frobnicate": 1}, "frobnicate", "not supported"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "max_tokens", "echo"),
        (
            "/v1/completions",
            {"prompt": "a", "allowed_token_ids": [100000]},
            "allowed_token_ids",
            "vocabulary",
        ),
        ("/v1/completions", {"prompt": "a", "bad_words": [""]}, "bad_words", "at least 1"),
        ("/v1/completions", {"prompt": "a", "bad_words": ["x"] * 129}, "bad_words", "at most 128"),
        (
            "/v1/completions",
            {"prompt": "a", "max_tokens": 0, "echo": True, "stream": True},
            "stream",
            "alone",
        ),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 1, "stream": True}, "stream", "not streamed"),
        ("/v1/completions", {"prompt": "a", "best_of": 2}, "best_of", "not supported"),
        ("/v1/completions", {"prompt": "a", "temperature": -1}, "temperature", "greater"),
        ("/v1/completions", {"prompt": "a", "temperature": 101}, "temperature", "less"),
        ("/v1/completions", {"prompt": "a", "temperature": "inf"}, "temperature", "less|finite"),
        ("/v1/completions", {"prompt": "a", "top_p": "nan"}, "top_p", "finite"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"5": 100.1}}, "logit_bias", "less"),
        (
            "/v1/completions",
            {"prompt": "a", "logit_bias": {"5": "-Infinity"}},
            "logit_bias",
            "finite|greater",
        ),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"5": "NaN"}}, "logit_bias", "finite"),
        ("/v1/completions", {"prompt": "a", "presence_penalty": 2.1}, "presence_penalty", "less"),
        ("/v1/completions", {"prompt": "a", "repetition_penalty": 1e-30}, "repetition_penalty", "greater"),
        ("/v1/completions", {"prompt": "a", "repetition_penalty": 1e30}, "repetition_penalty", "less"),
        ("/v1/completions", {"prompt": "a", "top_k": 10**30}, "top_k", "less|parse"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 10**30}, "max_tokens", "less|parse"),
        (
            "/v1/chat/completions",
            {"messages": CHAT, "frequency_penalty": "inf"},
            "frequency_penalty",
            "finite",
        ),
        ("/generate", {"text": "a", "sampling_params": {"temperature": "Infinity"}}, "temperature", "finite"),
        ("/generate", {"text": "a", "sampling_params": {"logit_bias": {"5": -101}}}, "logit_bias", "greater"),
        ("/generate", {"text": "a", "sampling_params": {"min_p": "nan"}}, "min_p", "finite"),
        ("/v1/completions", {"prompt": "a", "stream_options": {}}, "stream_options", "stream=true"),
        (
            "/v1/completions",
            {"prompt": "a", "stream": True, "stream_options": {"foo": 1}},
            "stream_options.foo",
            "'stream_options.foo' is not supported",
        ),
        (
            "/v1/chat/completions",
            {"messages": CHAT, "stream": True, "stream_options": {"include_usage": "x"}},
            "stream_options.include_usage",
            "stream_options.include_usage: .*boolean",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "use_beam_search": True},
            "use_beam_search",
            "only False is taken",
        ),
        ("/v1/completions", {"prompt": "a", "truncate_prompt_tokens": 0}, "prompt", "empty"),
        (
            "/v1/chat/completions",
            {"messages": CHAT, "reasoning_effort": "hard"},
            "reasoning_effort",
            "minimal",
        ),
        ("/v1/completions", {"prompt": "a", "include_reasoning": False}, "include_reasoning", "text"),
        (
            "/v1/chat/completions",
            {"messages": CHAT, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "not both",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "content": None}], "continue_final_message": True},
            "continue_final_message",
            "no text",
        ),
        ("/v1/completions", {"prompt": [100000]}, "prompt", "vocabulary"),
        ("/v1/completions", {"prompt": []}, "prompt", "prompt"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"100000": 1}}, "logit_bias", "vocabulary"),
        ("/v1/completions", {"prompt": "a", "stop": [""]}, "stop", "empty"),
        ("/v1/completions", {"prompt": [1] * 500, "max_tokens": 100}, "prompt", "600 .* 512"),
        ("/v1/completions", {"prompt": "a", "n": 2000}, "n", "128"),
        ("/v1/chat/completions", {"messages": []}, "messages", "at least 1"),
        ("/v1/chat/completions", {"messages": [{"role": "x", "content": "a"}]}, "messages", "none of system"),
        ("/v1/chat/completions", {"messages": CHAT, "top_logprobs": 2}, "top_logprobs", "logprobs=true"),
        (
            "/v1/chat/completions",
            {"messages": CHAT, "response_format": {"type": "xml"}},
            "response_format.type",
            "json_schema",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages",
            "only text",
        ),
        ("/generate", {"text": "a", "input_ids": [1]}, "text", "either"),
        ("/generate", {"text": "a", "sampling_params": {"beams": 2}}, "beams", "not supported"),
    ],
)
def test_what_is_wrong_is_named(
    service: Service, path: str, body: dict[str, Any], param: str, words: str
) -> None:
    router, *_ = service
    response = router.http.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert re.search(words, error["message"]), error["message"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", '{"prompt": "a", "temperature": %s}'),
        ("/v1/completions", '{"prompt": "a", "logit_bias": {"5": %s}}'),
        ("/generate", '{"text": "a", "sampling_params": {"presence_penalty": %s}}'),
    ],
)
def test_numbers_that_are_not_finite_never_parse(service: Service, path: str, body: str, number: str) -> None:
    router, *_ = service
    response = router.http.post(path, content=(body % number).encode())
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_what_is_not_json_or_not_there(service: Service) -> None:
    router, *_ = service
    assert router.http.post("/v1/completions", content=b"{").status_code == 400
    assert router.http.post("/v1/completions", json=[1]).status_code == 400
    assert router.http.get("/v1/nothing").status_code == 404
    assert router.http.get("/v1/completions").status_code == 405
    with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
        router.openai().completions.create(model="other", prompt="a")


def test_null_means_unset(service: Service) -> None:
    router, *_ = service
    body = {"prompt": "a", "max_tokens": 1, "stop": None, "logprobs": None, "functions": None}
    assert router.http.post("/v1/completions", json=body).status_code == 200


def test_the_timeline_of_a_request(service: Service) -> None:
    router, p, d = service
    router.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3}, headers={"x-request-id": "t1"})
    wait_until(lambda: router.admin.get("/debug/trace/t1").json()["otherData"]["kv_bytes"] == 1024)
    trace = router.admin.get("/debug/trace/t1").json()
    other = trace["otherData"]
    assert (other["prefill"], other["decode"], other["kv_backend"]) == (p.record.id, d.record.id, "shm")
    assert 0 < other["ttft_ms"] <= other["total_ms"]
    lanes: dict[str, list[tuple[str, float]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            lanes.setdefault(event["args"]["worker"], []).append((event["name"], event["ts"]))
    assert [name for name, _ in lanes["router"]] == ["tokenize", "tokenizer_dispatch"]
    assert [name for name, _ in lanes[p.record.id]] == [
        "prefill_waiting", "prefill_forward", "prefill_transfer_kv_cache",
    ]  # fmt: skip
    assert [name for name, _ in lanes[d.record.id]] == ["decode_bootstrap", "decode_loop"]
    for stages in lanes.values():
        assert [at for _, at in stages] == sorted(at for _, at in stages)
    assert router.admin.get("/debug/trace/unknown").status_code == 404


def test_the_other_windows(service: Service) -> None:
    router, _, d = service
    assert router.http.get("/health").json() == {"status": "ok"}
    assert router.http.get("/ready").status_code == 200
    assert "version" in router.http.get("/version").json()
    assert router.http.get("/v1/models").json()["data"][0]["id"] == "tiny"
    said = {"prompt": [1, 2], "max_tokens": 3}
    assert router.http.post("/v1/completions", json=said).status_code == 200
    assert router.http.post("/v1/completions", json={"model": "none", **said}).status_code == 404
    metrics = router.admin.get("/metrics").text
    assert 'baton_router_workers{role="decode"} 1.0' in metrics
    assert 'baton_router_requests_total{status="200"}' in metrics
    assert "baton_router_stage_seconds_bucket" in metrics
    for name in ("itl_seconds", "tpot_seconds", "queue_seconds", "decode_seconds"):
        found = re.search(rf'^baton_router_{name}_count{{model="tiny"}} (\S+)', metrics, re.MULTILINE)
        assert found is not None, name
        assert float(found[1]) >= 1, name
    assert 'baton_router_rejects_total{cause="model_not_found"}' in metrics
    assert 'baton_router_cached_tokens_error_bucket{le="0.0"}' in metrics
    for name in ("batches", "gaps", "snapshots", "resets", "restarts"):
        assert f"baton_router_event_{name}_total 0.0" in metrics
    report = router.admin.get("/debug/inspect", params={"worker": d.record.id, "what": "memory"}).json()
    assert report == {"what": "memory"}
    assert router.admin.get("/debug/inspect", params={"worker": "nobody"}).status_code == 400


@pytest.mark.parametrize("router", [{"max_in_flight": 2, "worker_wait_s": 0.3}], indirect=True)
def test_full_and_empty_are_told_apart(router: RouterProcess, workers: list[FakeWorker]) -> None:
    assert router.http.get("/ready").status_code == 503
    response = router.http.post("/v1/completions", json={"prompt": "a"})
    assert response.status_code == 503
    assert "no decode worker" in response.json()["error"]["message"]
    workers.append(FakeWorker(Role.DECODE, router.mailbox, step_s=0.02))
    router.wait_for_workers(1)
    body = {"prompt": "a", "max_tokens": 1000, "n": 2, "stream": True}
    with router.http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()  # kept: the response closes with it
        next(lines)
        full = router.http.post("/v1/completions", json={"prompt": "a"})
        assert full.status_code == 429
        assert int(full.headers["retry-after"]) >= 1
        assert full.json()["error"]["type"] == "rate_limit_error"
    wait_until(lambda: workers[0].count(Abort) == 2)
    assert router.http.post("/v1/completions", json={"prompt": "a"}).status_code == 200
    assert router.http.post("/v1/completions", json={"prompt": "a", "n": 3}).status_code == 400
