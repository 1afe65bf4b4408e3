"""The fields that ask for structured output: what reaches the workers, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.router.conftest import RouterProcess, start_router
from tests.support.fake_worker import FakeWorker
from wire.messages.rooms import Decode, Prefill
from wire.records import Role
from wire.request import Grammar, GrammarKind

Service = tuple[RouterProcess, FakeWorker]
CHAT = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NAMED = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
ANY = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')
OF_SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
CHOICES = Grammar(GrammarKind.LARK, 'start: "yes" | "no"')
LETTERS = Grammar(GrammarKind.REGEX, "[a-z]+")
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "yes"}}
OF_TAG = Grammar(GrammarKind.LARK, 'start: "yes" \n')
GBNF, LARK = 'root ::= "a" | "b"', 'start: "a" | "b"'


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Service]:
    router = start_router(tmp_path_factory.mktemp("structured"), model)
    worker = FakeWorker(Role.DECODE, router.mailbox, max_context=512)
    router.wait_for_workers(1)
    yield router, worker
    worker.close()
    assert router.stop() == 0


def grammars_of(service: Service, path: str, body: dict[str, Any]) -> list[Grammar | None]:
    """Those of the start messages that a request leads to."""
    router, worker = service
    before = len(worker.seen)
    answer = router.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    starts = {m.room: m for m in worker.seen[before:] if isinstance(m, Prefill | Decode)}
    return [message.request.sampling.grammar for message in starts.values()]


FIELDS: list[tuple[dict[str, Any], Grammar | None]] = [
    ({}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, ANY),
    ({"response_format": NAMED}, OF_SCHEMA),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, ANY),
    ({"guided_json": SCHEMA}, OF_SCHEMA),
    ({"guided_json": json.dumps(SCHEMA)}, OF_SCHEMA),
    ({"guided_regex": "[a-z]+"}, LETTERS),
    ({"guided_choice": ["yes", "no"]}, CHOICES),
    ({"guided_grammar": LARK}, Grammar(GrammarKind.LARK, LARK)),
    ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA),
    ({"structured_outputs": {"json_object": True}}, ANY),
    ({"structured_outputs": {"regex": "[a-z]+"}}, LETTERS),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, CHOICES),
    ({"structured_outputs": {"grammar": LARK}}, Grammar(GrammarKind.LARK, LARK)),
    ({"structured_outputs": {}}, None),
    ({"json_schema": json.dumps(SCHEMA)}, OF_SCHEMA),
    ({"regex": "[a-z]+"}, LETTERS),
    ({"ebnf": GBNF}, Grammar(GrammarKind.LARK, '%llguidance {}\n\nstart: "a"\n     | "b"\n\n')),
    ({"response_format": {"type": "text"}, "regex": "[a-z]+"}, LETTERS),
    ({"response_format": TAG}, OF_TAG),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, OF_TAG),
    ({"structural_tag": json.dumps(TAG)}, OF_TAG),
    ({"structural_tag": TAG}, OF_TAG),
]


@pytest.mark.parametrize(("fields", "grammar"), FIELDS, ids=[str(fields)[:60] for fields, _ in FIELDS])
def test_every_field_reaches_the_workers_at_every_door(
    service: Service, fields: dict[str, Any], grammar: Grammar | None
) -> None:
    chat = {"messages": CHAT, "max_tokens": 2, "n": 2, **fields}
    in_chat = grammars_of(service, "/v1/chat/completions", chat)
    assert [one and replace(one, around="") for one in in_chat] == [grammar] * 2
    assert all("@body" in one.around for one in in_chat if one is not None)  # the model may think before it
    completion = {"prompt": ["Hi", "Ho"], "max_tokens": 2, **fields}
    assert grammars_of(service, "/v1/completions", completion) == [grammar] * 2
    native = {"text": "Hi", "sampling_params": {"max_new_tokens": 2, **fields}}
    assert grammars_of(service, "/generate", native) == [grammar]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "belongs to"),
        ({"response_format": {**NAMED, "type": "json_object"}}, "response_format.json_schema", "belongs to"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"items": {"type": "x"}}}}},
            "response_format.json_schema.schema",
            "response_format.json_schema.schema.items: Invalid type: x",
        ),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_json": 1}, "guided_json", "guided_json"),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"ebnf": 'x ::= "a"'}, "ebnf", "No 'root' rule"),
        ({"guided_grammar": "start: x"}, "guided_grammar", "unknown name"),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex", "unclosed"),
        (
            {"structured_outputs": {"choice": ["a"], "regex": "a"}},
            "structured_outputs",
            "cannot be given together",
        ),
        ({"regex": "a", "response_format": NAMED}, "regex", "together with response_format"),
    ],
)
def test_what_is_wrong_is_named_at_every_door(
    service: Service, fields: dict[str, Any], param: str, words: str
) -> None:
    router, worker = service
    before = len(worker.seen)
    for path, body in (
        ("/v1/chat/completions", {"messages": CHAT, **fields}),
        ("/v1/completions", {"prompt": "Hi", "stream": True, **fields}),
        ("/generate", {"text": "Hi", "sampling_params": fields}),
    ):
        answer = router.http.post(path, json=body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == param
        assert words in error["message"]
    assert not any(isinstance(message, Prefill | Decode) for message in worker.seen[before:])
