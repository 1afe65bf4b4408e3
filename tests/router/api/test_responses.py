"""OpenAI's Responses API: items and messages, events, and turns that go on from kept ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from common.errors import InvalidRequest, Overloaded
from router.api.answer_parts import AnswerParts, UnstreamedDraft
from router.api.openai.logprobs import TokenNames
from router.api.openai.responses.answers import ResponseDraft, ResponseEvents
from router.api.openai.responses.output import OutputItems, new_response_id, response_of
from router.api.openai.responses.schema import ResponseBody
from router.api.request_body import parse
from router.streams.generation import ChoiceCounts, Submission
from router.text.chat import Chat
from router.text.output_parts import CallArguments, CallBroken, CallStart, Content, Part, Reasoning
from router.text.tokenization import Tokenization
from router.text.tool_formats.syntax import Markers
from tests.router.conftest import RouterProcess, start_router, wait_until
from tests.support.fake_worker import FakeWorker, expected_tokens
from tests.support.sse import sse_events
from wire.codec import pack_tokens
from wire.messages.rooms import Decode, Prefill
from wire.records import Role
from wire.request import FinishReason, GrammarKind, OutputDelta, SamplingParams

USER = {"role": "user", "content": "Hello there"}
CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a":1}'}
CALLED = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
GAVE = {"type": "function_call_output", "call_id": "c1", "output": "3"}
THOUGHT = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
}
SAID = {
    "type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "phase": None,
    "content": [{"type": "output_text", "text": "Hi", "annotations": [], "logprobs": None}],
}  # fmt: skip


def body(**fields: Any) -> ResponseBody:
    return parse(ResponseBody, {"input": "Hello there", **fields})


CHATS: list[tuple[Any, list[dict[str, Any]]]] = [
    ("Hello there", [USER]),
    ([USER], [USER]),
    (
        [
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
            }
        ],
        [{"role": "user", "content": "a\nb"}],
    ),
    (
        [USER, THOUGHT, SAID, CALL, GAVE, {"role": "developer", "content": "now"}],
        [
            USER,
            {"role": "assistant", "content": "Hi", "reasoning_content": "hm", "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "3"},
            {"role": "developer", "content": "now"},
        ],
    ),
    (
        [USER, CALL, {**CALL, "call_id": "c2"}, GAVE, SAID, SAID],
        [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALLED, {**CALLED, "id": "c2"}]},
            {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "3"},
            {"role": "assistant", "content": "Hi"},
            {"role": "assistant", "content": "Hi"},
        ],
    ),
]


@pytest.mark.parametrize(("given", "messages"), CHATS)
def test_items_become_the_messages_of_a_template(given: Any, messages: list[dict[str, Any]]) -> None:
    asked = body(input=given, instructions="Be brief", reasoning={"effort": "low"})
    chat = asked.make_chat([], asked.items)
    assert chat.messages == [{"role": "system", "content": "Be brief"}, *messages]
    assert chat.template_kwargs["reasoning_effort"] == "low"
    assert chat.add_generation_prompt


@pytest.mark.parametrize("status", ["in_progress", "incomplete"])
def test_the_answer_goes_on_with_an_unfinished_text(status: str) -> None:
    unfinished = {**SAID, "status": status}
    asked = body(input=[USER, unfinished])
    chat = asked.make_chat([], asked.items)
    assert chat.messages == [USER, {"role": "assistant", "content": "Hi"}]
    assert chat.continued == "Hi"
    assert not chat.add_generation_prompt
    later = body(input=[USER, unfinished, SAID, USER])
    assert later.make_chat([], later.items).messages == [USER, {"role": "assistant", "content": "HiHi"}, USER]
    for items in (
        [USER, {**SAID, "status": "completed"}],
        [{**USER, "status": status}],
        [USER, unfinished, USER],
    ):
        other = body(input=items)
        assert other.make_chat([], other.items).add_generation_prompt


def test_a_call_may_be_of_an_earlier_turn() -> None:
    before = [USER, {"role": "assistant", "content": None, "tool_calls": [CALLED]}]
    asked = body(input=[GAVE])
    assert asked.make_chat(before, asked.items).messages[-1]["name"] == "add"


SCHEMA = {"type": "object", "properties": {}}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [GAVE]}, r"input\.0\.call_id"),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, "web_search_call"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input_image"),
    ({"input": [{**USER, "more": 1}]}, "more"),
    ({"n": 2}, "one answer"),
    ({"tools": [{"type": "web_search"}]}, r"tools\.0: 'web_search' is not supported"),
    ({"tools": [{"type": "function"}]}, r"tools\.0\.name"),
    ({"tool_choice": {"type": "function", "name": "f"}}, "no tools to choose from"),
    ({"truncation": "auto"}, "truncation"),
    ({"background": True}, "background"),
    ({"conversation": "c"}, "conversation"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"include": ["web_search_call.results"]}, "include"),
    ({"text": {"format": {"type": "json_schema"}}}, "belongs to"),
    ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "together with text.format"),
]


@pytest.mark.parametrize(("fields", "words"), WRONG, ids=[str(fields)[:60] for fields, _ in WRONG])
def test_what_is_wrong_is_named(fields: dict[str, Any], words: str) -> None:
    def read() -> None:
        wrong = body(**fields)
        wrong.wanted_grammar(Markers({}))
        wrong.make_chat([], wrong.items)

    with pytest.raises(InvalidRequest, match=words):
        read()


PARTS = [
    [Reasoning("h"), Reasoning("m")], [Content("I "), Content("add")], [CallStart(0, "c1", "add")],
    [CallArguments(0, '{"a"'), CallArguments(0, ":1}")], [CallStart(1, "c2", "sub")],
    [CallBroken(1, "<call>")], [Content("!")],
]  # fmt: skip


def test_a_call_that_breaks_off_is_incomplete() -> None:
    output = OutputItems("resp_1")
    list(output.add([CallStart(0, "c1", "add"), CallArguments(0, '{"a'), CallBroken(0, "<call>")], True))
    assert [(item["type"], item["status"], item["arguments"]) for item in output.whole] == [
        ("function_call", "incomplete", '{"a')
    ]


def test_parts_become_items_and_events() -> None:
    output = OutputItems("resp_1")
    events = [event for parts in PARTS for event in output.add(parts, False)] + list(output.close())
    kinds = [(item["type"], item["status"]) for item in output.items]
    assert kinds == [
        ("reasoning", "completed"), ("message", "completed"), ("function_call", "completed"),
        ("function_call", "incomplete"), ("message", "completed"),
    ]  # fmt: skip
    assert [item["type"] for item in output.whole].count("function_call") == 1
    thought, said, call, _, rest = output.items
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert [part["text"] for part in said["content"] + rest["content"]] == ["I add", "<call>!"]
    assert (call["call_id"], call["name"], call["arguments"]) == ("c1", "add", '{"a":1}')
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert done == output.items
    assert [item["id"] for item in added] == [item["id"] for item in output.items]
    assert {item["status"] for item in added} == {"in_progress"}
    assert [event["delta"] for event in events if event["type"].endswith("arguments.delta")] == [
        '{"a"',
        ":1}",
    ]
    assert all(
        event["item_id"] == output.items[event["output_index"]]["id"]
        for event in events
        if "item_id" in event
    )


def test_ids_are_unguessable() -> None:
    ids = {new_response_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert {len(one) for one in ids} == {len("resp_") + 32}
    output = OutputItems("resp_ab12")
    list(output.add([Reasoning("a"), Content("b")], False))
    assert [item["id"] for item in output.items] == ["rs_ab12_0", "msg_ab12_1"]
    assert {response_of(item["id"]) for item in output.items} == {"resp_ab12"}


def test_log_probabilities_are_those_of_a_messages_text() -> None:
    output = OutputItems("resp_1")
    steps: list[tuple[list[Part], str]] = [
        ([Reasoning("h")], "a"), ([], "b"), ([Content("I")], "c"), ([], "d"), ([Content("s")], "e"),
        ([CallStart(0, "c1", "f")], "f"), ([CallArguments(0, "{}")], "g"), ([Content("!")], "h"), ([], "i"),
    ]  # fmt: skip
    events = [event for parts, token in steps for event in output.add(parts, False, [{"token": token}])]
    events += output.close()

    def named(scores: list[dict[str, str]]) -> str:
        return "".join(score["token"] for score in scores)

    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [named(event["logprobs"]) for event in deltas] == ["c", "de", "h"]
    texts = [item["content"][0] for item in output.items if item["type"] == "message"]
    assert [named(text["logprobs"]) for text in texts] == ["cde", "hi"]
    done = [event["logprobs"] for event in events if event["type"] == "response.output_text.done"]
    assert [named(scores) for scores in done] == ["cde", "hi"]


NAMES = TokenNames(SimpleNamespace(token_bytes=bytes), False)  # type: ignore[arg-type]


def draft() -> ResponseDraft:
    submission = Submission(request_id="r", prompts=[[1, 2]], sampling=SamplingParams(), model="tiny")
    return ResponseDraft("resp_1", body(), submission, AnswerParts(None, 0), NAMES)


def test_a_stream_that_fails_says_so() -> None:
    events = ResponseEvents(draft(), lambda *_: None)
    told = [event.json for event in sse_events(events.failure(Overloaded("full", 1.0)).decode().split("\n"))]
    assert [event["type"] for event in told] == [
        "response.created",
        "response.in_progress",
        "response.failed",
    ]
    assert [event["sequence_number"] for event in told] == [0, 1, 2]
    assert told[-1]["response"]["status"] == "failed"
    assert told[-1]["response"]["error"] == {"code": "rate_limit_exceeded", "message": "full"}


@pytest.mark.parametrize(
    ("finish", "status"), [(FinishReason.STOP, "completed"), (FinishReason.LENGTH, "incomplete")]
)
def test_why_a_response_ended(finish: FinishReason, status: str) -> None:
    one = draft()
    UnstreamedDraft(one).add(ChoiceCounts(0, 3, 1), "Hi", OutputDelta([1, 2, 3], finish=finish))
    response = one.whole()
    assert (response["status"], response["output"][0]["status"]) == (status, status)
    assert response["usage"] == {
        "input_tokens": 2, "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": 3, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 5,
    }  # fmt: skip


# -- with routers ----------------------------------------------------------------------------------

GOLD, LEAD = "the key of the tenant gold", "the key of the tenant lead"
Service = tuple[list[RouterProcess], FakeWorker]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Service]:
    """Two routers with keys, and a worker for both phases."""
    directory = tmp_path_factory.mktemp("responses")
    keys = [{"key": GOLD, "tenant": "gold"}, {"key": LEAD, "tenant": "lead"}]
    (directory / "keys.yaml").write_text(json.dumps(keys))
    given: dict[str, Any] = {"api_keys_file": str(directory / "keys.yaml")}
    first = start_router(directory, model, **given)
    second = start_router(directory, model, directory=first.mailbox, **given)
    worker = FakeWorker(Role.DECODE, first.mailbox, max_context=512, step_s=0.001)
    for router in (first, second):
        router.http.headers["authorization"] = f"Bearer {GOLD}"
        router.wait_for_workers(1)
    yield [first, second], worker
    worker.close()
    assert [second.stop(), first.stop()] == [0, 0]


@pytest.fixture(scope="module")
def tokenization(model: Path) -> Tokenization:
    return Tokenization(model)


def said(tokenization: Tokenization, messages: list[dict[str, Any]], count: int) -> str:
    detokenizer = tokenization.detokenizers.make()
    tokens = expected_tokens(pack_tokens(tokenization.encode_chat(Chat(messages))), count)
    return "".join(map(detokenizer.push, tokens)) + detokenizer.flush()


def create(router: RouterProcess, **fields: Any) -> dict[str, Any]:
    asked = {"model": "tiny", "input": "Hello there", "max_output_tokens": 12, **fields}
    answer = router.http.post("/v1/responses", json=asked)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_what_a_request_says_of_itself_is_told(service: Service) -> None:
    (router, _), _ = service
    said = {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "safety_identifier": "s", "user": "u"}
    answer = create(router, **said)
    assert {name: answer[name] for name in said} == said
    assert {name: create(router)[name] for name in said} == dict.fromkeys(said)
    asked = {"input": "a", "max_output_tokens": 2, "stream": True, **said}
    lines = router.http.post("/v1/responses", json=asked).text.split("\n")
    first, *_, last = (event.json for event in sse_events(lines))
    for event in (first, last):
        assert {name: event["response"][name] for name in said} == said
    for name, wrong in (("prompt_cache_retention", "1h"), ("safety_identifier", "x" * 300)):
        refused = router.http.post("/v1/responses", json={"input": "a", name: wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


def test_a_conversation_over_both_routers(service: Service, tokenization: Tokenization) -> None:
    (first, second), _ = service
    one = create(first, instructions="Be brief", metadata={"a": "b"})
    want = said(tokenization, [{"role": "system", "content": "Be brief"}, USER], 12)
    assert one["output"][0]["content"][0]["text"] == want
    assert (one["status"], one["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (one["store"], one["metadata"], one["model"]) == (True, {"a": "b"}, "tiny")
    turns = [USER, {"role": "assistant", "content": want}, {"role": "user", "content": "And?"}]
    for router in (second, first):
        two = create(router, input="And?", previous_response_id=one["id"])
        text = said(tokenization, turns, 12)
        assert two["output"][0]["content"][0]["text"] == text
        assert two["previous_response_id"] == one["id"]
    turns += [{"role": "assistant", "content": text}, {"role": "user", "content": "So?"}]
    three = create(second, input=[{"role": "user", "content": "So?"}], previous_response_id=two["id"])
    assert three["output"][0]["content"][0]["text"] == said(tokenization, turns, 12)


def test_items_of_kept_responses_by_their_ids(service: Service, tokenization: Tokenization) -> None:
    """As Vercel's SDK sends them; at the other router, without a type, and of another tenant."""
    (first, second), _ = service
    one = create(first)
    (item,) = one["output"]
    text = item["content"][0]["text"]
    turns = [USER, {"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]
    for reference in ({"type": "item_reference", "id": item["id"]}, {"id": item["id"]}):
        two = create(second, input=[USER, reference, {"role": "user", "content": "And?"}])
        assert two["output"][0]["content"][0]["text"] == said(tokenization, turns, 12)
    asked = {"input": [USER, {"type": "item_reference", "id": item["id"]}]}
    foreign = first.http.post("/v1/responses", json=asked, headers={"authorization": f"Bearer {LEAD}"})
    assert (foreign.status_code, foreign.json()["error"]["param"]) == (404, "input")
    asked["input"][1]["id"] = item["id"] + "1"
    assert first.http.post("/v1/responses", json=asked).status_code == 404


def test_it_is_its_tenants_until_it_is_deleted(service: Service) -> None:
    (first, second), _ = service
    one = create(first)
    path, other = f"/v1/responses/{one['id']}", {"authorization": f"Bearer {LEAD}"}
    assert second.http.get(path).json() == one
    foreign = first.http.get(path, headers=other)
    assert (foreign.status_code, foreign.json()["error"]["code"]) == (404, "previous_response_not_found")
    assert first.http.delete(path, headers=other).status_code == 404
    asked = {"input": "a", "previous_response_id": one["id"]}
    stolen = second.http.post("/v1/responses", json=asked, headers=other)
    assert (stolen.status_code, stolen.json()["error"]["param"]) == (404, "previous_response_id")
    assert second.http.delete(path).json() == {"id": one["id"], "object": "response", "deleted": True}
    wait_until(lambda: first.http.get(path).status_code == 404)
    assert second.http.get(path).status_code == 404
    unkept = create(first, store=False)
    assert unkept["store"] is False
    assert first.http.get(f"/v1/responses/{unkept['id']}").status_code == 404
    assert first.http.post(path, json={}).status_code == 405


def test_openais_client_reads_a_stream(service: Service, tokenization: Tokenization) -> None:
    (first, _), _ = service
    with openai.OpenAI(base_url=f"{first.url}/v1", api_key=GOLD, max_retries=0) as client:
        asked: dict[str, Any] = {"model": "tiny", "input": "Hello there", "max_output_tokens": 12}
        events = list(client.responses.create(**asked, stream=True))
        text = said(tokenization, [USER], 12)
        kinds = [event.type for event in events]
        deltas = kinds.count("response.output_text.delta")
        assert kinds == [
            "response.created", "response.in_progress", "response.output_item.added",
            "response.content_part.added", *["response.output_text.delta"] * deltas,
            "response.output_text.done", "response.content_part.done", "response.output_item.done",
            "response.incomplete",
        ]  # fmt: skip
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
        last = events[-1].response
        assert (last.output_text, last.usage.output_tokens) == (text, 12)
        kept = client.responses.retrieve(last.id)
        assert kept.output_text == text
        again = client.responses.create(**asked)
        assert again.output_text == text


def test_log_probabilities_are_a_chats(service: Service) -> None:
    (first, _), _ = service
    asked = {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    (part,) = create(first, **asked)["output"][0]["content"]
    chat = {"messages": [USER], "max_tokens": 12, "logprobs": True, "top_logprobs": 2}
    (choice,) = first.http.post("/v1/chat/completions", json=chat).json()["choices"]
    assert len(part["logprobs"]) == 12
    assert part["logprobs"] == choice["logprobs"]["content"]
    assert create(first)["output"][0]["content"][0]["logprobs"] == []


def test_a_format_reaches_the_workers(service: Service) -> None:
    (first, _), worker = service
    before = len(worker.seen)
    create(first, text={"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}})
    starts = [message for message in worker.seen[before:] if isinstance(message, Prefill | Decode)]
    grammar = starts[0].request.sampling.grammar
    assert grammar is not None
    assert (grammar.kind, grammar.text) == (GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    assert "thoughts" in grammar.around  # which may come before
