"""anthropic: messages whole and streamed, tools, token counts, errors."""

from __future__ import annotations

import anthropic

from common import LONG, MODEL, QUESTION, TOKENS, URL, WEATHER, check_text, check_weather

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=60)
GREEDY = {"temperature": 0}  # newer versions have no argument for it
messages = [{"role": "user", "content": QUESTION}]

answer = client.messages.create(model=MODEL, messages=messages, max_tokens=TOKENS, extra_body=GREEDY)
text = answer.content[0].text
check_text(text)
assert answer.stop_reason in ("end_turn", "max_tokens")
with client.messages.stream(model=MODEL, messages=messages, max_tokens=TOKENS, extra_body=GREEDY) as stream:
    assert "".join(stream.text_stream) == text
    assert stream.get_final_message().usage.output_tokens == answer.usage.output_tokens
counted = client.messages.count_tokens(model=MODEL, messages=messages)
used = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
assert counted.input_tokens == used, (counted, answer.usage)
tool = {"name": "get_weather", "description": "The weather of a city.", "input_schema": WEATHER}
alone = {"disable_parallel_tool_use": True}
for choice in ({"type": "any", **alone}, {"type": "tool", "name": "get_weather", **alone}):
    called = client.messages.create(
        model=MODEL, messages=messages, max_tokens=LONG, extra_body=GREEDY, tools=[tool], tool_choice=choice
    )
    block = next(block for block in called.content if block.type == "tool_use")
    assert called.stop_reason == "tool_use", called.stop_reason
    check_weather(block.input)
history = [
    *messages,
    {"role": "assistant", "content": [block.model_dump()]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}]},
]
client.messages.create(model=MODEL, messages=history, max_tokens=4, tools=[tool], system="Be short.")
for error, arguments in (
    (anthropic.NotFoundError, {"model": "another", "messages": messages, "max_tokens": 1}),
    (anthropic.BadRequestError, {"model": MODEL, "messages": [], "max_tokens": 1}),
):
    try:
        client.messages.create(**arguments)
    except error as raised:
        assert raised.body["type"] == "error", raised.body
    else:
        raise AssertionError(f"{arguments} was answered")
