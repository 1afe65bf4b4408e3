"""openai (Python): every endpoint, whole and streamed."""

from __future__ import annotations

from typing import Literal

import openai
from pydantic import BaseModel, Field

from common import LONG, MODEL, QUESTION, TOKENS, TOOL, URL, WEATHER, check_text, check_weather

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60)
ASK = [{"role": "user", "content": QUESTION}]


class Weather(BaseModel):
    """As the tool's parameters."""

    city: Literal["Bern", "Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


def chats() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=TOKENS, temperature=0)
    text = answer.choices[0].message.content
    check_text(text)
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= TOKENS
    stream = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=TOKENS, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert "".join(one.choices[0].delta.content or "" for one in chunks if one.choices) == text
    assert chunks[-1].usage == answer.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    several = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=4, n=3, seed=1, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert all(len(one.top_logprobs) == 2 for choice in several.choices for one in choice.logprobs.content)


def fields_that_change_nothing() -> None:
    client.chat.completions.create(
        model=MODEL, messages=ASK, max_completion_tokens=2, store=True, metadata={"a": "b"}, user="me",
        parallel_tool_calls=True, reasoning_effort="low", service_tier="auto", logprobs=True, top_logprobs=0,
        safety_identifier="x",
    )  # fmt: skip


def structured_output() -> None:
    parsed = client.chat.completions.parse(
        model=MODEL, messages=ASK, response_format=Weather, max_tokens=LONG, temperature=1, seed=1
    )
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, response_format=schema, max_tokens=LONG
    )
    check_weather(answer.choices[0].message.content or "")


def tools() -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        answer = client.chat.completions.create(
            model=MODEL, messages=ASK, tools=[TOOL], tool_choice=choice, max_tokens=LONG, temperature=1,
            seed=1, parallel_tool_calls=False,
        )  # fmt: skip
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.function.name == "get_weather"
        check_weather(call.function.arguments)
        if choice == "required":
            assert answer.choices[0].finish_reason == "tool_calls"
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, tools=[TOOL], tool_choice="required", max_tokens=LONG, temperature=1,
        seed=1, parallel_tool_calls=False,
    ) as stream:  # fmt: skip
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or []
    check_weather(call.function.arguments)
    history = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call.to_dict()]},
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    client.chat.completions.create(model=MODEL, messages=history, tools=[TOOL], max_tokens=4)
    client.chat.completions.create(model=MODEL, messages=ASK, tools=[TOOL], tool_choice="none", max_tokens=4)
    client.chat.completions.create(model=MODEL, messages=ASK, tools=[TOOL], max_tokens=4)


def completions() -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["one", "two"], max_tokens=3, logprobs=1, echo=True
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[1].text.startswith("two")
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    scored = client.completions.create(model=MODEL, prompt="one two", max_tokens=0, logprobs=1, echo=True)
    assert scored.choices[0].text == "one two"
    stream = client.completions.create(model=MODEL, prompt="one", max_tokens=5, stream=True)
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] in ("length", "stop")


def responses() -> None:
    first = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=TOKENS, temperature=0)
    check_text(first.output_text)
    second = client.responses.create(
        model=MODEL, input="And then?", previous_response_id=first.id, max_output_tokens=8
    )
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens
    kinds = []
    text = ""
    with client.responses.create(
        model=MODEL, input=QUESTION, max_output_tokens=TOKENS, temperature=0, stream=True
    ) as stream:
        for event in stream:
            kinds.append(event.type)
            text += event.delta if event.type == "response.output_text.delta" else ""
    assert text == first.output_text
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    tool = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}
    called = client.responses.create(
        model=MODEL,
        input=QUESTION,
        tools=[tool],
        tool_choice="required",
        max_output_tokens=LONG,
        temperature=0,
    )
    check_weather(next(item for item in called.output if item.type == "function_call").arguments)
    parsed = client.responses.parse(
        model=MODEL, input=QUESTION, text_format=Weather, max_output_tokens=LONG, temperature=0
    )
    assert isinstance(parsed.output_parsed, Weather)


def embeddings() -> None:
    found = client.embeddings.create(model=MODEL, input=["one", "two"])
    assert [one.index for one in found.data] == [0, 1]
    assert len(found.data[0].embedding) == len(found.data[1].embedding) > 8


def errors() -> None:
    for error, arguments in (
        (openai.NotFoundError, {"model": "another", "messages": ASK}),
        (openai.BadRequestError, {"model": MODEL, "messages": ASK, "temperature": -1}),
        (openai.BadRequestError, {"model": MODEL, "messages": [{"role": "wizard", "content": "a"}]}),
    ):
        try:
            client.chat.completions.create(**arguments)
        except error as raised:
            assert raised.body["message"], raised.body
        else:
            raise AssertionError(f"{arguments} was answered")
    try:
        client.responses.retrieve("resp_nobody")
    except openai.NotFoundError:
        pass
    else:
        raise AssertionError("an unknown response was found")


for check in (
    models, chats, fields_that_change_nothing, structured_output, tools, completions, responses, embeddings,
    errors,
):  # fmt: skip
    check()
