"""Tools and reasoning in chats: a router process, a worker that says what a test writes, OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.text.tokenization import Tokenization
from tests.router.conftest import start_router
from tests.support.fake_worker import FakeWorker
from tests.support.sse import sse_events
from tests.support.tokenizers import byte_level
from wire.messages.rooms import Decode, Prefill
from wire.records import Role

CHATS = "/v1/chat/completions"
CHAT: list[Any] = [{"role": "user", "content": "Hi"}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")
]
TEMPLATE_SIGN = "{#- <tool_call> -#}"
F, G = '{"name": "f", "arguments": {"a": [1, "x"]}}', '{"name": "g"}'
OUTPUT = f"<think>\nHm.\n</think>\n\nI see.\n<tool_call>\n{F}\n</tool_call>\n<tool_call>{G}</tool_call>"
ARGUMENTS = '{"a": [1, "x"]}'


class Scripted:
    """A router, and a worker that says `output` and ends."""

    def __init__(self, directory: Path) -> None:
        path = byte_level(directory / "model")
        config = json.loads((path / "tokenizer_config.json").read_text())
        template = TEMPLATE_SIGN + config["chat_template"]
        (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
        tokenization = Tokenization(path)
        self._tokenization = tokenization
        self._end = tokenization.added_ids()["<|im_end|>"]
        self.output = ""
        self.router = start_router(directory, path)
        self.worker = FakeWorker(
            Role.DECODE, self.router.mailbox, max_context=8192, token=self._token, eos_token=self._end
        )
        self.router.wait_for_workers(1)

    def post(self, **body: Any) -> Any:
        return self.router.http.post(CHATS, json={"messages": CHAT, **body})

    def choice(self, **body: Any) -> dict[str, Any]:
        answer = self.post(**body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()["choices"][0]
        return found

    def chunks(self, **body: Any) -> list[dict[str, Any]]:
        streamed = {"messages": CHAT, "stream": True, **body}
        with self.router.http.stream("POST", CHATS, json=streamed) as answer:
            assert answer.status_code == 200
            return [event.json["choices"][0] for event in list(sse_events(answer.iter_lines()))[:-1]]

    def _token(self, prompt: bytes, choice: int, position: int) -> int:
        tokens = [*self._tokenization.encode(self.output, add_special_tokens=False), self._end]
        return tokens[min(position, len(tokens) - 1)]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    made = Scripted(tmp_path_factory.mktemp("tools"))
    yield made
    made.worker.close()
    assert made.router.stop() == 0


def test_whole(scripted: Scripted) -> None:
    scripted.output = OUTPUT
    choice = scripted.choice(tools=TOOLS)
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "I see.")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "f", "arguments": ARGUMENTS},
        {"name": "g", "arguments": "{}"},
    ]
    assert {call["type"] for call in message["tool_calls"]} == {"function"}
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    # What the message says can be given back.
    history = [
        *CHAT,
        message,
        {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"},
    ]
    assert scripted.post(messages=history, tools=TOOLS).status_code == 200


def test_a_call_that_nests_as_deep_as_any_can_be_given_back(scripted: Scripted) -> None:
    arguments = '{"a": ' + "[" * 63 + "]" * 63 + "}"
    scripted.output = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    message = scripted.choice(tools=TOOLS)["message"]
    (call,) = message["tool_calls"]
    assert call["function"]["arguments"] == arguments
    history = [*CHAT, message, {"role": "tool", "tool_call_id": call["id"], "content": "3"}]
    answer = scripted.post(messages=history, tools=TOOLS)
    assert answer.status_code == 200, answer.text


def test_streamed(scripted: Scripted) -> None:
    scripted.output = OUTPUT
    of_both = scripted.chunks(tools=TOOLS, n=2, logprobs=True)
    chunks = [chunk for chunk in of_both if chunk["index"] == 1]
    assert len(chunks) == len(of_both) / 2
    assert all(len(chunk["logprobs"]["content"]) == 1 for chunk in chunks[:-1])
    assert chunks[0]["delta"]["role"] == "assistant"
    deltas = [chunk["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("content", "") for delta in deltas) == "I see."
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    begun = [call for call in calls if "id" in call]
    assert [(call["index"], call["type"], call["function"]["name"]) for call in begun] == [
        (0, "function", "f"),
        (1, "function", "g"),
    ]
    first = [call["function"]["arguments"] for call in calls if call["index"] == 0]
    assert "".join(first) == ARGUMENTS
    assert len(first) > 3  # they come as the model writes them
    assert [chunk["finish_reason"] for chunk in chunks[-2:]] == [None, "tool_calls"]


def test_the_official_client_reads_a_stream(scripted: Scripted) -> None:
    scripted.output = OUTPUT
    with scripted.router.openai().chat.completions.stream(model="tiny", messages=CHAT, tools=TOOLS) as stream:
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I see."
    assert choice.message.tool_calls is not None
    assert [call.function.arguments for call in choice.message.tool_calls] == [ARGUMENTS, "{}"]


def test_a_stream_goes_on_within_a_call(scripted: Scripted) -> None:
    scripted.output = OUTPUT
    body = {"messages": CHAT, "stream": True, "tools": TOOLS, "seed": 1}
    headers = {"Accept": "text/event-stream"}
    with scripted.router.http.stream("POST", CHATS, json=body, headers=headers) as answer:
        events = list(sse_events(answer.iter_lines()))[:-1]
    within = next(n for n, event in enumerate(events) if '"arguments":"[' in event.data)

    def deltas(of: list[Any]) -> list[Any]:
        said = [event.json["choices"][0]["delta"] for event in of]
        return [delta for delta in said if delta != {"content": ""}]

    for at in (within, len(events) - 2):
        headers["Last-Event-ID"] = events[at].id
        with scripted.router.http.stream("POST", CHATS, json=body, headers=headers) as answer:
            rest = list(sse_events(answer.iter_lines()))[:-1]
        said, want = deltas(rest), deltas(events[at + 1 :])
        ids = [
            call.pop("id") for delta in (*said, *want) for call in delta.get("tool_calls", []) if "id" in call
        ]
        assert len(ids) == (2 if at == within else 0)
        assert said == want
        assert rest[-1].json["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({}, ("Hm.", OUTPUT.partition("</think>\n\n")[2], 0)),
        ({"tools": TOOLS, "tool_choice": "none"}, ("Hm.", OUTPUT.partition("</think>\n\n")[2], 0)),
        ({"tools": TOOLS, "include_reasoning": False}, (None, "I see.", 2)),
        ({"tools": TOOLS, "parallel_tool_calls": False}, ("Hm.", "I see.", 1)),
        ({"tools": TOOLS, "separate_reasoning": False}, (None, "<think>\nHm.\n</think>\n\nI see.", 2)),
    ],
)
def test_fields_say_what_is_told(scripted: Scripted, fields: dict[str, Any], want: Any) -> None:
    scripted.output = OUTPUT
    choice = scripted.choice(**fields)
    message = choice["message"]
    calls = message.get("tool_calls", [])
    assert (message.get("reasoning_content"), message["content"], len(calls)) == want
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")


def test_a_broken_call_is_text(scripted: Scripted) -> None:
    scripted.output = '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>'
    choice = scripted.choice(tools=TOOLS)
    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {"role": "assistant", "content": scripted.output, "refusal": None}
    chunks = scripted.chunks(tools=TOOLS)
    assert chunks[-1]["finish_reason"] == "stop"
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == scripted.output


def test_a_call_that_is_cut_has_no_finish_of_its_own(scripted: Scripted) -> None:
    scripted.output = '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * 100
    choice = scripted.choice(tools=TOOLS, max_tokens=60)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith("<tool_call>")
    chunks = scripted.chunks(tools=TOOLS, max_tokens=60)
    assert chunks[-1]["finish_reason"] == "length"
    assert not any(chunk["delta"].get("content") for chunk in chunks)


NAMED = {"type": "function", "function": {"name": "g"}}
ONLY_G = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
STRICT: list[Any] = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]


@pytest.mark.parametrize(
    ("fields", "there", "absent"),
    [
        ({"tools": TOOLS}, (), ("",)),
        ({"tools": STRICT, "tool_choice": "none"}, (), ("",)),
        ({"tools": TOOLS, "tool_choice": "required"}, ('\\"f\\"', '\\"g\\"', "call)*"), ("@body",)),
        (
            {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
            ('\\"f\\"',),
            ("call)*",),
        ),
        ({"tools": TOOLS, "tool_choice": NAMED}, ('\\"g\\"',), ('\\"f\\"', "call)*")),
        ({"tools": TOOLS, "tool_choice": ONLY_G}, ('\\"g\\"',), ('\\"f\\"',)),
        ({"tools": STRICT}, ('"lenient": false', '"lenient": true', "triggered"), ("@body",)),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, ("@body", '\\"f\\"'), ()),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            ('\\"f\\"', '\\"g\\"', "call)*"),
            ("@body",),
        ),
    ],
)
def test_grammars_demand_calls(
    scripted: Scripted, fields: dict[str, Any], there: tuple[str, ...], absent: tuple[str, ...]
) -> None:
    scripted.output = OUTPUT
    before = len(scripted.worker.seen)
    scripted.choice(**fields)
    starts = [one for one in scripted.worker.seen[before:] if isinstance(one, Decode)]
    grammar = starts[0].request.sampling.grammar
    lark = "" if grammar is None else grammar.around or grammar.text
    assert all(text in lark for text in there)
    assert not any(text in lark for text in absent if text or lark)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [{"type": "custom"}]}, "tools", "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools", "tools.0.function"),
        ({"tools": [{"function": {"name": ""}}]}, "tools", "tools.0.function.name"),
        ({"tools": [{"function": {"name": "get weather"}}]}, "tools", "tools.0.function.name"),
        ({"tools": [{"function": {"name": "f", "parameters": 3}}]}, "tools", "parameters"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        (
            {
                "tools": [{"function": {"name": "f", "parameters": {"properties": {"a": {"type": "x"}}}}}],
                "tool_choice": "required",
            },
            "tools",
            "tools.0.function.parameters: ",
        ),
        ({"tools": TOOLS, "tool_choice": "often"}, "tool_choice", "required"),
        (
            {"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a+"}},
            "structured_outputs.regex",
            "a demanded call",
        ),
        (
            {
                "tools": TOOLS,
                "tool_choice": {"type": "function", "function": {"name": "f"}},
                "guided_json": {"type": "object"},
            },
            "guided_json",
            "a demanded call",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}},
            "tool_choice",
            "'h'",
        ),
    ],
)
def test_wrong_fields_are_named(scripted: Scripted, fields: dict[str, Any], param: str, words: str) -> None:
    before = len(scripted.worker.seen)
    answer = scripted.post(**fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert not any(isinstance(message, Prefill | Decode) for message in scripted.worker.seen[before:])
